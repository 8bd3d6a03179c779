"""The window: the micro-batches between two updates, summed in fp32 and counted in units of the first weight.

In: fresh `p.grad`s and their weights. Out: one sum per parameter, exposed as `p.grad` when `last=True` closes the
window, or handed to the step with its divisor. The k-th micro-batch enters as

    sum <- sum + fp32(w_k / unit) * grad        unit: the first weight that is not 0; 1 without weights

and the step divides by the sum of these factors. So equal weights make autograd's own sum, and a window of one
micro-batch has its gradients unchanged: the first ones become the sums as they are. A gradient that has its weight
already, from its loss, lacks a factor of 1 and not of w. Where processes add up their windows, or gradients are means
over them, the unit is 1. docs/internals/state-machine.md draws the states and the calls that each refuses.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from accumfused import versions
from accumfused.core import graphs, memory
from accumfused.core.arena import Arena, adoptable
from accumfused.core.habits import Habits
from accumfused.core.heap import Pin
from accumfused.core.plan import Plan
from accumfused.core.protocol import Backend, Exchange, Fold, Number, on_device, stacked
from accumfused.core.rows import Grads, Row
from accumfused.formats import shards
from accumfused.formats.kinds import DTYPES

_numbers = itertools.count(1)  # of all windows
_LARGEST_FACTOR = 2.0**40  # beyond it the sums get another unit: squares of theirs must stay in fp32's range


class Phase(Enum):
    IDLE = "idle"  # no window; step() works on p.grad
    OPEN = "open"  # the sums are here, p.grad is None between micro-batches
    SEALED = "sealed"  # open, with the sums of all processes: it waits for its step
    CLOSED = "closed"  # p.grad is the sum


OPEN_PHASES = (Phase.OPEN, Phase.SEALED)  # the window holds the sums, p.grad does not


@dataclass
class MicroBatch:
    """The micro-batch in progress: it is counted once, and one fold or several bring its gradients.

    Args:
        factor: of its gradients; None leaves them out.
        before: the sum of the weights before it, where the device alone knows it; while that is 0 the sums hold
            nothing, and are overwritten.
    """

    factor: Number | None
    before: Tensor | None = None
    rows: set[int] = field(default_factory=set)  # that got a gradient in it; only with `before`


class Window:
    """The state machine of one optimizer's gradients, from the first micro-batch to the step."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.number = 0  # no other window has it
        self.params: list[Tensor] = []
        self.sums: Grads = []  # fp32, one per parameter; None: no gradient yet
        self.is_measured: list[bool] = []  # a sum's squares are in `partials`
        # fp32 [chunks]: folds and the norm write them
        self.partials = torch.empty(0, dtype=torch.float32, device="cpu")
        self.count = 0  # micro-batches
        self.empty = 0  # those whose weight is known to be 0
        self.is_weighted: bool | None = None  # None: no micro-batch yet
        self.unit: Number = 1.0
        self.total: Number = 0.0  # of the weights
        self.factors: Number = 0.0  # the sum of the factors, as rounded: the divisor of sums of this process alone
        self.agreed: Number | None = None  # the divisor on which processes have agreed
        self.divided: Number = 1.0  # by what the sums have been divided
        self.in_progress: MicroBatch | None = None
        self.arena = Arena(0)  # memory of sums that are no adopted gradients; kept between windows
        self.habits = Habits()
        self._plan: Plan | None = None
        self._pin = Pin()
        self._lacked_rows = False  # the last window
        self._is_cleared = False  # partials of rows without a sum are 0
        self._lacking = 0  # rows without a sum
        self._grad_dtypes: dict[int, torch.dtype] = {}  # of exposed parameters whose p.grad has another dtype

    @property
    def is_open(self) -> bool:
        """Whether the window holds the sums, and p.grad does not."""
        return self.phase in OPEN_PHASES

    @property
    def holds_micro_batches(self) -> bool:
        """Whether a micro-batch is complete: a loop without accumulate() has only one in progress."""
        return self.is_open and not (self.in_progress is not None and self.count <= 1)

    @property
    def rows_with_sums(self) -> int:
        """The number of sums."""
        return len(self.sums) - self._lacking

    # ---- a micro-batch ---------------------------------------------------------------------------------------------

    def check(self, plan: Plan, grads: Grads, weight: Number | None) -> None:
        """Refuses a wrong micro-batch before anything is written."""
        if self.phase is Phase.CLOSED:
            if self.is_exposed(grads):
                raise RuntimeError(
                    "p.grad is still the previous window's accumulator; call optimizer.step() or optimizer.zero_grad() "
                    "after a window was closed, before the next backward() (a GradScaler that skips calls neither)"
                )
            self.drop()  # model.zero_grad() has released it
        if self.phase is Phase.SEALED:
            raise RuntimeError(
                "the window is complete and waits for its step; call step() or zero_grad() before the next backward()"
            )
        if self.phase is Phase.OPEN:
            self.follow(plan)
        if self.is_weighted is not None and self.is_weighted != (weight is not None):
            raise ValueError(
                "weights for some micro-batches of a window only; this one began "
                f"{'with' if self.is_weighted else 'without'} weights: give one to every micro-batch, or to none"
            )

    def is_exposed(self, grads: Grads) -> bool:
        """Whether p.grad is still a sum of a closed window."""
        exposed = {id(each) for each in self.sums if each is not None}
        return any(id(grad) in exposed for grad in grads if grad is not None)

    def open(self, plan: Plan) -> None:
        """Begins a window without micro-batches."""
        if len(self.params) != len(plan.params) or not all(map(operator.is_, self.params, plan.params)):
            self.params, self.arena = list(plan.params), Arena(len(plan.params))
            self._grad_dtypes.clear()
        self.phase, self.number, self._plan = Phase.OPEN, next(_numbers), plan
        self.sums, self.is_measured, self._lacking = [None] * len(plan.rows), [False] * len(plan.rows), len(plan.rows)
        self.partials = torch.empty(plan.chunks, dtype=torch.float32, device=plan.device)
        self._is_cleared = self._lacked_rows
        if self._lacked_rows:  # as this one will, probably: else they are cleared before the norm
            self.partials.zero_()
        self.habits.see(self.params)

    def choose_unit(self, plan: Plan, backend: Backend, weight: Number | None, exchange: Exchange) -> None:
        """Before a micro-batch, or the end: brings the sums to another unit, if one is needed, in a pass of its own.

        It is 1 where processes share the window, which may have begun without them. On the host it is a weight that is
        far larger than the unit; or the total, where the larger weight's micro-batch has failed.
        """
        unit, total, factors = self.unit, self.total, self.factors
        if not self.is_weighted or self.in_progress is not None or self.phase is not Phase.OPEN:
            return
        if not exchange.is_alone:
            new = 1.0
        elif isinstance(unit, Tensor) or isinstance(total, Tensor) or isinstance(factors, Tensor):
            return
        elif 0 < factors * _LARGEST_FACTOR < 1:
            new = total
        elif weight is None or isinstance(weight, Tensor) or not weight > _LARGEST_FACTOR * unit > 0:
            return
        else:
            new = weight
        if isinstance(unit, Tensor) or unit != new:
            factor = unit / new
            self._scale(plan, backend, factor)
            self.unit, self.factors = new, self.factors * _rounded(factor)

    def begin(self, plan: Plan, weight: Number | None, exchange: Exchange, *, in_loss: bool) -> None:
        """Counts a micro-batch and computes its factor. A tensor is not read: a bad weight makes the divisor NaN."""
        if self.phase is Phase.IDLE:
            self.open(plan)
        self.is_weighted, self.count = weight is not None, self.count + 1
        if weight is None:
            self.in_progress = MicroBatch(1.0)
            return
        if isinstance(weight, Tensor):
            weight = on_device(weight, plan.device, torch.float64)
            weight = torch.where((weight >= 0) & weight.isfinite(), weight, torch.nan)
        elif weight == 0 and not exchange.has_means:  # else other processes' weights may differ
            self.in_progress, self.empty = MicroBatch(None), self.empty + 1
            return
        own: Number = 1.0 if in_loss else weight  # what the gradients lack
        before, is_first = self.total, not isinstance(self.total, Tensor) and self.total == 0
        micro_batch = MicroBatch(1.0)
        if exchange.has_means:
            factor: Number = 1.0
        elif exchange.adds_up:
            factor = _nothing_of_zero(weight, own)
        elif is_first:  # whatever the device holds: if it is 0, the next micro-batch overwrites
            self.unit, factor = own, 1.0
        elif isinstance(before, Tensor):
            micro_batch.before = before
            self.unit = _either(torch.eq(before, 0), own, self.unit)
            factor = _nothing_of_zero(weight, own / self.unit)
        else:
            factor = _nothing_of_zero(weight, own / self.unit)
        micro_batch.factor = factor
        entered = _rounded(factor) * (weight if in_loss else 1.0)
        # New tensors: a launch may still read the old ones, and copies of the window share them.
        self.total = before + weight
        factors = self.factors + entered
        self.factors = factors if micro_batch.before is None else _either(micro_batch.before == 0, entered, factors)
        self.in_progress = micro_batch

    def add(self, plan: Plan, backend: Backend, grads: Grads, *, complete: bool, ends: bool) -> None:
        """Adds matched gradients of the micro-batch in progress.

        Args:
            complete: every parameter has a gradient.
            ends: no more of its gradients will come: `p.grad` is released.
        """
        micro_batch = self.in_progress
        assert micro_batch is not None
        factor = micro_batch.factor
        if factor is not None and complete and not self._lacking and micro_batch.before is None:  # nearly always
            self._launch(plan, backend, Fold(grads, self.sums, factor), everywhere=True)
        elif factor is not None:
            self._add(plan, backend, grads, micro_batch, factor, ends)
        if plan.device.type == "cpu":
            self._pin.hold(grads)
        if ends:
            self.in_progress = None
            plan.reader.release_grads()

    def _add(
        self, plan: Plan, backend: Backend, grads: Grads, micro_batch: MicroBatch, factor: Number, ends: bool
    ) -> None:
        before = micro_batch.before
        first: Grads = [g if s is None else None for g, s in zip(grads, self.sums, strict=True)]
        later: Grads = [None if s is None else g for g, s in zip(grads, self.sums, strict=True)]
        rows: Grads = [None if g is None else s for g, s in zip(later, self.sums, strict=True)]
        if before is not None:
            again = micro_batch.rows
            if ends:  # of what overwrites nothing, nothing is left
                both = enumerate(zip(grads, self.sums, strict=True))
                rows = [s if g is not None or index not in again else None for index, (g, s) in both]
            if again:  # a second part of a gradient
                those: Grads = [own if index in again else None for index, own in enumerate(rows)]
                self._launch(plan, backend, Fold(later, those, factor))
                rows = [None if index in again else own for index, own in enumerate(rows)]
            again.update(index for index, grad in enumerate(grads) if grad is not None)
        adds = any(each is not None for each in rows)
        if any(grad is not None for grad in first):  # into memory that nobody misses, if what follows fails
            self._take_first(plan, backend, first, factor, may_scale=not adds)
        if adds:
            self._launch(plan, backend, Fold(later, rows, factor, before))

    def _take_first(self, plan: Plan, backend: Backend, grads: Grads, factor: Number, *, may_scale: bool) -> None:
        """Adopts first gradients of some parameters as their sums if nobody else holds them, else copies them.

        Args:
            may_scale: an adopted gradient may be multiplied where it lies.
        """
        is_one = not isinstance(factor, Tensor) and factor == 1.0
        adopts = (is_one or may_scale) and not graphs.has_static_memory(plan.device)
        copied: Grads = [None] * len(grads)
        taken = list(self.sums)
        rows = zip(plan.rows, grads, self.arena.places, plan.reader.held(), strict=True)
        for index, (row, grad, own, is_held) in enumerate(rows):
            if grad is None:
                continue
            if grad is own or (adopts and not is_held and not row.is_bundled and adoptable(grad)):
                taken[index] = grad
            else:
                memory.check_size(grad, "gradient")
                copied[index] = grad
        both = zip(grads, copied, strict=True)
        adopted: Grads = [grad if copy is None else None for grad, copy in both]
        if any(grad is not None for grad in copied):
            copied = self.arena.apart(copied)
            self.arena.extend(plan, copied)
            taken = [s if c is None else a for s, c, a in zip(taken, copied, self.arena.places, strict=True)]
        sources: Grads = [a if c is None else c for a, c in zip(adopted, copied, strict=True)]
        if is_one:
            sources = copied  # what is adopted stays as it is
        targets: Grads = [None if source is None else s for s, source in zip(taken, sources, strict=True)]
        self.is_measured = [m and g is None for m, g in zip(self.is_measured, grads, strict=True)]
        self.sums, self._lacking = taken, sum(s is None for s in taken)
        if any(source is not None for source in sources):
            self._launch(plan, backend, Fold(sources, targets, factor, overwrites=True))

    def _launch(self, plan: Plan, backend: Backend, fold: Fold, *, everywhere: bool = False) -> None:
        """Folds; `everywhere`: every row has a sum and a gradient."""
        backend.accumulate(plan, fold, self.partials)
        measures = backend.measures_folds and not fold.copies
        if everywhere:
            self.is_measured = [measures] * len(fold.sums)
        else:
            pairs = zip(fold.grads, fold.sums, self.is_measured, strict=True)
            self.is_measured = [m if s is None or g is None else measures for g, s, m in pairs]
        torch.autograd.graph.increment_version([s for s in fold.sums if s is not None])

    def _scale(self, plan: Plan, backend: Backend, factor: Number) -> None:
        """Multiplies the sums in place, in a pass of its own: 8 bytes a parameter."""
        if self.rows_with_sums:
            self._launch(plan, backend, Fold(self.sums, self.sums, factor, overwrites=True))

    def contribute(self, index: int) -> tuple[Tensor, bool] | None:
        """Lets a backward add a row's gradient of the micro-batch to its sum directly; `add` needs none then.

        Returns:
            The sum, fp32, and whether it holds anything (else it is to be overwritten). None: a factor is to be
            applied, so the gradient must come by `add`.
        """
        micro_batch, plan = self.in_progress, self._plan
        assert plan is not None
        assert micro_batch is not None
        factor = micro_batch.factor
        if isinstance(factor, Tensor) or factor != 1.0 or micro_batch.before is not None:
            return None
        given, holds = self.sums[index], self.sums[index] is not None
        if given is None:
            given = self.sums[index] = self.arena.place(plan, index)
            self._lacking -= 1
        self.is_measured[index] = False
        return given, holds

    # ---- its end ---------------------------------------------------------------------------------------------------

    def check_weights(self, weight: Number | None = 0.0) -> None:
        """Refuses to close a window whose weights, this one included, are all zero.

        Raises:
            ValueError: all are zero, and no other process has told its own.
        """
        if self.is_weighted is False or weight is None or self.agreed is not None:
            return
        if not isinstance(self.total, Tensor) and not isinstance(weight, Tensor) and self.total + weight == 0:
            raise ValueError(
                "the weights of this window are all zero, so it has no mean; call zero_grad() in place of the step"
            )

    def divisor(self) -> Number:
        """What the sums are still to be divided by."""
        if self.agreed is not None:
            return self.agreed / self.divided
        if not self.is_weighted:
            return 1.0
        if not isinstance(self.total, Tensor):
            return self.factors / self.divided
        return _either(~(self.total > 0), math.nan, self.factors) / self.divided  # without any weight they hold nothing

    def agree(self, plan: Plan, exchange: Exchange, grads: Grads, *, seed: int, last: bool) -> Tensor | None:
        """Before the window closes: processes exchange its weight, and flags of parameters with a sum or a gradient.

        A parameter that has them elsewhere only gets a sum of zeros.

        Returns:
            Whether other processes close the window with `last`, if this one has no micro-batch: bool, shape [].
        """
        left_out = self.in_progress is not None and self.in_progress.factor is None
        grads = [None] * len(grads) if left_out else grads
        present = [s is not None or g is not None for s, g in zip(self.sums, grads, strict=True)]
        agreed = exchange.agree(plan, self.total, self.is_weighted, present, seed=seed, last=last)
        if agreed is None:
            return None
        self.agreed, missing, others_close = agreed
        self.sums = self.arena.bundle(plan, self.sums)
        if True in missing:
            self.arena.extend(plan, [row.tensor if m else None for row, m in zip(plan.rows, missing, strict=True)])
        for index, (is_missing, zeros) in enumerate(zip(missing, self.arena.places, strict=True)):
            if is_missing and zeros is not None:
                self.sums[index] = zeros.zero_()
        self._lacking = sum(s is None for s in self.sums)
        return others_close

    def seal(self) -> None:
        """Notes that the sums are those of all processes now; their sums of squares are unknown."""
        self.phase, self.is_measured = Phase.SEALED, [False] * len(self.params)
        torch.autograd.graph.increment_version([s for s in self.sums if s is not None])

    def divide(self, plan: Plan, backend: Backend, divisor: Number) -> None:
        """Makes means of the sums."""
        if isinstance(divisor, Tensor) or divisor != 1.0:
            self._scale(plan, backend, 1.0 / divisor)
            self.divided = divisor

    def expose(self) -> None:
        """Closes the window: p.grad becomes the sum, even if autograd's gradient has another dtype."""
        assert self._plan is not None
        self.phase = Phase.CLOSED
        for index, (row, own) in enumerate(zip(self._plan.rows, self.sums, strict=True)):
            if own is None:
                continue
            param = row.param
            dtype = param.grad_dtype if versions.HAS_GRAD_DTYPE else param.dtype
            if dtype not in (own.dtype, None):
                if versions.HAS_GRAD_DTYPE:
                    self._grad_dtypes[index] = dtype
                    param.grad_dtype = None
                else:  # for an optimizer's own step, which wants this dtype in any case
                    own = self.sums[index] = own.to(dtype)
            if row.shard is None:
                param.grad = own
            else:
                param.grad = row.shard.whole(own)
                self.sums[index] = shards.local(param.grad)  # `is_exposed` looks for this object

    def stale(self, plan: Plan, grads: Grads) -> Grads | None:
        """The sums (as kernels read them) without sums of squares in `partials`; None: all have them."""
        if not self._is_cleared and self._lacking:
            bounds = [*(row.first_chunk for row in plan.rows), plan.chunks]
            rows = zip(self.sums, bounds, bounds[1:], strict=False)
            torch._foreach_zero_([self.partials[begin:end] for s, begin, end in rows if s is None])
            self._is_cleared = True
        if False not in self.is_measured:
            return None
        return [None if known else grad for grad, known in zip(grads, self.is_measured, strict=True)]

    def consume(self, params: Iterable[Tensor]) -> None:
        """Ends the window after a step, made or skipped, and releases its sums."""
        if self.phase is Phase.CLOSED:
            for param in params:
                param.grad = None
        self.habits.stepped()
        self._end()

    def drop(self) -> None:
        """Ends the window without a step."""
        if self.holds_micro_batches:  # a GradScaler may skip a closed window; plain loops may drop freely
            self.habits.dropped()
        if self.phase is not Phase.IDLE:
            self._end()

    def watch_drops(self) -> None:
        """Before a window is dropped: warns, once, if that is a habit."""
        if self.holds_micro_batches:
            self.habits.watch_drops()

    def _end(self) -> None:
        for index, dtype in list(self._grad_dtypes.items()):
            if self.params[index].grad is None:
                self.params[index].grad_dtype = dtype
                del self._grad_dtypes[index]
        self._lacked_rows, self._lacking = self._lacking > 0, 0
        self.phase, self._plan, self.in_progress = Phase.IDLE, None, None
        self.sums, self.is_measured, self.is_weighted, self.count, self.empty = [], [], None, 0, 0
        self.unit, self.total, self.factors, self.agreed, self.divided = 1.0, 0.0, 0.0, None, 1.0

    # ---- plans, errors, checkpoints --------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Goes on with a newer plan: added parameters become new rows, others must be unchanged."""
        if plan is self._plan:
            return
        known = len(self.params)
        if len(plan.params) < known or any(a is not b for a, b in zip(self.params, plan.params, strict=False)):
            raise RuntimeError(
                "parameters were removed or reordered while a window is open; call step() or zero_grad() first"
            )
        for row, own in zip(plan.rows, self.sums, strict=False):
            _refuse_moved(row, own)
        for index, (row, own) in enumerate(zip(plan.rows, self.sums, strict=False)):
            if own is not None and own.stride() != row.tensor.stride():
                laid_out = torch.empty_like(row.tensor, dtype=own.dtype, requires_grad=False)
                self.sums[index] = laid_out.copy_(own)
                self.is_measured[index] = False  # the norm's order is that of memory
        new = len(plan.rows) - known
        self.sums += [None] * new
        self.is_measured += [False] * new
        self._lacking += new
        self.arena.add_rows(new)
        before = [] if self._plan is None else self._plan.rows
        partials = self.partials.to(plan.device)
        if any(one.first_chunk != other.first_chunk for one, other in zip(before, plan.rows, strict=False)):  # resized
            partials, self.is_measured = partials.new_zeros(plan.chunks), [False] * len(plan.rows)
        self.partials = torch.cat([partials, partials.new_zeros(plan.chunks - len(partials))])
        for name in ("unit", "total", "factors"):  # a resumed window has its numbers on the host
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(self, name, on_device(value, plan.device, torch.float64))
        self._plan, self.params = plan, list(plan.params)
        self.habits.see_new(self.params)

    @contextlib.contextmanager
    def undone_by_an_error(self) -> Iterator[None]:
        """Undoes a micro-batch that fails (out of memory, say) before it is added: its gradients stay in p.grad.

        A failing fold does not undo a micro-batch that an earlier fold began.
        """
        known, is_begun = dict(vars(self)), self.in_progress is not None
        known.update(sums=list(self.sums), is_measured=list(self.is_measured))
        try:
            yield
        except BaseException:
            if not is_begun:
                vars(self).update(known)
                self._is_cleared = False  # partials of rows that have no sum again
            raise

    def saved(self, total: Number) -> Tensor:
        """The numbers for `resumed`: fp64 [4], unit, total, sum of the factors, count.

        The unit is negative if the device knows the weights, the count for a plain sum.

        Args:
            total: the sum of the weights, or the mean of the processes' sums, which is then that of the factors, too.
        """
        factors = self.factors if total is self.total else total
        device = self.partials.device
        unit = -self.unit if isinstance(self.total, Tensor) else self.unit
        numbers = (unit, total, factors, self.count if self.is_weighted else -self.count)
        return stacked([on_device(n, device, torch.float64) if isinstance(n, Tensor) else n for n in numbers], device)

    @classmethod
    def resumed(cls, params: list[Tensor], sums: Grads, numbers: Sequence[float]) -> Window:
        """Makes an open window of a checkpoint's sums and numbers."""
        unit, total, factors, count = numbers
        window = cls()
        window.number = next(_numbers)
        window.phase, window.params, window.is_weighted = Phase.OPEN, params, count > 0
        window.count, window.unit, window.factors = abs(int(count)), abs(unit), factors
        window.total = total
        window.sums, window.is_measured = list(sums), [False] * len(sums)
        if not math.isfinite(total) or (total == 0 and math.copysign(1.0, unit) < 0):
            window.total = torch.tensor(total, dtype=torch.float64, device="cpu")  # skips the step, and does not raise
        window._lacking = sum(s is None for s in window.sums)
        window.arena.add_rows(len(params))
        return window

    def copied(self) -> Window:
        """Copies the window, with sums in memory of their own, for a copy of the optimizer."""
        twin = copy.copy(self)
        twin.params, twin.is_measured = list(self.params), [False] * len(self.params)
        twin.sums = [None if s is None else s.clone() for s in self.sums]
        twin.partials, twin.arena, twin._is_cleared = self.partials[:0], Arena(len(self.params)), True
        twin._plan, twin._grad_dtypes, twin.habits = None, {}, Habits()
        return twin


