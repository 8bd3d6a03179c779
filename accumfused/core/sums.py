"""The sums of a window: one accumulator for each parameter, with its factor and its norm's state.

In: matched gradients of a micro-batch and the place of its factor (weights.py). A window adopts a parameter's first
fp32 gradient as its accumulator if nobody else holds it; it copies other first gradients into the arena.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core import graphs, memory
from accumfused.core.arena import Arena, adoptable
from accumfused.core.plan import Plan
from accumfused.core.protocol import OVERWRITE, Backend, Fold, Number
from accumfused.core.rows import Grads
from accumfused.core.weights import CLOSED, CURRENT, FIRST, READY, Weights


class Sums:
    """Lists over the plan's rows, as kernels take them: 1000 objects would cost more host time than a launch."""

    def __init__(self, plan: Plan, arena: Arena, *, lacks_rows: bool = False) -> None:
        """Args: lacks_rows: some rows will have no accumulator, if this window is as the last one."""
        rows = len(plan.rows)
        self.accumulators: Grads = [None] * rows
        self.places = [OVERWRITE] * rows  # of the factors that accumulators wait for, as in Fold.held
        self.is_measured = [False] * rows  # the row's partials belong to its accumulator
        # Sums of squares, per chunk: folds and the norm write them. Those of rows without an accumulator are cleared
        # now or before the norm.
        self.partials = torch.empty(plan.chunks, dtype=torch.float32, device=plan.device)
        self._is_cleared = lacks_rows
        if lacks_rows:
            self.partials.zero_()
        self.arena = arena  # for gradients that cannot be adopted; kept between windows

    @property
    def count(self) -> int:
        """The number of accumulators."""
        return len(self.accumulators) - sum(accumulator is None for accumulator in self.accumulators)

    def are_of_one(self, weights: Weights) -> bool:
        """Whether the window has one micro-batch whose weight is still to be applied: it is its own mean."""
        pending = set(self.places) - {OVERWRITE}
        return weights.divisor is None and weights.count == 1 and pending == {FIRST}

    def follow(self, old: Plan | None, plan: Plan) -> None:
        """Goes on with a newer plan of the same parameters, and perhaps more."""
        known = len(self.accumulators)
        for index, (row, accumulator) in enumerate(zip(plan.rows, self.accumulators, strict=False)):
            if accumulator is not None and accumulator.stride() != row.tensor.stride():
                laid_out = torch.empty_like(row.tensor, dtype=accumulator.dtype, requires_grad=False)
                self.accumulators[index] = laid_out.copy_(accumulator)
                self.is_measured[index] = False  # the norm's order is that of memory
        new = len(plan.rows) - known
        self.accumulators += [None] * new
        self.places += [OVERWRITE] * new
        self.is_measured += [False] * new
        self.arena.add_rows(new)
        before = [] if old is None else old.rows
        if any(one.first_chunk != other.first_chunk for one, other in zip(before, plan.rows, strict=False)):  # resized
            self.partials, self.is_measured = self.partials.new_zeros(plan.chunks), [False] * len(plan.rows)
        self.partials = _extended(self.partials, plan)

    def fold(
        self, plan: Plan, backend: Backend, weights: Weights, grads: Grads, complete: bool, place: int,
        scale: Number | None, ends: bool,
    ) -> None:  # fmt: skip
        """Adds the gradients of a micro-batch: see `Window.fold`.

        Args:
            place: the place of the micro-batch's factor.
            scale: the factor of closing folds; None: this fold does not close the window.
        """
        added, rows = grads, self.accumulators
        if OVERWRITE in self.places or not complete:
            first: Grads = [g if a is None else None for g, a in zip(grads, self.accumulators, strict=True)]
            added = [g if a is not None else None for g, a in zip(grads, self.accumulators, strict=True)]
            self._take_first(plan, backend, weights, first, place)
            # Late first gradients get their weight here; those of the first micro-batch alone wait for it.
            both = zip(self.accumulators, added, self.places, strict=True)
            rows = [a if g is not None or p == CURRENT else None for a, g, p in both]
        closes = isinstance(scale, Tensor) or (scale is not None and self._waits_for_closing(weights, scale))
        if closes:  # it rescales all of them, each once
            both = zip(self.accumulators, grads, self.places, strict=True)
            rows = [a if g is not None or (ends and p != CLOSED) else None for a, g, p in both]
        self._launch(plan, backend, weights, added, rows, place, 1.0 if scale is None else scale)
        if closes and not ends:
            weights.close_in_parts()
            self.places = [p if g is None else CLOSED for g, p in zip(grads, self.places, strict=True)]

    def contribute(self, plan: Plan, index: int, place: int | None) -> tuple[Tensor, bool] | None:
        """Gives a row's accumulator to the maker of a gradient, who adds it there: `fold` needs none then.

        Args:
            place: of the micro-batch's factor; None: it is left out.

        Returns:
            The accumulator, fp32, and whether it holds a sum (else anything, to be overwritten). None: a factor is
            still to be applied, to that sum or to this micro-batch, so the gradient must come by `fold`.
        """
        held = self.places[index]
        if place != READY or held not in (OVERWRITE, READY):
            return None
        accumulator = self.accumulators[index]
        if accumulator is None:
            accumulator = self.accumulators[index] = self.arena.place(plan, index)
        self.places[index], self.is_measured[index] = READY, False
        return accumulator, held == READY

    def settle(self, plan: Plan, backend: Backend, weights: Weights) -> Number:
        """Brings all accumulators to one common factor and returns it: the step divides by it."""
        is_sum = not weights.is_weighted and weights.divisor is None
        if is_sum:
            return 1.0
        if self.are_of_one(weights):
            return weights.total / weights.factors[FIRST] if isinstance(weights.total, Tensor) else 1.0
        if max(self.places, default=OVERWRITE) > READY:
            pending: Grads = [a if p > READY else None for a, p in zip(self.accumulators, self.places, strict=True)]
            self._launch(plan, backend, weights, [None] * len(pending), pending, READY, 1.0)
        if weights.divisor is not None:
            return weights.divisor
        return weights.total

    def bundle(self, plan: Plan, missing: list[bool]) -> None:
        """Before processes add accumulators up: puts small ones side by side, and makes `missing` ones zeros."""
        self.accumulators = self.arena.bundle(plan, self.accumulators)
        if True in missing:
            self.arena.extend(plan, [row.tensor if m else None for row, m in zip(plan.rows, missing, strict=True)])
        for index, (is_missing, zeros) in enumerate(zip(missing, self.arena.places, strict=True)):
            if is_missing and zeros is not None:
                self.accumulators[index] = zeros.zero_()
                self.places[index] = READY

    def stale(self, plan: Plan, grads: Grads) -> Grads | None:
        """The accumulators (as kernels read them) without sums of squares in `partials`; None: all have them."""
        if not self._is_cleared and self.count < len(self.accumulators):
            bounds = [*(row.first_chunk for row in plan.rows), plan.chunks]
            rows = zip(self.accumulators, bounds, bounds[1:], strict=False)
            torch._foreach_zero_([self.partials[begin:end] for a, begin, end in rows if a is None])
            self._is_cleared = True
        if False not in self.is_measured:
            return None
        return [None if known else grad for grad, known in zip(grads, self.is_measured, strict=True)]

    def copied(self) -> Sums:
        """Copies the sums into memory of their own, without their sums of squares."""
        twin = object.__new__(Sums)
        twin.accumulators = [None if a is None else a.clone() for a in self.accumulators]
        twin.places, twin.is_measured = list(self.places), [False] * len(self.places)
        twin.partials, twin.arena, twin._is_cleared = self.partials[:0], Arena(len(self.places)), True
        return twin

    def _waits_for_closing(self, weights: Weights, scale: float) -> bool:
        """Whether accumulators without a gradient in this fold change too: by the scale, or by their weight."""
        return not self.are_of_one(weights) and (scale != 1.0 or FIRST in self.places)

    def _launch(
        self,
        plan: Plan,
        backend: Backend,
        weights: Weights,
        grads: Grads,
        rows: Grads,
        place: int,
        scale: Number,
    ) -> None:
        """Folds into the accumulators `rows`, which become READY; a None leaves its row alone."""
        folded = [accumulator for accumulator in rows if accumulator is not None]
        if not folded:
            return
        backend.accumulate(plan, Fold(grads, rows, self.places, weights.factors, place, scale), self.partials)
        if len(folded) == len(rows):
            self.places, self.is_measured = [READY] * len(rows), [backend.measures_folds] * len(rows)
        else:
            self.places = [p if a is None else READY for a, p in zip(rows, self.places, strict=True)]
            measured = zip(rows, self.is_measured, strict=True)
            self.is_measured = [m if a is None else backend.measures_folds for a, m in measured]
        torch.autograd.graph.increment_version(folded)

    def _take_first(self, plan: Plan, backend: Backend, weights: Weights, grads: Grads, place: int) -> None:
        """Adopts first gradients of some parameters as accumulators if nobody else holds them, else copies them."""
        if all(grad is None for grad in grads):
            return
        adopts = not graphs.has_static_memory(plan.device)
        copied: Grads = [None] * len(grads)
        taken = list(self.accumulators)
        rows = zip(plan.rows, grads, self.arena.places, plan.reader.held(), strict=True)
        for index, (row, grad, own, is_held) in enumerate(rows):
            if grad is None:
                continue
            if grad is own or (adopts and not is_held and not row.is_bundled and adoptable(grad)):
                taken[index] = grad
            else:
                memory.check_size(grad, "gradient")
                copied[index] = grad
        if any(grad is not None for grad in copied):
            copied = self.arena.apart(copied)
            self.arena.extend(plan, copied)
            copies: Grads = [None if g is None else a for g, a in zip(copied, self.arena.places, strict=True)]
            self._launch(plan, backend, weights, copied, copies, READY, 1.0)
            taken = [a if copy is None else copy for a, copy in zip(taken, copies, strict=True)]
        self.accumulators = taken
        for index, grad in enumerate(grads):
            if grad is not None:
                self.places[index], self.is_measured[index] = place, False


def _extended(sums: Tensor, plan: Plan) -> Tensor:
    """Per-chunk sums on the plan's device, with zeros for its new chunks."""
    sums = sums.to(plan.device)
    return torch.cat([sums, sums.new_zeros(plan.chunks - len(sums))])
