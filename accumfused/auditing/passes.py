"""Backward passes, those of a step that is still to come, and which of them are losses of one micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from accumfused.auditing.graph import Reading, Term, main_of


@dataclass
class Pass:
    """One backward pass."""

    reading: Reading = field(default_factory=lambda: Reading(unknown=["its backward() was not seen"]))
    samples: int = 0  # of the model's last call; 0: unknown
    rank: int = 0
    is_random: bool = False  # forward drew random numbers
    has_batch_norm: bool = False  # in training mode
    is_used: bool = False  # a step has taken it
    loss: int = 0  # which of its micro-batch's losses, if each has a backward pass of its own
    modules: frozenset[int] = frozenset()  # that were called for it, outermost ones, by id
    inputs: Tensor | None = None  # of the first of them, until the step
    grads: dict[int, Tensor] = field(default_factory=dict)  # on the host, by parameter, until the step
    call: Any = None  # of the model, if it has returned the loss
    others: list[Term] = field(default_factory=list)  # terms without the divisions of the main one
    grads_of_others: dict[int, Tensor] = field(default_factory=dict)

    @property
    def main(self) -> Term:
        """The term that counts samples or tokens."""
        return main_of(self.reading.terms) or Term("", [], [], mean_of=float(self.samples or 1), is_mean=True)


@dataclass
class Opened:
    """What is seen of a window before its step.

    Args:
        flags: what happened, with details, by the name of the cause.
        is_unscaled: a GradScaler has unscaled the gradients.
        before_clip: the gradients that a clip, or a norm for a log, has found.
        stale: p.grad as the window found it, by parameter.
        reset: micro-batches before this one were gone from p.grad.
        is_for_inputs: these had gradients of inputs, too, and may have been there for those.
        sums: of each parameter, at the window's first backward.
    """

    passes: list[Pass] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    is_unscaled: bool = False
    before_clip: list[Tensor | None] | None = None
    is_clipped: bool = False
    stale: dict[int, Tensor] = field(default_factory=dict)
    reset: int = 0
    is_for_inputs: bool = False
    sums: Tensor | None = None


def number_losses(passes: Sequence[Pass], expected: int | None, losses: int) -> None:
    """Numbers the losses of each micro-batch of a window, where several have a backward pass each.

    They repeat in turn, or one after another, and differ: in their form or sign, in the parameters that they reach, in
    the modules that were called, or they come from samples that were there before.

    Args:
        expected: gradient_accumulation_steps, if it is known: as many passes are as many micro-batches.
        losses: of each micro-batch, in windows before.
    """
    own = [each for each in passes if not each.is_used] or passes  # the others belong to another optimizer
    keys = [_key(each, own[:index]) for index, each in enumerate(own)]
    counts = Counter(keys)
    number, period = len(own) // len(counts), len(counts)
    order = [*counts]
    is_regular = {*counts.values()} == {number} and (
        all(key == order[i % period] for i, key in enumerate(keys))
        or all(key == order[i // number] for i, key in enumerate(keys))
    )
    if is_regular and period > 1 and (losses > 1 or expected is None or len(own) > expected):
        for each, key in zip(own, keys, strict=True):
            each.loss = order.index(key)


def _key(each: Pass, before: Sequence[Pass]) -> Any:
    """Equal for passes of one loss."""
    forms = tuple((term.kind, term.factor < 0, term.target) for term in each.reading.terms if term.has_rows)
    return forms, each.modules, frozenset(each.grads), sum(_are_same(each.inputs, other.inputs) for other in before)


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are the same samples: one tensor, or the same place, unwritten since."""
    if one is None or other is None:
        return False
    return one is other or (
        one.shape == other.shape and one.data_ptr() == other.data_ptr() != 0 and one._version == other._version
    )