def _rounded(factor: Number) -> Number:
    """The factor as kernels multiply by it: rounded to fp32 once."""
    return factor.float().double() if isinstance(factor, Tensor) else ctypes.c_float(factor).value


def _nothing_of_zero(weight: Number, factor: Number) -> Number:
    """0 for a weight of 0 on the device: a masked mean of nothing is NaN, also times 0 within the loss."""
    return _either(weight == 0, 0.0, factor) if isinstance(weight, Tensor) else factor


def _either(condition: Tensor, one: Number, other: Number) -> Tensor:
    """One of two numbers, fp64, where the device knows which."""
    other = other if isinstance(other, Tensor) else torch.full_like(condition, other, dtype=torch.float64)
    return torch.where(condition, one, other)


def refuse_foreign_scaler(window: Window, process_group: Any) -> None:
    """Refuses gradients that a stock GradScaler cannot unscale and check."""
    is_idle = window.phase is Phase.IDLE
    if window.is_open or (process_group is not None and is_idle):
        what = "a GradScaler cannot see into an open window"
        if is_idle:
            what = "gradients are not added up over the processes yet, so a GradScaler would decide on its own"
        raise RuntimeError(
            f"{what}; close it with accumulate(..., last=True) before "
            "scaler.unscale_() or scaler.step() (accumfused.GradScaler.step() needs no closed one)"
        )


def _refuse_moved(row: Row, own: Tensor | None) -> None:
    """Refuses a parameter that no longer fits its sum."""
    param = row.owned
    if own is not None and ((param.device, param.shape) != (own.device, own.shape) or param.dtype not in DTYPES):
        raise RuntimeError(
            f"a parameter became {param.dtype} of shape {list(param.shape)} on {param.device} while a window "
            f"is open; its accumulator has shape {list(own.shape)} and is on {own.device}. "
            "Move the model back, or call zero_grad() and begin the window again"
        )
