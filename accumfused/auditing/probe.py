"""Asks whether a loss is a sum over samples: by its second derivative, and by a second run, whole and in halves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from accumfused.auditing.losses import Term, couples
from accumfused.auditing.once import TOLERANCES, Subject, coupling_of, samples_of, split
from accumfused.auditing.randomness import Generators


class Probe:
    """Looks at one micro-batch. It holds a copy of the model, made before any hook of ours is on it."""

    def __init__(self, model: Module, generators: Generators) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._generators, self._is_coupled, self._is_done = generators, False, False
        self._subject: Subject | None = None
        self.note = ""
        try:
            self._subject = Subject(inner, _call, None, generators)
        except (RuntimeError, ValueError) as error:
            self.note = f"losses within the model were not looked at: {error}"
        else:
            self._subject.be_quiet()

    def causes(self, terms: Sequence[Term], outputs: Sequence[Tensor]) -> set[str]:
        """The causes of a loss that is not a sum over samples; the first time, then none.

        Args:
            terms: of the loss, before its backward.
            outputs: of the model.
        """
        if self._is_done:
            return set()
        self._is_done = True
        coupled = [couples(term, outputs) for term in terms]
        if not any(coupled) and not self._is_coupled:
            return set()
        return {"negatives" if all(coupled) or len(terms) == 1 else "auxiliary"}

    def inputs(self, args: Any, kwargs: Any) -> None:
        """Runs the model with the inputs of a forward pass, if it returns a loss. Generators stay as they are."""
        if self._subject is None:
            return
        states = self._generators.states()
        try:
            inputs = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            size = samples_of(inputs) // 2 * 2
            if size:
                self._is_coupled = _is_coupled(self._subject, split(inputs, 1, size)[0], split(inputs, 2, size))
        except Exception as error:  # inputs without samples, a loss without a graph: whatever the model says to halves
            self.note = f"losses within the model were not looked at: {error}"
        finally:
            self._subject = None
            self._generators.restore(states)


def _is_coupled(subject: Subject, whole: Any, halves: Sequence[Any]) -> bool:
    """Whether a number that the model returns is not a sum (or mean) over the samples of its inputs."""
    outputs = subject.forward([whole])[0]
    numbers = [index for index, leaf in enumerate(outputs) if leaf.numel() == 1 and leaf.requires_grad]
    if not numbers or not _are_rows(outputs, subject.forward(halves)):
        return False
    for index in numbers:
        subject.loss_fn = functools.partial(_number, index)
        one, pieces = subject.run([whole])[0], subject.run(halves)
        is_random = any(piece.is_random for piece in (one, *pieces))
        if not is_random and coupling_of(one, pieces, subject.tolerance, subject.names):
            return True
    return False


def _are_rows(whole: list[Tensor], halves: Sequence[list[Tensor]]) -> bool:
    """Whether each output belongs to a sample: else the inputs' first dimension is something else."""
    for index, output in enumerate(whole):
        if output.is_floating_point() and output.numel() > 1:
            parts = torch.cat([half[index] for half in halves])
            if parts.shape != output.shape:
                return False
            off = float((parts - output).detach().double().norm())
            if off > TOLERANCES.get(output.dtype, 1e-4) * float(output.detach().double().norm()):
                return False
    return True


def _call(model: Any, inputs: Any) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)


def _number(index: int, model: Any, inputs: Any) -> Tensor:
    return leaves(_call(model, inputs))[index]


def leaves(output: Any) -> list[Tensor]:
    """The tensors in a model's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
