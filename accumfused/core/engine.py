"""The engine: from gradients, in p.grad or in a window, to updated weights.

One step is two verbs of a backend with nothing in between that waits for the host. `measure` ends in `norm`: it makes
the sums that window.py has left (or takes them from p.grad) one coefficient. `apply` ends in `step`, which applies it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumfused.arguments import checked_positive
from accumfused.core import graphs
from accumfused.core.masters import Masters
from accumfused.core.plan import Plan, build
from accumfused.core.protocol import (
    Backend,
    Divisors,
    Exchange,
    LossScale,
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
from accumfused.settings import Settings

Number = float | Tensor  # a tensor has one element, which nobody reads


@dataclass
class Prepared:
    """A plan, the backend that keeps tables for it, and the exchange of its sums and norms with other processes."""

    plan: Plan
    backend: Backend
    exchange: Exchange
    devices: set[torch.device]  # that the backend was selected for
    partials: Tensor | None = None  # of the norm of gradients that came in p.grad
    is_valid: bool = True  # False: the optimizer's state is another one

    def norm(self, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        """`Backend.norm`, over all parts of the parameters."""
        if self.exchange.is_alone and not self.plan.is_spread:
            return self.backend.norm(self.plan, grads, partials, scaling)
        return self.exchange.norm(self.backend, self.plan, grads, partials, scaling)

    def cleared_partials(self, complete: bool) -> Tensor:
        """Room for the sums of squares; zero where there is no gradient."""
        if self.partials is None:
            self.partials = torch.zeros(self.plan.chunks, dtype=torch.float32, device=self.plan.device)
        elif not complete:
            self.partials.zero_()
        return self.partials


@dataclass(frozen=True)
class Surroundings:
    """What the core asks of the machine, and of other processes.

    Args:
        select: a new plan's backend and exchange; those of the plan before may serve again.
        default_seed: of stochastic rounding, where the settings have none.
    """

    select: Callable[[Settings, Plan, set[torch.device], Prepared | None], tuple[Backend, Exchange]]
    default_seed: Callable[[], int]


@dataclass
class Measured:
    """The gradients of one step with their coefficient: what is left is to apply them."""

    prepared: Prepared
    grads: Grads  # as the step found them: p.grad, or an open window's accumulators
    matched: Grads  # as the kernels read them
    complete: bool  # there is one for every parameter
    outcome: Outcome


def divisors_of(
    owner: Any, normalizer: Number | None, loss_scale: LossScale | None, *, is_shared: bool = False
) -> Divisors:
    """Reads `grad_scale` and `found_inf`, by which torch's scalers talk to an optimizer, where no scale is given.

    Raises:
        ValueError, TypeError: a normalizer or scale that is not > 0, or no number.
    """
    if normalizer is not None:
        normalizer = checked_positive(normalizer, "normalizer")
    given = loss_scale or LossScale(getattr(owner, "grad_scale", None), getattr(owner, "found_inf", None))
    scale = None if given.scale is None else checked_positive(given.scale, "grad_scale")
    for_scaler = loss_scale is not None or given.found_inf is not None
    return Divisors(normalizer, scale, given.found_inf, for_scaler, is_shared)


class Plans:
    """How the plan of an optimizer comes to be, and its states.

    Args:
        owner: the optimizer; referred to weakly, as it has this.
    """

    def __init__(self, owner: Owner, settings: Settings, surroundings: Surroundings) -> None:
        self.owner: Owner = weakref.proxy(owner)
        self.settings = settings
        self.masters = Masters()
        self.last: Prepared | None = None
        self.backend: Backend | None = None  # to be used whatever would be selected: a benchmark's
        self._surroundings = surroundings

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the groups' order."""
        return [param for group in self.owner.param_groups for param in group["params"]]

    @property
    def seed(self) -> int:
        """Of the noise of states that are new."""
        given = self.settings.rounding_seed
        return self._surroundings.default_seed() if given is None else given

    def current(self) -> Prepared:
        """The plan for the parameters and states of now, with backend and exchange."""
        groups, state = self.owner.param_groups, self.owner.state
        rules = [self.owner.rule_of(group) for group in groups]
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
        self.last = Prepared(plan, backend, exchange, devices)
        return self.last

    def forget(self) -> None:
        """The optimizer's state, or its settings, are others: the next call makes a new plan."""
        if self.last is not None:
            self.last.is_valid = False

    def let_go(self) -> None:
        """Forgets the gradients, which would live on otherwise."""
        if self.last is not None:
            self.last.plan.let_go()

    def with_states(self, plan: Plan, grads: Grads) -> Prepared:
        """The same once every parameter that has a gradient has its state, in its format."""
        graphs.refuse_new_tensors({plan.device})  # the zeros would be a graph's, and never be there
        self.masters.settle()
        for row, grad in zip(plan.rows, grads, strict=True):
            if grad is None:
                continue
            if row.is_copy:
                row.tensor.copy_(row.owned)
            entries, shard = self.owner.state[row.param], row.shard
            own = entries if shard is None else shard.parts(entries)
            make_state(row.rule, row.form, row.tensor, own, self.seed)
            if shard is not None:
                shard.put(own, entries, names(row.rule, row.form))
            if row.is_copy:
                row.owned.copy_(row.tensor)
        self.masters.written()  # what was copied back is not somebody else's
        self.masters.see(self.owner.state)  # a state that was converted lies elsewhere
        return self.current()


