"""The engine: from gradients, in p.grad or in a window, to updated weights.

One step is two verbs of a backend; nothing between them waits for the host. `measure` ends in `norm`, which reduces
the window's sums (or p.grad) to one coefficient. `finish` ends in `step`, which applies it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accumfused import versions
from accumfused.arguments import checked_positive
from accumfused.clipping import POLICIES
from accumfused.core import graphs
from accumfused.core.clipping import Clipping
from accumfused.core.masters import Masters
from accumfused.core.metrics import Meter
from accumfused.core.noise import Noise
from accumfused.core.plan import EMPTY, Plan, build, rule_of
from accumfused.core.protocol import (
    Backend,
    Divisors,
    Exchange,
    Hypers,
    LossScale,
    Number,
    Outcome,
    Owner,
    Release,
    Scaling,
    on_device,
)
from accumfused.core.rows import Grads, has_memory
from accumfused.core.skips import Skips
from accumfused.core.window import OPEN_PHASES, Phase, Window
from accumfused.formats.convert import make_state
from accumfused.formats.kinds import names
from accumfused.formats.shards import replicated
from accumfused.rule import Rule
from accumfused.settings import Settings


@dataclass
class Prepared:
    """A plan, the backend that keeps tables for it, and the exchange of its sums and norms with other processes."""

    plan: Plan
    backend: Backend
    exchange: Exchange
    devices: set[torch.device]  # for these and for these rules the backend was selected
    rules: set[type[Rule]]
    partials: Tensor | None = None  # sums of squares of gradients from p.grad
    is_valid: bool = True  # False: the optimizer's state was replaced

    def norm(self, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        """`Backend.norm`, over all shards of the parameters."""
        if self.exchange.is_alone and not self.plan.is_spread:
            return self.backend.norm(self.plan, grads, partials, scaling)
        return self.exchange.norm(self.backend, self.plan, grads, partials, scaling)

    def cleared_partials(self, complete: bool) -> Tensor:
        """Memory for the sums of squares; zero for rows without a gradient."""
        if self.partials is None:
            self.partials = torch.zeros(self.plan.chunks, dtype=torch.float32, device=self.plan.device)
        elif not complete:
            self.partials.zero_()
        return self.partials


@dataclass(frozen=True)
class Surroundings:
    """The choices that the core leaves to others.

    Args:
        select: chooses a new plan's backend and exchange, perhaps those of the last plan again.
        default_seed: gives the seed of stochastic rounding if the settings have none.
    """

    select: Callable[[Settings, Plan, set[torch.device], Prepared | None], tuple[Backend, Exchange]]
    default_seed: Callable[[], int]


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

    def uncount(self) -> None:
        """Takes the skip of a step that failed back."""
        if self.skips is not None and self.outcome.owed is None:
            self.skips.sub_(self.outcome.skipped.long())


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


class Plans:
    """Makes the plans and the states of an optimizer.

    Args:
        owner: the optimizer; a weak reference, because the optimizer holds this object.
    """

    def __init__(self, owner: Owner, settings: Settings, surroundings: Surroundings) -> None:
        self._owner = weakref.ref(owner)
        self.settings = settings
        self.masters = Masters()
        self.skips: Skips | None = None
        self.last: Prepared | None = None
        self.backend: Backend | None = None  # a benchmark sets it; it overrides the selection
        self._surroundings = surroundings

    @property
    def owner(self) -> Owner:
        """The optimizer."""
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the optimizer was deleted; keep it as long as what was made of it")
        return owner

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the groups' order."""
        return [param for group in self.owner.param_groups for param in group["params"]]

    @property
    def seed(self) -> int:
        """The seed of the noise of new states."""
        given = self.settings.rounding_seed
        return self._surroundings.default_seed() if given is None else given

    def current(self) -> Prepared:
        """The plan for the current parameters and states, with backend and exchange."""
        groups, state = self.owner.param_groups, self.owner.state
        rules = [rule_of(self.owner.rules, group) for group in groups]
        known = self.last
        if known is not None and known.is_valid and known.plan.rules == rules and known.plan.unchanged(groups, state):
            return known
        devices = {param.device for param in self.params if has_memory(param)}
        graphs.refuse_new_tensors(devices)
        plan = build(groups, state, rules, self.settings)
        backend, exchange = self._surroundings.select(self.settings, plan, devices, known)
        for row in plan.rows:
            row.is_bundled = 4 * row.param.numel() < exchange.bundled_bytes
        backend = self.backend or backend
        backend.prepare(plan, groups, state)
        if self.skips is None or self.skips.count.device != plan.device:
            self.skips = Skips(plan.device)
        self.last = Prepared(plan, backend, exchange, devices, set(rules))
        return self.last

    def forget(self) -> None:
        """The optimizer's state or settings were replaced: the next call makes a new plan. The old one is freed."""
        if self.last is not None:
            self.last = replace(self.last, plan=EMPTY, partials=None, is_valid=False)

    def let_go(self) -> None:
        """Drops the references to gradients, so that these can be freed."""
        if self.last is not None:
            self.last.plan.let_go()

    def with_states(self, plan: Plan, grads: Grads) -> Prepared:
        """Makes the state of every parameter with a gradient, in its format, and a plan with these states."""
        graphs.refuse_new_tensors({plan.device})  # a graph would keep the zeros' addresses without filling them
        self.masters.settle()
        for row, grad in zip(plan.rows, grads, strict=True):
            if grad is None:
                continue
            if row.is_copy:
                row.tensor.copy_(row.owned)
            entries, shard = self.owner.state[row.param], row.shard
            own = entries if shard is None else shard.parts(entries)
            make_state(row.rule, row.form, row.tensor, own, self.seed, self.owner.param_groups[row.group])
            if shard is not None:
                shard.put(own, entries, names(row.rule, row.form))
            if row.is_copy:
                row.owned.copy_(row.tensor)
        self.masters.written()  # the copies back are our own writes
        self.masters.see(self.owner.state)  # a converted state has other memory
        return self.current()


