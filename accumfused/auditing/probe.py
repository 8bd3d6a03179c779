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
from accumfused.auditing.once import Subject, coupling_of
from accumfused.auditing.randomness import Generators
from accumfused.auditing.samples import samples_of, split


class Probe:
    """Looks at the first micro-batch of several samples."""

    def __init__(self, model: Module, generators: Generators) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._generators = generators
        self._is_coupled: bool | None = None  # None: not looked at
        self._is_done = False
        self.note = ""

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

    def see(self, inputs: tuple[Any, Any], outputs: Sequence[Tensor]) -> None:
        """If the model returns a loss, runs a copy of it with the same inputs. Generators stay as they are.

        Args:
            inputs: args and kwargs of its forward pass.
        """
        if self._is_coupled is not None or not any(_is_number(output) for output in outputs):
            return
        states, self._is_coupled = self._generators.states(), False
        try:
            size = samples_of(inputs) // 2 * 2
            if size:
                subject = Subject(self._model, _call, self._generators, Module.float)
                subject.be_quiet()
                inputs = tree_map(_widened, inputs)
                self._is_coupled = _is_coupled(subject, split(inputs, 1, size)[0], split(inputs, 2, size))
        except Exception as error:  # it cannot be copied, has other inputs than samples, or does not like halves
            self.note = f"losses within the model were not looked at: {error}"
        finally:
            self._generators.restore(states)


def _is_coupled(subject: Subject, whole: Any, halves: Sequence[Any]) -> bool:
    """Whether a number that the model returns is not a sum (or mean) over the samples of its inputs."""
    outputs = subject.forward([whole])[0]
    if not _are_rows(outputs, subject.forward(halves), subject.tolerance):
        return False
    for index in (index for index, output in enumerate(outputs) if _is_number(output)):
        subject.loss_fn = functools.partial(_number, index)
        one, pieces = subject.run([whole])[0], subject.run(halves)
        is_random = any(piece.is_random for piece in (one, *pieces))
        if not is_random and coupling_of(one, pieces, subject.tolerance, subject.names):
            return True
    return False


def _are_rows(whole: list[Tensor], halves: Sequence[list[Tensor]], tolerance: float) -> bool:
    """Whether each output belongs to a sample: else the inputs' first dimension is something else."""
    for index, output in enumerate(whole):
        if output.is_floating_point() and output.numel() > 1:
            parts = torch.cat([half[index] for half in halves])
            if parts.shape != output.shape:
                return False
            off = float((parts - output).detach().double().norm())
            if off > tolerance * float(output.detach().double().norm()):
                return False
    return True


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf


def _is_number(output: Tensor) -> bool:
    return output.numel() == 1 and output.requires_grad


def _call(model: Any, inputs: Any) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)


def _number(index: int, model: Any, inputs: Any) -> Tensor:
    return leaves(_call(model, inputs))[index]


def leaves(output: Any) -> list[Tensor]:
    """The tensors in a model's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
