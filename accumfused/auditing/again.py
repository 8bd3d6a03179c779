"""The window computed at once, where the model itself returns its loss: on a copy, from the same random state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accumfused.auditing.fit import Grads, added
from accumfused.auditing.graph import Reading, factors_until
from accumfused.auditing.once import Subject
from accumfused.auditing.passes import Pass
from accumfused.auditing.randomness import Generators
from accumfused.auditing.rows import copied, leaves
from accumfused.auditing.samples import joined
from accumfused.auditing.step import Step, decide


@dataclass
class Call:
    """A model's call whose output is the loss, but for factors.

    Args:
        autocast: its dtype, if it was on.
        index: of the loss among the output's tensors.
    """

    inputs: Any
    autocast: torch.dtype | None
    index: int
    factors: list[float]


class Calls:
    """Notes the calls of a model that return a loss, and repeats them with the window's samples at once.

    Args:
        ignore: causes that do not count: layers that make samples depend on each other are switched off.
    """

    def __init__(self, model: Module, generators: Generators, ignore: set[str]) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._generators = generators
        self._seen: list[tuple[Any, Any, list[Tensor]]] = []  # inputs, dtype and outputs, since the last backward
        self._ignore = ignore
        self.note = ""

    def see(self, module: Module, inputs: Any, output: Any) -> None:
        """An outermost call of a layer, or of the model."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if inner is self._model and any(leaf.numel() == 1 and leaf.requires_grad for leaf in leaves(output)):
            self._seen.append((inputs, self._autocast(), leaves(output)))
        else:
            self._seen.append((None, None, []))

    def follow(self, loss: Tensor, reading: Reading, micro_batch: Pass) -> None:
        """Before backward: whether the loss is what one call has returned."""
        if len(self._seen) == 1 and not reading.spans:
            inputs, dtype, outputs = self._seen[0]
            found = factors_until(loss, outputs) if outputs else None
            micro_batch.call = None if found is None else Call(inputs, dtype, *found)
        self.forget()

    def forget(self) -> None:
        """Lets go of the loop's tensors."""
        self._seen = []

    def judge(self, step: Step, taken: Grads, ids: Sequence[int], names: Sequence[str], expected: int) -> None:
        """Gives the window the verdict of this comparison, if it can be made."""
        calls = [each.call for each in step.passes]
        if len(calls) < 2 or not all(calls) or step.losses > 1 or "weights_changed" in step.flags:
            return
        states = self._generators.states()
        try:
            self._judge(step, calls, taken, ids, names, expected)
        except Exception as error:  # also a model that cannot be copied
            self.note = f"the window could not be computed at once: {type(error).__name__}: {error}"
        finally:
            self._generators.restore(states)

    @property
    def _device(self) -> str:
        return next(self._model.parameters()).device.type

    def _autocast(self) -> torch.dtype | None:
        return torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None

    def _judge(
        self, step: Step, calls: list[Call], taken: Grads, ids: Sequence[int], names: Sequence[str], expected: int
    ) -> None:
        inputs, dtype = [call.inputs for call in calls], calls[0].autocast

        def call(model: Any, given: Any) -> Any:
            args, kwargs = copied(given)  # the model may take things out of its own
            with torch.autocast(self._device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                return model(*args, **kwargs)

        subject = Subject(
            self._model, lambda model, given: leaves(call(model, given))[calls[0].index], self._generators
        )
        position = {id(param): i for i, param in enumerate(p for p in self._model.parameters() if p.requires_grad)}

        def by_track(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            return [grads[position[param]] if param in position else None for param in ids]

        together = joined(inputs)
        if not subject.are_rows(call, together, inputs):
            raise ValueError("its outputs are not those of the micro-batches")
        subject.set_aside(dropout=True, batch_norm="batch_norm" in self._ignore)
        whole, *pieces = subject.run([together]) + subject.run(inputs)
        if any(piece.micro_batch.is_random for piece in (whole, *pieces)):
            raise ValueError("the model draws random numbers outside of dropout")
        if any(g is None and w is not None for g, w in zip(by_track(whole.part.grads), taken, strict=True)):
            raise ValueError("a copy of the model does not reach its own parameters")
        if subject.has_set_aside:  # what the loop would have got without it
            weights = [weight * math.prod(call.factors) for weight, call in zip(step.weights, calls, strict=True)]
            taken = added([by_track(piece.part.grads) for piece in pieces], weights)
        part = replace(whole.part, grads=by_track(whole.part.grads))
        if whole.micro_batch.reading.unknown:
            part.terms = []
        factors = [call.factors for call in calls]
        decide(step, part, taken, names, subject.tolerance, expected=expected, factors=factors)
