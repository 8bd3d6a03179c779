"""The window computed at once, where the model itself returns its loss: on a copy, from the same random state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from accumfused.auditing.fit import Grads, added, differences, weights_of
from accumfused.auditing.graph import Reading, factors_until
from accumfused.auditing.once import Subject
from accumfused.auditing.randomness import Generators
from accumfused.auditing.rows import leaves
from accumfused.auditing.window import DIFFERENT, EQUAL, LOST, SCALED, TOLERANCE, MicroBatch, Window, is_close

_IGNORED = -100  # the target that torch's cross entropy leaves out


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

    def see(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call of a layer, or of the model."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if inner is self._model and any(leaf.numel() == 1 and leaf.requires_grad for leaf in leaves(output)):
            self._seen.append(((args, kwargs), self._autocast(), leaves(output)))
        else:
            self._seen.append((None, None, []))

    def follow(self, loss: Tensor, reading: Reading, micro_batch: MicroBatch) -> None:
        """Before backward: whether the loss is what one call has returned."""
        if len(self._seen) == 1 and not reading.spans:
            inputs, dtype, outputs = self._seen[0]
            found = factors_until(loss, outputs) if outputs else None
            micro_batch.call = None if found is None else Call(inputs, dtype, *found)
        self.forget()

    def forget(self) -> None:
        """Lets go of the loop's tensors."""
        self._seen = []

    def judge(self, window: Window, taken: Grads, ids: Sequence[int], names: Sequence[str]) -> None:
        """Gives the window the verdict of this comparison, if it can be made."""
        calls = [each.call for each in window.micro_batches]
        if len(calls) < 2 or not all(calls) or "weights_changed" in window.flags:
            return
        states = self._generators.states()
        try:
            self._judge(window, calls, taken, ids, names)
        except Exception as error:  # inputs of other forms, or a model that cannot be copied
            self.note = f"the window could not be computed at once: {error}"
        finally:
            self._generators.restore(states)

    @property
    def _device(self) -> str:
        return next(self._model.parameters()).device.type

    def _autocast(self) -> torch.dtype | None:
        return torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None

    def _judge(self, window: Window, calls: list[Call], taken: Grads, ids: Sequence[int], names: Sequence[str]) -> None:
        inputs, dtype = [call.inputs for call in calls], calls[0].autocast

        def call(model: Any, given: Any) -> Any:
            with torch.autocast(self._device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                return model(*given[0], **given[1])

        subject = Subject(
            self._model, lambda model, given: leaves(call(model, given))[calls[0].index], self._generators
        )
        position = {id(param): i for i, param in enumerate(p for p in self._model.parameters() if p.requires_grad)}

        def by_track(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            return [grads[position[param]] if param in position else None for param in ids]

        together = joined(inputs)
        if not subject.are_rows(call, together, inputs):
            self.note = "outputs of the window at once are not those of its micro-batches: its inputs have other rows"
            return
        subject.set_aside(dropout=True, batch_norm="batch_norm" in self._ignore)
        whole, pieces = subject.run([together])[0], subject.run(inputs)
        if whole.is_random or any(piece.is_random for piece in pieces):
            self.note = "the model draws random numbers outside of dropout: the window was not computed at once"
            return
        large = [by_track(whole.grads)]
        if any(g is None and w is not None for g, w in zip(large[0], taken, strict=True)):
            self.note = "a copy of the model does not reach its own parameters: the window was not computed at once"
            return
        factors = [math.prod(call.factors) for call in calls]
        if subject.has_set_aside:  # what the loop would have got without it
            weights = [weight * factor for weight, factor in zip(window.weights, factors, strict=True)]
            taken = added([by_track(piece.grads) for piece in pieces], weights)
        scales, _ = weights_of(large, taken, [True])
        own = [factor for factor in calls[0].factors if not is_close(abs(factor), 1 / len(calls))]
        undone = math.prod(factor for factor in own if not is_close(factor, len(calls)))
        best = undone if is_close(scales[0], undone) else math.prod(own)
        window.fits = differences(large, [best], taken, names)
        ratio, window.ratio, window.is_decided = window.ratio, scales[0] / best, True
        off = differences(large, scales, taken, names)[0].difference
        is_foreign = window.residual > TOLERANCE or abs(window.stale) > LOST  # something else is in the step's gradient
        if off > subject.tolerance or is_foreign:
            window.verdict = DIFFERENT
        elif not is_close(window.ratio, 1.0):
            window.verdict = SCALED
        elif window.verdict == SCALED and not window.reasons:
            window.ratio = ratio  # the loss itself is divided once more
        else:
            window.verdict = EQUAL


def joined(inputs: Sequence[Any]) -> Any:
    """Inputs of several calls as those of one: tensors joined along their first dimension.

    Raises:
        ValueError: they cannot be.
    """
    flat = [tree_flatten(each) for each in inputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("its inputs have several forms")
    is_text = any(isinstance(each, Mapping) and "labels" in each for each in (inputs[0][1], *inputs[0][0]))
    names = [str(path[-1]) for path, _ in tree_flatten_with_path(inputs[0])[0]]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten(
        [_joined(name, column, is_text) for name, column in zip(names, columns, strict=True)], flat[0][1]
    )


def _joined(name: str, column: Sequence[Any], is_text: bool) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or first.ndim == 0:
        if any(type(each) is not type(first) or bool(each != first) for each in column):
            raise ValueError(f"its input {name} differs between micro-batches")
        return first
    if len({each.shape[1:] for each in column}) > 1:
        if not is_text or first.ndim != 2 or first.is_floating_point():
            raise ValueError(f"its input {name} has several shapes")
        width, filler = max(each.shape[1] for each in column), _IGNORED if "labels" in name else 0
        column = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=filler) for each in column]
    return torch.cat(list(column))