class Engine:
    """Takes one optimizer's gradients to weights: the only door for clipping, scalers, release and checkpoints.

    Args:
        owner: the optimizer.
        window: an open window, if the owner is a copy of an optimizer.
    """

    def __init__(
        self, owner: Owner, settings: Settings, surroundings: Surroundings, window: Window | None = None
    ) -> None:
        self.plans = Plans(owner, settings, surroundings)
        self.settings = settings
        self.clipping = Clipping(settings)
        self.window = window or Window()
        self.noise = Noise(settings.noise_decay) if settings.noise_decay else None
        self.window.measures = self.noise is not None
        self.meter = Meter(int(settings.metrics)) if settings.metrics else None
        self.outcome: Outcome | None = None  # of the last step
        self.release: Release | None = None  # while gradients are folded during backward
        self.attached: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of DistributedDataParallel, from attach_ddp
        self.group: Callable[[], Any] | None = None  # gives the ClipGroup it is in; None: it clips alone
        self.loss_scale: LossScale | None = None  # while a GradScaler of ours steps

    # ---- into the window -------------------------------------------------------------------------------------------

    def begin(
        self, weight: Number | None, *, in_loss: bool, rows: Container[int] | None = None
    ) -> tuple[Prepared, Grads, int]:
        """Refuses a wrong micro-batch before anything is written.

        Args:
            weight: None: a plain sum.
            in_loss: the weight multiplied the loss, so it is in the gradients already.
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
        return prepared, grads, present

    def check_total(self, prepared: Prepared, weight: Number | None) -> None:
        """Before the last micro-batch: refuses weights that are all zero, unless other processes may have some.

        Old versions of torch cannot keep the window's sum in every `p.grad`, either.
        """
        if prepared.exchange.is_alone:
            self.window.weights.check(weight)
        versions.refuse_wide_sums(self.plans.params)

    def fold(self, weight: Number | None, *, in_loss: bool, last: bool, rows: Container[int] | None = None) -> None:
        """Adds fresh gradients to the window; see `begin`. With `last` the micro-batch closes the window."""
        prepared, grads, present = self.begin(weight, in_loss=in_loss, rows=rows)
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
        if last:
            self.check_total(prepared, weight)
        if last and ends and window.is_open:
            window.habits.watch_writes(window.params)
        matched = plan.match(grads)
        closes = last and (ends or not exchange.adds_up)
        with window.undone_by_an_error():
            if not window.entered:
                window.enter(plan, weight, exchange, in_loss=in_loss)
            if ends and self.release is not None:
                self.release.forget()
            if closes and ends:
                self._agree(prepared, matched, last=True)
            window.fold(plan, prepared.backend, matched, present == len(grads), last=closes, ends=ends)
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

    def _agree(self, prepared: Prepared, grads: Grads, *, last: bool) -> None:
        """Before a window closes: processes exchange their weights, and a flag for each parameter with a gradient."""
        window = self.window
        agreed = prepared.exchange.agree(
            prepared.plan,
            window.weights.total,
            window.weights.is_weighted,
            window.present(grads),
            seed=self.plans.seed,
            last=last,
        )
        if agreed is not None:
            window.agree(prepared.plan, *agreed)

    def _add_up(self, prepared: Prepared, *, closes: bool = False) -> None:
        """Adds up the accumulators of all processes, and what the noise scale counts; `closes`: they are divided."""
        window = self.window
        if not prepared.exchange.adds_up or window.phase is Phase.SEALED:
            return
        plan, sums = prepared.plan, window.sums
        try:
            numbers = [] if self.noise is None else self.noise.count(prepared.backend, plan, window, closes=closes)
            prepared.exchange.add_up([*numbers, *sums.arena.memory_of(plan, sums.accumulators)])
        except BaseException:
            window.drop()  # some are added up, some are not
            raise
        window.seal()

    # ---- out of it -------------------------------------------------------------------------------------------------

    def measure(self, divisors: Divisors) -> Measured | None:
        """Computes the coefficient for the gradients that a step takes now; None if there is no gradient."""
        settings, groups, asked = self.settings, self.plans.owner.param_groups, None
        if settings.clip is not None or settings.skip_above is not None or not all(map(POLICIES.isdisjoint, groups)):
            asked = self.clipping.of_step(self.plans.owner, divisors)
        if self.release is not None:
            self.release.end_before_step()
        window, prepared = self.window, self.plans.current()
        if prepared.exchange.adds_up and window.phase is Phase.IDLE:
            prepared = self._take_own(prepared.plan)
        grads, present = prepared.plan.gradients()
        if window.phase is Phase.CLOSED and not present:
            window.drop()  # model.zero_grad() has released its sums
        is_open = window.phase in OPEN_PHASES
        if is_open:
            grads, present = self._sums(prepared, present)
        if not present:
            return None
        normalization: Number | None = None
        if is_open:
            normalization = window.sums.settle(prepared.plan, prepared.backend, window.weights)
            self._add_up(prepared)
        matched = prepared.plan.match(grads)
        if prepared.plan.lacks_state(matched):
            prepared = self.plans.with_states(prepared.plan, matched)
            window.habits.see(window.params)  # make_state wrote a loaded master into its parameter
        plan, complete = prepared.plan, present == len(grads)
        scaling, takes_norm = self._scaling(plan, divisors, normalization, must=asked is not None)
        meter = self.meter if self.meter is not None and self.meter.is_due(plan) else None
        takes_norm |= meter is not None
        stale: Grads | None = matched
        partials: Tensor | None = None
        if is_open:
            stale, partials = window.sums.stale(plan, matched), window.sums.partials
        elif takes_norm:
            partials = prepared.cleared_partials(complete)
        if meter is not None and partials is not None:
            meter.count(prepared.backend, plan, groups, matched, partials)
            stale = None
        if asked is None or partials is None:
            scaling.step_follows = meter is None and self._step_follows(prepared, divisors)
            outcome = prepared.norm(stale, partials, scaling)
        else:
            outcome = self.clipping.norm(asked, prepared, stale, matched, partials, scaling)
        outcome.spends_grads = is_open
        measured = Measured(prepared, grads, matched, complete, outcome, scaling.skips)
        try:
            if meter is not None and partials is not None:
                meter.begin(plan, scaling, outcome)
            if self.noise is not None:
                self.noise.see(prepared.backend, plan, prepared.exchange, window, scaling)
        except BaseException:
            measured.uncount()
            raise
        return measured

    def refuse_live(self, present: int) -> None:
        """Refuses a step of an open window if there are gradients that it does not hold."""
        if present and self.window.is_open:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step()"
            )

    def _take_own(self, plan: Plan) -> Prepared:
        """Makes p.grad a window of one micro-batch, because the processes add up windows."""
        if plan.gradients()[1]:
            self.fold(None, in_loss=False, last=False)
        else:
            self.window.open(plan)  # other processes may have gradients
        return self.plans.current()

    def _sums(self, prepared: Prepared, fresh: int) -> tuple[Grads, int]:
        """Completes the open window and returns its sums and their number; `fresh`: how many gradients p.grad has."""
        window, plan = self.window, prepared.plan
        self.refuse_live(fresh)
        window.follow(plan)
        window.habits.watch_writes(window.params)
        if window.phase is not Phase.SEALED:  # a refused step may have sealed it
            self._agree(prepared, [None] * len(plan.params), last=False)
        window.weights.check(0.0)
        return window.sums.accumulators, window.sums.count

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

    def _step_follows(self, prepared: Prepared, divisors: Divisors) -> bool:
        """Whether a step by the backend follows the norm, and nobody reads the outcome before."""
        if divisors.is_shared or self.noise is not None or self.plans.owner.own_step is not None:
            return False
        return self.counts_skips(divisors) and prepared.exchange.is_alone and not prepared.plan.is_spread

    def counts_skips(self, divisors: Divisors) -> bool:
        """Whether a skipped step is counted; otherwise it raises."""
        return self.settings.nonfinite != "raise" or divisors.for_scaler

    # ---- the step --------------------------------------------------------------------------------------------------

    def refuse_nonfinite(self, measured: Measured, divisors: Divisors) -> None:
        """Refuses a skipped step if nonfinite="raise", which waits for the device.

        Raises:
            RuntimeError: the norm is not finite, or a scaler found a non-finite gradient.
        """
        if measured.outcome.owed is None:
            self.outcome = measured.outcome
        if not self.counts_skips(divisors) and bool(measured.outcome.skipped):
            raise RuntimeError(
                f"the global norm of the gradients is {float(measured.outcome.norm)}, nothing was updated; look for "
                "the non-finite gradient (or found_inf), and call zero_grad() to go on, or use nonfinite='skip'"
            )

    def finish(self, measured: Measured | None) -> None:
        """Makes the step, if there is a gradient, and ends the window; then the step counts.

        A step that fails leaves histories, noise scale and skips as they were, and the window open.
        """
        if measured is not None:
            self._apply(measured)
            self.outcome = measured.outcome
        self.end_window()
        if measured is not None:
            self._note(measured)

    def _apply(self, measured: Measured) -> None:
        owner = self.plans.owner
        try:
            if owner.own_step is not None:
                owner.own_step(owner, self, measured)
            else:
                self.update(measured, measured.prepared.backend.step)
        except BaseException:
            measured.uncount()
            raise

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
        if plan.has_remainders:
            self.plans.masters.refresh(plan)
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
        if plan.has_remainders:
            self.plans.masters.written()
            self.plans.masters.watch()

    def end_window(self) -> None:
        """After a step, made or skipped: releases its gradients."""
        if self.window.phase is not Phase.IDLE:
            self.window.consume(self.plans.params)

    def refuse_open(self, call: str, why: str = "") -> None:
        """Refuses a call while a window is open."""
        if self.window.is_open:
            raise RuntimeError(f"a window is open{why}; call optimizer.step() or zero_grad() before {call}")
