"""Accumulation: takes gradients from p.grad into the window, and closes it over all processes.

In: fresh gradients with their weights. Out: `p.grad`, if `last=True` closes the window, or what the step takes from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch
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
        self.window.check(plan, grads, weight)
        if self.noise is not None:
            self.noise.check(prepared.exchange, weight)
        if last:
            if prepared.exchange.is_alone:  # else other processes may have weights
                self.window.check_weights(weight)
            versions.refuse_wide_sums(plan.params)
        return prepared, grads, present

    def fold(self, weight: Number | None, *, in_loss: bool, last: bool, rows: Container[int] | None = None) -> None:
        """Adds fresh gradients to the window; see `begin`."""
        prepared, grads, present = self.begin(weight, in_loss=in_loss, last=last, rows=rows)
        window, plan, exchange, ends = self.window, prepared.plan, prepared.exchange, rows is None
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        if not present and not empty and window.in_progress is None:
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
        measured = None
        window.choose_unit(plan, prepared.backend, 1.0 if in_loss else weight, exchange)
        with window.undone_by_an_error():
            if window.in_progress is None:
                window.begin(plan, weight, exchange, in_loss=in_loss)
            if self.noise is not None:
                measured = self.noise.measured(prepared.backend, plan, matched, window, weight, in_loss)
            if ends and self.release is not None:
                self.release.forget()
            if last and ends:
                window.agree(plan, exchange, matched, seed=self.plans.seed, last=True)
            window.add(plan, prepared.backend, matched, complete=present == len(grads), ends=ends)
        if self.noise is not None:
            self.noise.of_window = measured
        if last and ends:
            self._add_up(prepared)
            window.divide(plan, prepared.backend, window.divisor())
            window.expose()
            if self.noise is not None:
                self.noise.close(prepared.backend, plan, window)
        if not self.plans.owner.state and window.is_open:
            # torch.distributed.checkpoint makes a missing optimizer state by a step of its own, with zeros in p.grad.
            # An open window refuses that step, and the learning rate of 0 that it sets would stay.
            both = zip(window.params, window.sums, strict=True)
            marked = next((param for param, own in both if own is not None), window.params[0])
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
        others_close = None
        if window.phase is not Phase.SEALED:  # a refused step may have sealed it
            window.choose_unit(plan, prepared.backend, None, prepared.exchange)
            nothing: Grads = [None] * len(plan.params)
            others_close = window.agree(plan, prepared.exchange, nothing, seed=self.plans.seed, last=False)
        window.check_weights()
        if not window.rows_with_sums:
            return prepared, [], 0, None
        self._add_up(prepared)
        if others_close is not None:  # they divide before their step: so does this process, for the same bits
            window.divide(plan, prepared.backend, torch.where(others_close, window.divisor(), 1.0))
        return prepared, window.sums, window.rows_with_sums, window.divisor()

    def _add_up(self, prepared: Prepared) -> None:
        """Adds up the sums of all processes, and what the noise scale counts."""
        window = self.window
        if not prepared.exchange.adds_up or window.phase is Phase.SEALED:
            return
        plan = prepared.plan
        try:
            numbers = [] if self.noise is None else self.noise.count(prepared.backend, plan, window)
            prepared.exchange.add_up([*numbers, *window.arena.memory_of(plan, window.sums)])
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
