"""The engine: from gradients, in p.grad or in the window of its base class, to updated weights.

One step is two verbs of a backend; nothing between them waits for the host. `measure` ends in `norm`, which reduces
the window's sums (or p.grad) to one coefficient. `finish` ends in `step`, which applies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumfused.arguments import checked_positive
from accumfused.core.accumulation import Accumulation
from accumfused.core.clipping import Clipping
from accumfused.core.metrics import Meter
from accumfused.core.plan import Plan
from accumfused.core.plans import Prepared, Surroundings
from accumfused.core.protocol import Divisors, Hypers, LossScale, Number, Outcome, Owner, Scaling, on_device
from accumfused.core.rows import Grads
from accumfused.core.window import OPEN_PHASES, Phase, Window
from accumfused.formats.shards import replicated
from accumfused.settings import NAMES, Settings


@dataclass
class Measured:
    """The gradients of one step with their coefficient, ready to be applied."""

    prepared: Prepared
    grads: Grads  # as the step finds them: p.grad, or an open window's accumulators
    matched: Grads  # as the kernels read them
    complete: bool  # every parameter has a gradient
    outcome: Outcome
    skips: Tensor | None = None  # the count that holds this step's skip already

    def count(self, skips: Tensor) -> None:
        """Counts the step's skip, where `Backend.norm` has not."""
        self.skips = skips.add_(self.outcome.skipped)

    @contextlib.contextmanager
    def uncounted_by_an_error(self) -> Iterator[None]:
        """Takes the skip of a step that fails back."""
        try:
            yield
        except BaseException:
            if self.skips is not None:
                self.skips.sub_(self.outcome.skipped.long())
            raise


def divisors_of(
    owner: Any, normalizer: Number | None, loss_scale: LossScale | None, *, is_shared: bool = False
) -> Divisors:
    """Collects a step's divisors. Without `loss_scale` it reads the `grad_scale` and `found_inf` of torch's scalers.

    Raises:
        ValueError, TypeError: a scale that is not a number > 0.
    """
    given = loss_scale or LossScale(getattr(owner, "grad_scale", None), getattr(owner, "found_inf", None))
    scale = None if given.scale is None else checked_positive(given.scale, "grad_scale")
    for_scaler = loss_scale is not None or given.found_inf is not None
    return Divisors(normalizer, scale, given.found_inf, for_scaler, is_shared)


