"""The engine: from gradients in p.grad to the window, and from the window, or p.grad, to updated parameters.

docs/internals/architecture.md follows one gradient from here to the kernels.
A micro-batch is one `fold`. A step is `measure`, which reduces the gradients to one coefficient (`Backend.norm`), and
`finish`, which applies it (`Backend.step`); nothing between them waits for the host. A fold and a step each end in a
`Commit` (protocol.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.arena import return_freed
from accumfused.core.coefficients import Clipping, Policies
from accumfused.core.metrics import Meter
from accumfused.core.noise import Noise
from accumfused.core.norm import Measured, take_norm
from accumfused.core.observer import Observer
from accumfused.core.plan import Plan
from accumfused.core.plans import Plans, Surroundings
from accumfused.core.protocol import (
    Call,
    Commit,
    Divisors,
    DuringBackward,
    Number,
    Outcome,
    Owner,
    Scaling,
    Step,
    on_device,
)
from accumfused.core.reader import setting_grads
from accumfused.core.rows import Grads
from accumfused.core.weights import weight_if
from accumfused.core.window import Phase, Window
from accumfused.formats.shards import local
from accumfused.settings import NAMES, Settings


class Engine:
    """Takes one optimizer's gradients to weights: the only door for clipping, scalers, release and checkpoints.

    Args:
        owner: the optimizer.
        window: an open window, if the owner is a copy of an optimizer.
        skipped: how many steps that optimizer has skipped: int64, shape [].
    """

    def __init__(
        self,
        owner: Owner,
        settings: Settings,
        surroundings: Surroundings,
        window: Window | None = None,
        skipped: Tensor | None = None,
    ) -> None:
        self.settings = settings
        self.plans = Plans(owner, settings, surroundings, skipped)
        self.window = window or Window()
        self.clipping = Clipping(settings)
        self.meter = Meter(int(settings.metrics)) if settings.metrics else None
        self.noise = Noise(settings.noise_decay) if settings.noise_decay else None
        self.observers: list[Observer] = [observer for observer in (self.meter, self.noise) if observer is not None]
        self.outcome: Outcome | None = None  # of the last step
        self.dropped: Tensor | None = None  # int64, shape []: micro-batches that nonfinite="drop" has left out
        self.scaler_divisors: Divisors | None = None  # those of a GradScaler of ours, while it steps
        self.during_backward: DuringBackward | None = None  # what folds gradients, or sums, there
        self.group: Callable[[], Any] | None = None  # gives the ClipGroup it is in; None: it clips alone
        self.attached: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of DistributedDataParallel, from attach_ddp

    def _commit(self, window: Window, *calls: Call[Any]) -> Commit:
        """Makes the commit that puts a draft in the window's place, and makes these calls."""
        breaks = partial(setattr, self.window, "phase", Phase.BROKEN)
        return Commit([partial(setattr, self, "window", window), *calls], [breaks])

    # ---- a micro-batch ---------------------------------------------------------------------------------------------

    def check(
        self, weight: Number | None, *, in_loss: bool, last: bool, param_ids: Container[int] | None = None
    ) -> tuple[Plan, Grads, int]:
        """Refuses a wrong micro-batch before anything is written.

        Args:
            weight: None: a plain sum.
            in_loss: the weight multiplied the loss, so it is in the gradients already.
            last: the micro-batch closes the window.
            param_ids: the parameters whose gradients are folded; None: all, and the micro-batch ends.

        Returns:
            The plan, the fresh gradients, and their number.
        """
        self.plans.owner._refuse_gradients()
        plan = self.plans.current(with_states=False)
        grads, present = plan.reader.read_grads()
        plan.exchange.check(plan, weight, in_loss=in_loss)
        if param_ids is not None:
            grads = Grads([g if id(param) in param_ids else None for param, g in zip(plan.params, grads, strict=True)])
            present = sum(grad is not None for grad in grads)
        elif self.during_backward is not None:
            self.during_backward.end(weight, in_loss=in_loss)
        self.window = self.window.check(plan, grads, weight, in_loss=in_loss)
        for observer in self.observers:
            observer.check(plan.exchange, weight)
        if last and plan.exchange.is_alone:  # else other processes may have weights
            self.window.weights.check_total(weight)
        if self.window.is_open:
            self.window.habits.watch_leaks()
        return plan, grads, present

    def enter(self, plan: Plan, grads: Grads, weight: Number | None) -> None:
        """Begins a micro-batch during its backward, with its weight in the loss."""
        plan.exchange.check(plan, weight, in_loss=True)
        self.window = self.window.check(plan, grads, weight, in_loss=True)
        if self.window.is_open:
            self.window.habits.watch_leaks()
        if not plan.exchange.is_alone:
            self._bring_to_unit_one(plan)
        self.window = self.window.entered(plan, weight, in_loss=True)

    def fold(
        self, weight: Number | None, *, in_loss: bool, last: bool, param_ids: Container[int] | None = None
    ) -> None:
        """Adds fresh gradients to the window, and releases them; see `check`."""
        plan, grads, present = self.check(weight, in_loss=in_loss, last=last, param_ids=param_ids)
        ends = param_ids is None
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        if not present and not empty and self.window.in_progress is None:
            self._refuse_nothing(plan, in_loss=in_loss)
        closes = last and ends
        if closes and self.window.is_open:
            self.window.habits.watch_writes(plan)
        matched = plan.reader.match(grads)
        if matched is not grads:  # copies of some: `add` keeps what kernels read, and these are released, too
            plan.record(Grads(g for g, m in zip(grads, matched, strict=True) if g is not m))
        if not plan.exchange.is_alone:
            self._bring_to_unit_one(plan)
        calls: list[Call[Any]] = [plan.reader.releasing(param_ids)]
        is_left_out = empty and not plan.exchange.has_means  # by the loop, which may do so because it is not finite
        looks = self.settings.nonfinite == "drop" and present and not is_left_out
        is_finite = self._is_finite(plan, matched, weight, calls) if looks else None
        if self.window.in_progress is None:
            window = self.window.entered(plan, weight, in_loss=in_loss, is_finite=is_finite)
        else:
            window = self.window.draft()
        if is_finite is not None:
            weight, in_loss = weight_if(is_finite, weight), in_loss and weight is not None
        for observer in self.observers:
            observer.before_fold(plan, matched, window, weight, in_loss)
        if ends and self.during_backward is not None:
            self.during_backward.forget()
        if closes:
            window.agree(matched, seed=self.plans.seed, last=True)
        commit = self._commit(window, *calls)
        window.add(matched, commit, has_all_grads=present == len(grads), ends=ends)  # and it takes the window's place
        if closes:
            self._close(plan)
        if not self.plans.owner.state and self.window.is_open:
            self._mark_state()

    def _refuse_nothing(self, plan: Plan, *, in_loss: bool) -> None:
        """Refuses a micro-batch without gradients, unless fully_shard keeps them in the module (without its sync)."""
        if not (in_loss and plan.is_spread):
            raise RuntimeError(
                "there is no new gradient to accumulate; call loss.backward() before each accumulate() "
                "(optimizer.backward() accumulates by itself)"
            )
        if self.noise is not None:
            raise RuntimeError(
                "fully_shard keeps the gradients of this micro-batch, and delivers them in a sum with others, "
                "which tells no noise; call set_requires_gradient_sync(True) for each, or leave noise_scale= out"
            )

    def _mark_state(self) -> None:
        """Gives a parameter an empty state, which outdates the plan once: before the first step there is none else.

        torch.distributed.checkpoint makes a missing optimizer state by a step of its own, with zeros in p.grad. An open
        window refuses that step, and the learning rate of 0 that it sets would stay.
        """
        both = zip(self.window.params, self.window.sums, strict=True)
        marked = next((param for param, accumulator in both if accumulator is not None), self.window.params[0])
        self.plans.owner.state[marked] = {}

    def _is_finite(self, plan: Plan, grads: Grads, weight: Number | None, calls: list[Call[Any]]) -> Tensor:
        """Takes a micro-batch's norm, and adds a call that counts it as dropped unless its norm is finite.

        Returns:
            Whether it is, or the weight on the device is 0, which leaves the micro-batch out already: bool, shape [].
        """
        if self.dropped is None or self.dropped.device != plan.device:
            graphs.refuse_new_tensors({plan.device})
            self.dropped = torch.zeros((), dtype=torch.int64, device=plan.device)
        partials = torch.zeros(plan.chunks, dtype=plan.dtype, device=plan.device)
        is_finite = take_norm(plan, grads, partials, Scaling(plan.device, dtype=plan.dtype)).norm.isfinite()
        if isinstance(weight, Tensor) and not plan.exchange.has_means:
            is_finite |= on_device(weight, plan.device, torch.float64) == 0
        calls.append(partial(self.dropped.add_, ~is_finite))
        return is_finite

    def _bring_to_unit_one(self, plan: Plan) -> None:
        """Brings the sums of a window that began without other processes to the unit of windows that are added up."""
        window = self.window
        if window.phase is not Phase.OPEN or window.in_progress is not None:
            return
        converted = window.weights.in_unit_one(plan)
        if converted is not None:
            window = window.draft()
            window.weights, factor = converted
            window.scale(factor, self._commit(window))

    # ---- the window's end ------------------------------------------------------------------------------------------

    def _close(self, plan: Plan) -> None:
        """Makes p.grad of the sums, divided."""
        self._add_up(plan)
        self._divide(replace(self.window, phase=Phase.SEALED), self.window.divisor())
        window, expose = self.window.exposed()
        self._commit(window, expose).end()
        for observer in self.observers:
            observer.closed(plan, self.window)

    def _divide(self, window: Window, divisor: Number) -> None:
        """Makes means of a draft's sums, and takes the draft."""
        commit = self._commit(window)
        if isinstance(divisor, Tensor) or divisor != 1.0:
            window.divided = divisor
            window.scale(1.0 / divisor, commit)
        else:
            commit.end()

    def _add_up(self, plan: Plan) -> None:
        """Adds up the sums of all processes, and what observers count."""
        window = self.window
        if not plan.exchange.adds_up or window.phase is Phase.SEALED:
            return
        try:
            numbers = [flat for observer in self.observers for flat in observer.numbers(plan, window)]
            dropped = self._numbers_of_drops(plan)
            memory = window.memory(plan)
            plan.exchange.add_up([*dropped, *numbers, *memory] if memory else [])
        except BaseException:
            self.drop()  # some are added up, some are not
            raise
        self.window = window.sealed()
        if dropped:
            self.window.weights = replace(self.window.weights, dropped=dropped[0][0] > 0)

    def _numbers_of_drops(self, plan: Plan) -> list[Tensor]:
        """Returns what processes add up of `dropped`: their scalers back off alike. fp64 [1]; none without "drop"."""
        if self.settings.nonfinite != "drop":
            return []
        number, dropped = torch.zeros(1, dtype=torch.float64, device=plan.device), self.window.weights.dropped
        return [number if dropped is None else number + dropped]

    def _end_accumulation(self, plan: Plan) -> Plan:
        """Completes the window of a step: refuses a gradient that it lacks, follows new parameters, checks its weights.

        Processes agree on it, and add up their sums. Where they do, p.grad is a window, too.

        Returns:
            The current plan.
        """
        if self.window.phase is Phase.IDLE:
            if plan.reader.read_grads()[1]:
                self.fold(None, in_loss=False, last=False)
            else:
                self.window = self.window.opened(plan)  # other processes may have gradients
            plan = self.plans.current()
        if not self.window.is_open:
            return plan
        self.refuse_live(plan.reader.present())
        self.window = self.window.following(plan)
        self.window.habits.watch_writes(plan)
        others_close = None
        if self.window.phase is not Phase.SEALED and not plan.exchange.is_alone:  # a refused step may have sealed it
            self._bring_to_unit_one(plan)
            window, nothing = self.window.draft(), Grads([None] * len(plan.rows))
            others_close = window.agree(nothing, seed=self.plans.seed, last=False)
            self.window = window
        if self.window.agreed is None:
            self.window.weights.check_total()
        if not plan.exchange.is_alone:
            self._add_up(plan)
            if others_close is not None:  # they divide before their step: so does this process, for the same bits
                divisor = torch.where(others_close, self.window.divisor(), 1.0)
                self._divide(self.window.draft(), divisor)
        return plan

    def drop(self) -> None:
        """Ends the window without a step."""
        window = self.window
        if window.holds_micro_batches:  # a GradScaler may skip a closed window; plain loops may drop freely
            window.habits.dropped()
        if self.plans.last is not None:
            self.plans.last.drop()
        if window.phase is not Phase.IDLE:
            self.window = window.ended()
            self.window.restore_grad_dtypes()

    def wait(self) -> None:
        """Waits until the sums hold all folds so far: those who read them outside the engine call it."""
        if self.plans.last is not None:
            self.plans.last.wait()

    def refuse_live(self, present: int) -> None:
        """Refuses a step of an open window if there are gradients that it does not hold."""
        if present and self.window.is_open:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step(); or, if another loss has left it (a GAN's "
                f"generator, in the discriminator), {self.remedy_of_other_losses}"
            )

    @property
    def remedy_of_other_losses(self) -> str:
        """What a loop does about gradients that another loss leaves in these parameters."""
        if self.during_backward is None:
            return "the module's zero_grad(): discriminator.zero_grad() drops it and no window"
        return (
            "zero_grad() of the optimizer, because gradients are taken during backward and this one is in the sums; "
            "from then on discriminator.requires_grad_(False) before that loss's backward(), and True after it"
        )

    def refuse_open(self, call: str, why: str = "") -> None:
        """Refuses a call while a window is open."""
        self.window.refuse_broken()
        if self.window.is_open:
            raise RuntimeError(f"a window is open{why}; call optimizer.step() or zero_grad() before {call}")

    def release_memory(self) -> None:
        """Lets go of all tensors but states, and numbers that can be read; the next call makes them again."""
        self.refuse_open("release_memory()")
        if self.window.is_exposed(Grads(local(param.grad) for param in self.plans.params)):
            raise RuntimeError("p.grad is a closed window's sum; call step() or zero_grad() before release_memory()")
        last = self.plans.last
        if last is not None and (last.backend.is_captured or any(map(graphs.is_capturing, last.devices))):
            raise RuntimeError(
                "a CUDA graph has captured a call of this optimizer, and its replays need the memory; call "
                "release_memory() before the capture, or give up the graph and go on with a new optimizer, by "
                "load_state_dict(optimizer.state_dict())"
            )
        self.drop()  # a closed window, whose gradients model.zero_grad() has released
        self.plans.release()
        habits, grad_dtypes, noise = self.window.habits, self.window.grad_dtypes, self.window.noise
        self.window = Window(habits=habits, grad_dtypes=grad_dtypes, noise=noise)  # the sums are freed here
        del last  # and the plan's dense copies
        return_freed()

    # ---- the coefficient -------------------------------------------------------------------------------------------

    def measure(self, divisors: Divisors) -> Measured | None:
        """Computes the coefficient for the gradients that a step takes now; None if there is no gradient."""
        self.window.refuse_broken()
        self.wait()  # and hears of a fold that has failed
        settings, groups, policies = self.settings, self.plans.owner.param_groups, None
        if settings.clip is not None or settings.skip_above is not None or not all(map(NAMES.isdisjoint, groups)):
            policies = self.clipping.policies_of_step(self.plans.owner, divisors)
        plan, taken = self._taken()
        if not taken.present:
            taken.habits.watch_nothing(taken.weights.count)
            if settings.norm_group is None:  # else others wait for this process's part of the norm
                return None
        plan.check_eps(groups)
        if self.window.phase is not Phase.IDLE:  # whose end drops the sums; other gradients the user's code releases
            plan.record(taken.sums)
        matched = plan.reader.match(taken.sums)
        if not plan.has_all_states and plan.lacks_state(matched):
            plan = self.plans.with_states(plan, matched)
            taken.habits.see(plan)  # a state that was made brought a loaded master into its parameter
        measured = self._measured(plan, taken, matched, divisors, policies)
        try:
            for observer in self.observers:
                observer.before_step(measured, self.window, groups)
        except BaseException:
            measured.uncount()
            raise
        return measured

    def _taken(self) -> tuple[Plan, Window]:
        """Returns the plan and the window of a step: the open one, which this completes, or one that borrows p.grad."""
        if self.during_backward is not None:
            self.during_backward.end_before_step()
        plan = self.plans.current()
        if plan.exchange.adds_up or self.window.phase is not Phase.IDLE:
            plan = self._end_accumulation(plan)
        if self.window.is_open:
            return plan, self.window
        if self.window.phase is Phase.IDLE:
            self.window = self.window.fitted(plan)
        borrowing = self.window.borrowing(plan)
        if self.window.phase is Phase.IDLE:
            self.window.habits.watch_sums(borrowing.sums)
        elif not borrowing.present:
            self.drop()  # model.zero_grad() has released its gradients
        return plan, borrowing

    def _measured(
        self, plan: Plan, taken: Window, matched: Grads, divisors: Divisors, policies: Policies | None
    ) -> Measured:
        """Takes the norm of a step's matched gradients, if it needs one, and computes their coefficient."""
        divisor: Number = taken.divisor() if taken.present else 1.0
        scaling, takes_norm = self._scaling(plan, divisors, divisor, must=policies is not None)
        takes_limit = policies is not None or self.settings.max_grad_norm is not None
        takes_norm |= any(observer.takes_norm(plan) for observer in self.observers)
        if taken.is_open and not takes_limit and not divisors.is_shared:
            taken.habits.watch_clips()
        unmeasured: Grads | None = matched
        partials: Tensor | None = None
        if takes_norm:
            unmeasured, partials = taken.unmeasured(plan, matched), taken.partials
        if divisors.is_shared:  # the coefficient comes with those of others
            outcome = plan.backend.norm(plan, unmeasured, partials, Scaling(plan.device))
        elif policies is None or partials is None:
            outcome = take_norm(plan, unmeasured, partials, scaling)
        else:
            outcome = self.clipping.take_norm(policies, plan, unmeasured, partials, scaling)
        outcome.spends_grads, outcome.dropped = taken.is_open, self.window.weights.dropped
        return Measured(plan, taken, matched, outcome, scaling, divisor, partials)

    def _scaling(self, plan: Plan, divisors: Divisors, divisor: Number, *, must: bool) -> tuple[Scaling, bool]:
        """Collects the inputs of the coefficient, and tells whether the step takes a norm, as with `must` it does.

        Args:
            divisor: the window's.
        """
        settings = self.settings
        is_unchecked = divisors.for_scaler and divisors.found_inf is None
        # The contract of windows: bad weights skip the step.
        takes_norm = must or divisors.is_shared or is_unchecked or self.window.phase is not Phase.IDLE
        takes_norm = takes_norm or settings.norm_group is not None or settings.max_grad_norm is not None
        takes_norm = takes_norm or settings.nonfinite in ("skip", "drop", "raise")
        scaling = divisors.scaling(plan.device, plan.dtype)
        scaling.max_grad_norm = settings.max_grad_norm
        if not divisors.is_shared and self.counts_skips(divisors):
            scaling.skips = plan.skips.count
        scaling.normalize(divisor)
        checked = takes_norm or scaling.device_normalization is not None
        scaling.skips_nonfinite = checked and (settings.nonfinite != "propagate" or is_unchecked)
        return scaling, takes_norm

    def counts_skips(self, divisors: Divisors) -> bool:
        """Tells whether a skipped step is counted; otherwise it raises."""
        return self.settings.nonfinite != "raise" or divisors.for_scaler

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

    # ---- the step --------------------------------------------------------------------------------------------------

    def finish(self, measured: Measured | None) -> None:
        """Makes the step, if there is a gradient, and ends the window; then the step counts.

        A step that fails leaves histories, noise scale and skips as they were, and the window open. Once it is made, no
        error is raised, because the caller would repeat it: `measured.failures` are for `warn_after_step`.
        """
        if measured is None:
            self.end_window()
            return
        follows: list[Callable[[], None]] = [self.window.habits.stepped] if self.window.phase is not Phase.IDLE else []
        try:
            own_step = self.plans.owner._own_step
            if own_step is not None:
                own_step(self.plans.owner, self, measured)
            else:
                self.update(measured, measured.plan.backend.step)
        except BaseException as error:
            measured.uncount()
            if not measured.is_made or not isinstance(error, Exception):
                raise
            measured.failures.append(error)
        follows += [self.window.restore_grad_dtypes, *(partial(each.after_step, measured) for each in self.observers)]
        follows.append(partial(measured.plan.skips.stepped, or_above=self.settings.skip_above is not None))
        for follow in follows:
            try:
                follow()
            except Exception as error:
                measured.failures.append(error)

    def update(self, measured: Measured, step: Step) -> None:
        """Runs `step`, which is `Backend.step` or does as much, with copies of strided parameters around it."""
        plan, grads = measured.plan, measured.matched
        copied = [plan.rows[index] for index in plan.copies if grads[index] is not None]
        for row in copied:
            row.tensor.copy_(row.owned)
        written: Iterable[Tensor] = chain.from_iterable([group["params"] for group in self.plans.owner.param_groups])
        if measured.taken.lacking:
            written = [param for param, grad in zip(written, grads, strict=True) if grad is not None]
        calls: list[Call[Any]] = [partial(row.owned.copy_, row.tensor) for row in copied]
        # Kernels write past autograd: without this, a write between forward and backward would go unnoticed.
        # (`torch.autograd.graph.increment_version` does it in Python.)
        calls.append(partial(torch._C._increment_version, written))  # noqa: SLF001
        for observer in self.observers:
            step = observer.around(step)
        commit = self.commit_of_step(measured, *calls)
        step(plan, grads, plan.hypers(self.plans.owner.param_groups), measured.outcome, commit)

    def commit_of_step(self, measured: Measured, *calls: Call[Any]) -> Commit:
        """Makes the commit of a step, made or skipped: it ends the window, and keeps histories and measures."""
        outcome = measured.outcome
        calls += (partial(setattr, measured, "is_made", True), partial(setattr, self, "outcome", outcome))
        if outcome.history is not None:
            calls += (self.clipping.keeping(outcome.history),)
        for observer in self.observers:
            calls += tuple(observer.with_step(outcome))
        return self._commit_of_end(*calls)

    def end_window(self) -> None:
        """Ends the window and releases its gradients: a step has taken them, or there are none."""
        self._commit_of_end().end()
        self.window.restore_grad_dtypes()

    def _commit_of_end(self, *calls: Call[Any]) -> Commit:
        """Makes the commit that ends the window, releases its gradients, and makes these calls."""
        if self.window.phase is Phase.CLOSED:
            calls = (setting_grads(self.plans.params, repeat(None)), *calls)
        return self._commit(self.window.ended(), *calls)
