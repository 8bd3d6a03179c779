"""The window: the micro-batches between two updates, summed in fp32.

In: fresh `p.grad`s and their weights. Out: one accumulator per parameter, exposed as `p.grad` when `last=True` closes
the window, or handed to the step. docs/internals/state-machine.md draws the states and the calls that each refuses.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from accumfused import versions
from accumfused.core.arena import Arena
from accumfused.core.habits import Habits
from accumfused.core.heap import Pin
from accumfused.core.plan import EMPTY, Plan
from accumfused.core.protocol import Backend, Exchange, Number
from accumfused.core.rows import Grads, Row
from accumfused.core.sums import Sums
from accumfused.core.weights import READY, Weights
from accumfused.formats import shards
from accumfused.formats.kinds import DTYPES


class Phase(Enum):
    IDLE = "idle"  # no window; step() works on p.grad
    OPEN = "open"  # the sums are here, p.grad is None between micro-batches
    SEALED = "sealed"  # open, with the sums of all processes: it waits for its step
    CLOSED = "closed"  # p.grad is the accumulator


OPEN_PHASES = (Phase.OPEN, Phase.SEALED)  # the window holds the sums, p.grad does not


class Window:
    """The state machine of one optimizer's gradients, from the first micro-batch to the step."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.params: list[Tensor] = []
        self.weights = Weights()
        self.sums = Sums(EMPTY, Arena(0))
        self.entered = False  # a micro-batch is in progress: it is counted, and more of its gradients may come
        self.habits = Habits()
        self._place: int | None = None  # of the micro-batch's factor; None: it is left out
        self._plan: Plan | None = None
        self._pin = Pin()
        self._lacked_rows = False  # the last window
        self._grad_dtypes: dict[int, torch.dtype] = {}  # of exposed parameters whose p.grad has another dtype

    @property
    def is_open(self) -> bool:
        """Whether the window holds the sums, and p.grad does not."""
        return self.phase in OPEN_PHASES

    @property
    def holds_micro_batches(self) -> bool:
        """Whether there are micro-batches besides one in progress: a loop without accumulate() has no others."""
        return self.is_open and not (self.entered and self.weights.count <= 1)

    def begin(self, plan: Plan, grads: Grads, weight: Number | None) -> None:
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
        is_weighted = self.weights.is_weighted
        if is_weighted is not None and is_weighted != (weight is not None):
            raise ValueError(
                "weights for some micro-batches of a window only; this one began "
                f"{'with' if is_weighted else 'without'} weights: give one to every micro-batch, or to none"
            )

    def is_exposed(self, grads: Grads) -> bool:
        """Whether p.grad is still an accumulator of a closed window."""
        exposed = {id(accumulator) for accumulator in self.sums.accumulators if accumulator is not None}
        return any(id(grad) in exposed for grad in grads if grad is not None)

    def open(self, plan: Plan) -> None:
        """Begins a window without micro-batches."""
        arena = self.sums.arena
        if len(self.params) != len(plan.params) or not all(map(operator.is_, self.params, plan.params)):
            self.params, arena = list(plan.params), Arena(len(plan.params))
            self._grad_dtypes.clear()
        self.phase, self._plan = Phase.OPEN, plan
        self.sums = Sums(plan, arena, lacks_rows=self._lacked_rows)
        self.weights = Weights(plan.device)
        self.habits.see(self.params)

    def follow(self, plan: Plan) -> None:
        """Goes on with a newer plan: added parameters become new rows, others must be unchanged."""
        if plan is self._plan:
            return
        known = len(self.params)
        if len(plan.params) < known or any(a is not b for a, b in zip(self.params, plan.params, strict=False)):
            raise RuntimeError(
                "parameters were removed or reordered while a window is open; call step() or zero_grad() first"
            )
        for row, accumulator in zip(plan.rows, self.sums.accumulators, strict=False):
            _refuse_moved(row, accumulator)
        self.weights.follow(plan.device)  # a resumed window has its numbers on the host
        self.sums.follow(self._plan, plan)
        self._plan, self.params = plan, list(plan.params)
        self.habits.see_new(self.params)

    def enter(self, plan: Plan, weight: Number | None, exchange: Exchange, *, in_loss: bool) -> None:
        """Begins a micro-batch: it and its weight count once, even if several folds bring its gradients."""
        if self.phase is Phase.IDLE:
            self.open(plan)
        self.entered = True
        self._place = self.weights.add(weight, exchange, in_loss=in_loss)

    def fold(self, plan: Plan, backend: Backend, grads: Grads, complete: bool, *, last: bool, ends: bool) -> None:
        """Adds matched gradients of the entered micro-batch.

        Args:
            complete: every parameter has a gradient.
            last: the micro-batch closes the window; each of its folds says so.
            ends: no more of its gradients will come: `p.grad` is released.
        """
        place, scale = self._place, self.weights.closing_scale if last else None
        if place is None:  # the micro-batch is left out
            grads, place, complete = [None] * len(grads), READY, False
        self.sums.fold(plan, backend, self.weights, grads, complete, place, scale, ends)
        if plan.device.type == "cpu":
            self._pin.hold(grads)
        if ends:
            self.entered = False
            plan.reader.release_grads()

    def contribute(self, index: int) -> tuple[Tensor, bool] | None:
        """Gives the accumulator of a row of the entered micro-batch to a backward: see `Sums.contribute`."""
        assert self._plan is not None
        return self.sums.contribute(self._plan, index, self._place)

    def agree(self, plan: Plan, exchange: Exchange, grads: Grads, *, seed: int, last: bool) -> None:
        """Before the window closes: processes exchange its weight, and flags of parameters with a sum or a gradient.

        A parameter that has them elsewhere only gets an accumulator of zeros.
        """
        grads = [None] * len(grads) if self._place is None else grads
        present = [a is not None or g is not None for a, g in zip(self.sums.accumulators, grads, strict=True)]
        weights = self.weights
        agreed = exchange.agree(plan, weights.total, weights.is_weighted, present, seed=seed, last=last)
        if agreed is not None:
            weights.divisor, missing = agreed
            self.sums.bundle(plan, missing)

    def seal(self) -> None:
        """Notes that the accumulators are sums over processes now; their sums of squares are unknown."""
        self.phase, self.sums.is_measured = Phase.SEALED, [False] * len(self.params)
        torch.autograd.graph.increment_version([a for a in self.sums.accumulators if a is not None])

    def expose(self) -> None:
        """Closes the window: p.grad becomes the accumulator, even if autograd's gradient has another dtype."""
        assert self._plan is not None
        self.phase = Phase.CLOSED
        for index, (row, accumulator) in enumerate(zip(self._plan.rows, self.sums.accumulators, strict=True)):
            if accumulator is None:
                continue
            param = row.param
            dtype = param.grad_dtype if versions.HAS_GRAD_DTYPE else param.dtype
            if dtype not in (accumulator.dtype, None):
                if versions.HAS_GRAD_DTYPE:
                    self._grad_dtypes[index] = dtype
                    param.grad_dtype = None
                else:  # for an optimizer's own step, which wants this dtype in any case
                    accumulator = self.sums.accumulators[index] = accumulator.to(dtype)
            if row.shard is None:
                param.grad = accumulator
            else:
                param.grad = row.shard.whole(accumulator)
                self.sums.accumulators[index] = shards.local(param.grad)  # `is_exposed` looks for this object

    def consume(self, params: Iterable[Tensor]) -> None:
        """Ends the window after a step, made or skipped, and releases its accumulators."""
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
        self.phase, self.entered, self._plan = Phase.IDLE, False, None
        self._lacked_rows = self.sums.count < len(self.params)
        self.weights, self.sums = Weights(), Sums(EMPTY, self.sums.arena)

    @contextlib.contextmanager
    def undone_by_an_error(self) -> Iterator[None]:
        """Undoes a micro-batch that fails (out of memory, say) before it is added: its gradients stay in p.grad.

        A failing fold does not undo a micro-batch that an earlier fold began.
        """
        before = [(part, dict(vars(part))) for part in (self, self.weights, self.sums)]
        for _, known in before[2:]:
            known.update({name: list(known[name]) for name in ("accumulators", "places", "is_measured")})
        entered = self.entered
        try:
            yield
        except BaseException:
            if not entered:
                for part, known in before:
                    vars(part).update(known)
            raise

    def copied(self) -> Window:
        """Copies the window, with sums in memory of their own, for a copy of the optimizer."""
        twin = copy.copy(self)
        twin.params, twin.sums, twin.weights = list(self.params), self.sums.copied(), copy.copy(self.weights)
        twin.weights.factors = list(self.weights.factors)
        twin._plan, twin._grad_dtypes, twin.habits = None, {}, Habits()
        return twin


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


def _refuse_moved(row: Row, accumulator: Tensor | None) -> None:
    """Refuses a parameter that no longer fits its accumulator."""
    param = row.owned
    if accumulator is not None and (
        (param.device, param.shape) != (accumulator.device, accumulator.shape) or param.dtype not in DTYPES
    ):
        raise RuntimeError(
            f"a parameter became {param.dtype} of shape {list(param.shape)} on {param.device} while a window "
            f"is open; its accumulator has shape {list(accumulator.shape)} and is on {accumulator.device}. "
            "Move the model back, or call zero_grad() and begin the window again"
        )