class Engine(Accumulation):
    """Takes one optimizer's gradients to weights: the only door for clipping, scalers, release and checkpoints."""

    def __init__(
        self, owner: Owner, settings: Settings, surroundings: Surroundings, window: Window | None = None
    ) -> None:
        super().__init__(owner, settings, surroundings, window)
        self.clipping = Clipping(settings)
        self.meter = Meter(int(settings.metrics)) if settings.metrics else None
        self.outcome: Outcome | None = None  # of the last step
        self.group: Callable[[], Any] | None = None  # gives the ClipGroup it is in; None: it clips alone
        self.loss_scale: LossScale | None = None  # while a GradScaler of ours steps

    # ---- the coefficient -------------------------------------------------------------------------------------------

    def measure(self, divisors: Divisors) -> Measured | None:
        """Computes the coefficient for the gradients that a step takes now; None if there is no gradient."""
        settings, groups, asked = self.settings, self.plans.owner.param_groups, None
        if settings.clip is not None or settings.skip_above is not None or not all(map(NAMES.isdisjoint, groups)):
            asked = self.clipping.of_step(self.plans.owner, divisors)
        if self.release is not None:
            self.release.end_before_step()
        window, prepared, normalization = self.window, self.plans.current(), None
        if prepared.exchange.adds_up or window.phase is not Phase.IDLE:
            prepared, grads, present, normalization = self.complete(prepared)
        else:
            grads, present = prepared.plan.gradients()
        if not present:
            return None
        matched = prepared.plan.match(grads)
        if prepared.plan.lacks_state(matched):
            prepared = self.plans.with_states(prepared.plan, matched)
            window.habits.see(window.params)  # make_state wrote a loaded master into its parameter
        plan, complete, is_open = prepared.plan, present == len(grads), window.phase in OPEN_PHASES
        scaling, takes_norm = self._scaling(plan, divisors, normalization, must=asked is not None)
        meter = self.meter if self.meter is not None and self.meter.is_due(plan) else None
        takes_norm |= meter is not None
        stale: Grads | None = matched
        partials: Tensor | None = None
        if is_open:
            stale, partials = window.stale(plan, matched), window.partials
        elif takes_norm:
            partials = prepared.cleared_partials(complete)
        if asked is None or partials is None:
            # Else others read what the norm writes.
            scaling.may_wait = self.noise is None and meter is None and not divisors.is_shared
            outcome = prepared.norm(stale, partials, scaling)
        else:
            outcome = self.clipping.norm(asked, prepared, stale, matched, partials, scaling)
        outcome.spends_grads = is_open
        measured = Measured(prepared, grads, matched, complete, outcome, scaling.skips)
        if meter is not None and partials is not None:
            meter.begin(plan, groups, partials, scaling, outcome)
        if self.noise is not None:
            with measured.uncounted_by_an_error():
                self.noise.see(prepared.backend, plan, prepared.exchange, window, scaling)
        return measured

    def _scaling(
        self, plan: Plan, divisors: Divisors, normalization: Number | None, *, must: bool
    ) -> tuple[Scaling, bool]:
        """The inputs of the coefficient, and whether the step takes a norm, as with `must` it does."""
        settings, found_inf = self.settings, divisors.found_inf
        is_unchecked = divisors.for_scaler and found_inf is None
        # The contract of windows: bad weights skip the step.
        takes_norm = must or divisors.is_shared or is_unchecked or self.window.phase is not Phase.IDLE
        takes_norm = takes_norm or settings.max_grad_norm is not None or settings.nonfinite in ("skip", "raise")
        scaling = Scaling(plan.device, max_grad_norm=settings.max_grad_norm)
        if not divisors.is_shared and self.counts_skips(divisors):
            assert self.plans.skips is not None
            scaling.skips = self.plans.skips.count
        if found_inf is not None:
            found_inf = replicated(torch.as_tensor(found_inf, dtype=torch.float32))
            scaling.found_inf = on_device(found_inf, plan.device, torch.float32)
        for divisor in (divisors.grad_scale, divisors.normalizer, normalization):
            if divisor is not None:
                scaling.normalize(divisor)
        checked = takes_norm or scaling.device_normalization is not None
        scaling.skips_nonfinite = checked and (settings.nonfinite != "propagate" or is_unchecked)
        return scaling, takes_norm

    def counts_skips(self, divisors: Divisors) -> bool:
        """Whether a skipped step is counted; otherwise it raises."""
        return self.settings.nonfinite != "raise" or divisors.for_scaler

    # ---- the step --------------------------------------------------------------------------------------------------

    def refuse_nonfinite(self, measured: Measured, divisors: Divisors) -> None:
        """Refuses a skipped step if nonfinite="raise", which waits for the device.

        Raises:
            RuntimeError: the norm is not finite, or a scaler found a non-finite gradient.
        """
        if not self.counts_skips(divisors) and bool(measured.outcome.skipped):
            self.outcome = measured.outcome
            raise RuntimeError(
                f"the global norm of the gradients is {float(measured.outcome.norm)}, nothing was updated; look for "
                "the non-finite gradient (or found_inf), and call zero_grad() to go on, or use nonfinite='skip'"
            )

    def finish(self, measured: Measured | None) -> None:
        """Makes the step, if there is a gradient, and ends the window; then the step counts.

        A step that fails leaves histories, noise scale and skips as they were, and the window open.
        """
        if measured is not None:
            with measured.uncounted_by_an_error():
                own_step = self.plans.owner.own_step
                if own_step is not None:
                    own_step(self.plans.owner, self, measured)
                else:
                    self.update(measured, measured.prepared.backend.step)
            self.outcome = measured.outcome
        self.end_window()
        if measured is not None:
            self._note(measured)

    def _note(self, measured: Measured) -> None:
        """After the step: what comes after it may fail, and must not repeat it."""
        skips = self.plans.skips
        assert skips is not None
        if measured.outcome.history is not None:
            self.clipping.remember(measured.outcome.history)
        if self.noise is not None:
            self.noise.take(measured.outcome.skipped)
        if self.meter is not None:
            prepared = measured.prepared
            self.meter.end(prepared.backend, prepared.plan, measured.outcome, skips.count)
        skips.steps += 1
        if not skips.steps % skips.WATCH_EVERY:
            skips.look(or_above=self.settings.skip_above is not None)

    def update(self, measured: Measured, step: Callable[[Plan, Grads, Hypers, Outcome], None]) -> None:
        """Makes the step by `step`, which is `Backend.step` or does as much, and what it needs before and after."""
        plan, grads = measured.prepared.plan, measured.matched
        copies = [plan.rows[index] for index in plan.copies if grads[index] is not None]
        for row in copies:
            row.tensor.copy_(row.owned)
        step(plan, grads, plan.hypers(self.plans.owner.param_groups), measured.outcome)
        for row in copies:
            row.owned.copy_(row.tensor)
        written = plan.params
        if not measured.complete:
            written = [param for param, grad in zip(plan.params, grads, strict=True) if grad is not None]
        # Kernels write past autograd: without this, a write between forward and backward would go unnoticed.
        torch.autograd.graph.increment_version(written)

    def end_window(self) -> None:
        """After a step, made or skipped: releases its gradients."""
        if self.window.phase is not Phase.IDLE:
            self.window.consume(self.plans.params)