class Engine:
    """What happens to the gradients of one optimizer: the only door for clipping, scalers, release and checkpoints.

    Args:
        owner: the optimizer.
        window: an open one, in a copy of an optimizer.
    """

    def __init__(
        self, owner: Owner, settings: Settings, surroundings: Surroundings, window: Window | None = None
    ) -> None:
        self.plans = Plans(owner, settings, surroundings)
        self.settings = settings
        self.window = window or Window()
        self.skips: Skips | None = None
        self.outcome: Outcome | None = None  # of the last step
        self.release: Release | None = None  # while gradients are folded during backward
        self.attached: weakref.WeakSet[Any] = weakref.WeakSet()  # DistributedDataParallel, by attach_ddp
        self.clips_alone = True  # it is in no ClipGroup

    # ---- into the window -------------------------------------------------------------------------------------------

    def begin(
        self, weight: Number | None, *, in_loss: bool, rows: Container[int] | None = None
    ) -> tuple[Prepared, Grads, int]:
        """Refuses a micro-batch that cannot be right, before anything is written.

        Args:
            weight: None: a plain sum.
            in_loss: the loss was multiplied by the weight, so the gradients are already.
            rows: ids of the parameters whose gradients are folded; None: all, and the micro-batch ends.

        Returns:
            What is prepared, the fresh gradients, and how many there are.
        """
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
        return prepared, grads, present

    def check_total(self, weight: Number | None) -> None:
        """Before the last micro-batch: refuses weights that are all zero, where no other process may have some."""
        if self.plans.current().exchange.is_alone:
            self.window.weights.check(weight)

    def fold(self, weight: Number | None, *, in_loss: bool, last: bool, rows: Container[int] | None = None) -> None:
        """Adds fresh gradients to the window; see `begin`. Args: last: the micro-batch closes the window."""
        prepared, grads, present = self.begin(weight, in_loss=in_loss, rows=rows)
        window, plan, exchange, ends = self.window, prepared.plan, prepared.exchange, rows is None
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        # (fully_shard without its synchronization leaves them with the module, and brings their sum later.)
        if not present and not empty and not window.entered and not (in_loss and plan.is_spread):
            raise RuntimeError("there is no new gradient to accumulate; call loss.backward() before each accumulate()")
        if last:
            self.check_total(weight)
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
            self._add_up(prepared)
            window.expose()
        if not self.plans.owner.state and window.is_open:
            # torch.distributed.checkpoint makes the state of an optimizer that has none by a step of its own, with
            # zeros in p.grad: an open window refuses that, and a learning rate of 0 would be left behind.
            held = zip(window.params, window.sums.accumulators, strict=True)
            marked = next((param for param, accumulator in held if accumulator is not None), window.params[0])
            self.plans.owner.state[marked] = {}

    def _agree(self, prepared: Prepared, grads: Grads, *, last: bool) -> None:
        """Before a window closes: processes tell each other their weights, and who has gradients of which parameter."""
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

    def _add_up(self, prepared: Prepared) -> None:
        """Adds up the accumulators of all processes."""
        window = self.window
        if not prepared.exchange.adds_up or window.phase is Phase.SEALED:
            return
        try:
            prepared.exchange.add_up(window.sums.arena.memory_of(prepared.plan, window.sums.accumulators))
        except BaseException:
            window.drop()  # some are added up, some are not
            raise
        window.seal()

    # ---- out of it -------------------------------------------------------------------------------------------------

    def measure(self, divisors: Divisors) -> Measured | None:
        """The coefficient of the gradients that a step takes now; None where there is no gradient."""
        if self.release is not None:
            self.release.end_before_step()
        window, prepared = self.window, self.plans.current()
        if prepared.exchange.adds_up and window.phase is Phase.IDLE:
            prepared = self._take_own(prepared.plan)
        grads, present = prepared.plan.gradients()
        if window.phase is Phase.CLOSED and not present:
            window.drop()  # model.zero_grad() has released it
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
            window.habits.see(window.params)  # a master that a checkpoint has brought was written into its parameter
        plan, complete = prepared.plan, present == len(grads)
        scaling = self._scaling(plan, divisors, normalization)
        stale: Grads | None = matched
        partials: Tensor | None = None
        if is_open:
            stale, partials = window.sums.stale(matched), window.sums.partials
        elif scaling.takes_norm:
            partials = prepared.cleared_partials(complete)
        outcome = prepared.norm(stale, partials, scaling)
        outcome.spends_grads = is_open
        return Measured(prepared, grads, matched, complete, outcome)

    def refuse_live(self, present: int) -> None:
        """Refuses a step of an open window beside gradients that it has not got."""
        if present and self.window.is_open:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step()"
            )

    def _take_own(self, plan: Plan) -> Prepared:
        """Where processes add up gradients, those in p.grad are this one's: a window of one micro-batch."""
        if plan.gradients()[1]:
            self.fold(None, in_loss=False, last=False)
        else:
            self.window.open(plan)  # others may have some
        return self.plans.current()

    def _sums(self, prepared: Prepared, fresh: int) -> tuple[Grads, int]:
        """The open window's sums, and how many there are, once it is complete. Args: fresh: gradients in p.grad."""
        window, plan = self.window, prepared.plan
        self.refuse_live(fresh)
        window.follow(plan)
        window.habits.watch_writes(window.params)
        if window.phase is not Phase.SEALED:  # by a step that was refused
            self._agree(prepared, [None] * len(plan.params), last=False)
        window.weights.check(0.0)
        return window.sums.accumulators, window.sums.count

    def _scaling(self, plan: Plan, divisors: Divisors, normalization: Number | None) -> Scaling:
        settings, found_inf = self.settings, divisors.found_inf
        is_unchecked = divisors.for_scaler and found_inf is None
        # Whoever uses a window is promised that bad weights skip the step.
        takes_norm = divisors.is_shared or is_unchecked or self.window.phase is not Phase.IDLE
        takes_norm = takes_norm or settings.max_grad_norm is not None or settings.nonfinite in ("skip", "raise")
        scaling = Scaling(plan.device, takes_norm=takes_norm, max_grad_norm=settings.max_grad_norm)
        if self.skips is None or self.skips.count.device != plan.device:
            self.skips = Skips(plan.device)
        if not divisors.is_shared and self.counts_skips(divisors):
            scaling.skips = self.skips.count
        if found_inf is not None:
            found_inf = replicated(torch.as_tensor(found_inf, dtype=torch.float32))
            scaling.found_inf = on_device(found_inf, plan.device, torch.float32)
        for divisor in (divisors.grad_scale, divisors.normalizer, normalization):
            if divisor is not None:
                scaling.normalize(divisor)
        checked = takes_norm or scaling.device_normalization is not None
        scaling.skips_nonfinite = checked and (settings.nonfinite != "propagate" or is_unchecked)
        return scaling

    def counts_skips(self, divisors: Divisors) -> bool:
        """Whether a step that is skipped counts; others raise."""
        return self.settings.nonfinite != "raise" or divisors.for_scaler

    # ---- the step --------------------------------------------------------------------------------------------------

    def refuse_nonfinite(self, measured: Measured, divisors: Divisors) -> None:
        """With nonfinite="raise", which waits for the device.

        Raises:
            RuntimeError: the norm is not finite, or a scaler has found as much.
        """
        self.outcome = measured.outcome
        if not self.counts_skips(divisors) and bool(measured.outcome.skipped):
            raise RuntimeError(
                f"the global norm of the gradients is {float(measured.outcome.norm)}, nothing was updated; look for "
                "the non-finite gradient (or found_inf), and call zero_grad() to go on, or use nonfinite='skip'"
            )

    def finish(self, measured: Measured | None) -> None:
        """The step itself, where there is a gradient; the window is over then."""
        if measured is not None:
            self._apply(measured)
        self.end_window()

    def _apply(self, measured: Measured) -> None:
        if self.plans.owner.own_step is not None:
            self.plans.owner.own_step(self.plans.owner, self, measured)
        else:
            self._update(measured)
        assert self.skips is not None
        self.skips.steps += 1
        if not self.skips.steps % self.skips.WATCH_EVERY:
            self.skips.look()

    def _update(self, measured: Measured) -> None:
        plan, grads = measured.prepared.plan, measured.matched
        if plan.has_remainders:
            self.plans.masters.refresh(plan)
        copies = [plan.rows[index] for index in plan.copies if grads[index] is not None]
        for row in copies:
            row.tensor.copy_(row.owned)
        measured.prepared.backend.step(plan, grads, plan.hypers(self.plans.owner.param_groups), measured.outcome)
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
        """After a step, made or skipped: its gradients are spent."""
        if self.window.phase is not Phase.IDLE:
            self.window.consume(self.plans.params)

    def refuse_foreign_scaler(self) -> None:
        """Refuses gradients that a stock GradScaler cannot unscale and look at."""
        is_idle = self.window.phase is Phase.IDLE
        if self.window.is_open or (self.settings.process_group is not None and is_idle):
            what = "a GradScaler cannot see into an open window"
            if is_idle:
                what = "gradients are not added up over the processes yet, so a GradScaler would decide on its own"
            raise RuntimeError(
                f"{what}; close it with accumulate(..., last=True) before "
                "scaler.unscale_() or scaler.step() (accumfused.GradScaler.step() needs no closed one)"
            )

    def refuse_open(self, call: str, why: str = "") -> None:
        """Refuses a call in the midst of a window."""
        if self.window.is_open:
            raise RuntimeError(f"a window is open{why}; call optimizer.step() or zero_grad() before {call}")
