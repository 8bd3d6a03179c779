"""Accumulation: takes gradients from p.grad into the window, and closes it over all processes.

In: fresh gradients with their weights. Out: `p.grad`, if `last=True` closes the window, or what the step takes from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

from torch import Tensor

from accumfused import versions
from accumfused.core.noise import Noise
from accumfused.core.plans import Plans, Prepared, Surroundings
from accumfused.core.protocol import Number, Owner, Release
from accumfused.core.rows import Grads
from accumfused.core.window import Phase, Window
from accumfused.settings import Settings


class Accumulation:
    """Keeps one optimizer's window.

    Args:
        owner: the optimizer.
        window: an open window, if the owner is a copy of an optimizer.
    """

    def __init__(
        self, owner: Owner, settings: Settings, surroundings: Surroundings, window: Window | None = None
    ) -> None:
        self.plans = Plans(owner, settings, surroundings)
        self.settings = settings
        self.window = window or Window()
        self.noise = Noise(settings.noise_decay) if settings.noise_decay else None
        self.release: Release | None = None  # while gradients are folded during backward
        self.attached: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of DistributedDataParallel, from attach_ddp

    def begin(
        self, weight: Number | None, *, in_loss: bool, last: bool, rows: Container[int] | None = None
    ) -> tuple[Prepared, Grads, int]:
        """Refuses a wrong micro-batch before anything is written.

        Args:
            weight: None: a plain sum.
            in_loss: the weight multiplied the loss, so it is in the gradients already.
            last: the micro-batch closes the window.
            rows: ids of the parameters whose gradients are folded; None: all, and the micro-batch ends.

        Returns:
            The prepared plan, the fresh gradients, and their number.
        """
        self.plans.owner.refuse_gradients()
        prepared = self.plans.current()
        plan = prepared.plan
        grads, present = plan.gradients()
        if not self.window.is_open:
            prepared.exchange.check(plan, weight, in_loss=in_loss)
        if rows is not None:
            grads = [grad if id(param) in rows else None for param, grad in zip(plan.params, grads, strict=True)]
            present = sum(grad is not None for grad in grads)
        elif self.release is not None:
            self.release.end(weight, in_loss=in_loss)
        self.window.begin(plan, grads, weight)
        if self.noise is not None:
            self.noise.check(prepared.exchange, weight)
        if last:
            if prepared.exchange.is_alone:  # else other processes may have weights
                self.window.weights.check(weight)
            versions.refuse_wide_sums(plan.params)
        return prepared, grads, present

    def fold(self, weight: Number | None, *, in_loss: bool, last: bool, rows: Container[int] | None = None) -> None:
        """Adds fresh gradients to the window; see `begin`."""
        prepared, grads, present = self.begin(weight, in_loss=in_loss, last=last, rows=rows)
        window, plan, exchange, ends = self.window, prepared.plan, prepared.exchange, rows is None
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        if not present and not empty and not window.entered:
            if not (in_loss and plan.is_spread):
                raise RuntimeError(
                    "there is no new gradient to accumulate; call loss.backward() before each accumulate()"
                )
            if self.noise is not None:  # without synchronization, fully_shard keeps gradients in the module
                raise RuntimeError(
                    "fully_shard keeps the gradients of this micro-batch, and delivers them in a sum with others, "
                    "which tells no noise; call set_requires_gradient_sync(True) for each, or leave noise_scale= out"
                )
        if last and ends and window.is_open:
            window.habits.watch_writes(window.params)
        matched = plan.match(grads)
        closes = last and (ends or not exchange.adds_up)
        measured = None
        with window.undone_by_an_error():
            begins, opens = not window.entered, window.phase is Phase.IDLE
            if begins:
                window.enter(plan, weight, exchange, in_loss=in_loss)
            if self.noise is not None:
                if opens:
                    self.noise.open(plan)
                measured = self.noise.measured(prepared.backend, plan, matched, window.weights, weight, in_loss, begins)
            if ends and self.release is not None:
                self.release.forget()
            if closes and ends:
                window.agree(plan, exchange, matched, seed=self.plans.seed, last=True)
            window.fold(plan, prepared.backend, matched, present == len(grads), last=closes, ends=ends)
        if self.noise is not None:
            self.noise.of_window = measured
        if last and ends:
            self._add_up(prepared, closes=True)
            window.expose()
            if self.noise is not None:
                self.noise.close(prepared.backend, plan, window)
        if not self.plans.owner.state and window.is_open:
            # torch.distributed.checkpoint makes a missing optimizer state by a step of its own, with zeros in p.grad.
            # An open window refuses that step, and the learning rate of 0 that it sets would stay.
            held = zip(window.params, window.sums.accumulators, strict=True)
            marked = next((param for param, accumulator in held if accumulator is not None), window.params[0])
            self.plans.owner.state[marked] = {}

    def complete(self, prepared: Prepared) -> tuple[Prepared, Grads, int, Number | None]:
        """Completes the window for a step. Where processes add up windows, p.grad is one of a single micro-batch.

        Returns:
            The plan, its sums (or p.grad, if the window is closed) and their number, and the divisor of these sums.
        """
        window = self.window
        if window.phase is Phase.IDLE:
            if prepared.plan.gradients()[1]:
                self.fold(None, in_loss=False, last=False)
            else:
                window.open(prepared.plan)  # other processes may have gradients
                if self.noise is not None:
                    self.noise.open(prepared.plan)
            prepared = self.plans.current()
        plan = prepared.plan
        grads, present = plan.gradients()
        if not window.is_open:
            if not present:
                window.drop()  # model.zero_grad() has released its sums
            return prepared, grads, present, None
        self.refuse_live(present)
        window.follow(plan)
        window.habits.watch_writes(window.params)
        if window.phase is not Phase.SEALED:  # a refused step may have sealed it
            window.agree(plan, prepared.exchange, [None] * len(plan.params), seed=self.plans.seed, last=False)
        window.weights.check(0.0)
        if not window.sums.count:
            return prepared, [], 0, None
        divisor = window.sums.settle(plan, prepared.backend, window.weights)
        self._add_up(prepared)
        return prepared, window.sums.accumulators, window.sums.count, divisor

    def _add_up(self, prepared: Prepared, *, closes: bool = False) -> None:
        """Adds up the accumulators of all processes, and what the noise scale counts; `closes`: they are divided."""
        window = self.window
        if not prepared.exchange.adds_up or window.phase is Phase.SEALED:
            return
        plan, sums = prepared.plan, window.sums
        try:
            numbers = [] if self.noise is None else self.noise.count(prepared.backend, plan, window.weights, closes=closes)
            prepared.exchange.add_up([*numbers, *sums.arena.memory_of(plan, sums.accumulators)])
        except BaseException:
            window.drop()  # some are added up, some are not
            raise
        window.seal()

    def refuse_live(self, present: int) -> None:
        """Refuses a step of an open window if there are gradients that it does not hold."""
        if present and self.window.is_open:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step()"
            )

    def refuse_open(self, call: str, why: str = "") -> None:
        """Refuses a call while a window is open."""
        if self.window.is_open:
            raise RuntimeError(f"a window is open{why}; call optimizer.step() or zero_grad() before {call}")
