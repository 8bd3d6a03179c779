"""The gradient tail: from gradients, in p.grad or in a window, to updated weights.

One step is two verbs of a backend with nothing in between that waits for the host: `norm` makes the sums that
accumulation.py has left (or takes them from p.grad) one coefficient, `step` applies it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from accumfused import backends
from accumfused.backends.reference import finish_norm
from accumfused.core import graphs, plan
from accumfused.core.masters import Masters
from accumfused.core.plan import Grads, Plan
from accumfused.core.protocol import Backend, Outcome, Scaling, on_device
from accumfused.core.skips import Skips
from accumfused.core.window import Phase, Window
from accumfused.distributed import groups
from accumfused.formats import shards
from accumfused.formats.convert import make_state
from accumfused.formats.kinds import names
from accumfused.rule import Rule
from accumfused.settings import Settings

if TYPE_CHECKING:
    from accumfused.distributed.exchange import Reduction
    from accumfused.loop.clip_group import ClipTogether
    from accumfused.loop.release import GradientRelease


@dataclass
class Runtime:
    """What is built when first needed, and built again in a copy."""

    window: Window = field(default_factory=Window)
    backend: Backend | None = None
    devices: set[torch.device] | None = None  # that the backend was selected for
    plan: Plan | None = None
    reduction: Reduction | None = None
    masters: Masters = field(default_factory=Masters)
    partials: Tensor | None = None  # of the norm of gradients that came in p.grad
    outcome: Outcome | None = None  # of the last step
    skips: Skips | None = None
    taken: Taken | None = None  # with clip_together, by the step of another optimizer
    scaled: tuple[Any, Any] | None = None  # what our GradScaler steps with in place of grad_scale and found_inf
    release: GradientRelease | None = None  # while gradients are folded during backward
    attached: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # DistributedDataParallel, by attach_ddp


@dataclass(frozen=True)
class Divisors:
    """What one step divides by, besides its window's weights, and who says that it is to be skipped."""

    normalizer: float | Tensor | None = None
    grad_scale: float | Tensor | None = None
    found_inf: float | Tensor | None = None
    for_scaler: bool = False  # to which an overflow is nothing to raise for


@dataclass
class Measured:
    """The gradients of one step with their coefficient: what is left is to apply them."""

    plan: Plan
    grads: Grads  # as the step found them: p.grad, or an open window's accumulators
    matched: Grads  # as the kernels read them
    complete: bool  # there is one for every parameter
    outcome: Outcome


Fingerprint = list[tuple[int, int, int]]  # row, id and version of each gradient


@dataclass
class Taken:
    """What an optimizer will step with, and what must not have changed until then."""

    measured: Measured | None
    divisors: Divisors
    fingerprint: Fingerprint


class Tail(torch.optim.Optimizer):
    """The gradient tail of one optimizer: its plan, its window, and what a step does in three parts.

    `_measure` ends in the coefficient, `_apply` writes parameters and states.
    """

    rules: ClassVar[tuple[type[Rule], ...]] = ()

    _settings: Settings
    _runtime: Runtime
    _together: ClipTogether | None = None

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        """The rule for a parameter group."""
        raise NotImplementedError

    def _plan(self) -> Plan:
        """The plan, and with it the backend, for the parameters and states of now."""
        runtime = self._runtime
        rules = [self.rule_of(group) for group in self.param_groups]
        known = runtime.plan
        if known is None or known.rules != rules or not known.unchanged(self.param_groups, self.state):
            devices = {p.device for group in self.param_groups for p in group["params"] if plan.has_memory(p)}
            graphs.refuse_new_tensors(devices)
            if runtime.backend is None or runtime.devices not in (None, devices):
                runtime.backend = backends.select(self._settings.backend, devices)
            runtime.devices = devices
            runtime.plan = known = plan.build(self.param_groups, self.state, rules, self._settings)
            runtime.backend.prepare(known, self.param_groups, self.state)
            if runtime.skips is None or runtime.skips.count.device != known.device:
                runtime.skips = Skips(known.device)
        return known

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _let_go(self) -> None:
        if self._runtime.plan is not None:
            self._runtime.plan.let_go()

    def _fold(
        self, weight: float | Tensor | None, *, in_loss: bool, last: bool, part: Container[int] | None = None
    ) -> None:
        """Args: part: ids of the parameters whose gradients are folded; None: all, and the micro-batch ends."""
        window, release, current = self._runtime.window, self._runtime.release, self._plan()
        grads, present = current.gradients()
        self._refuse_unreduced(current, weight, in_loss=in_loss)
        group = self._settings.process_group
        if part is not None:
            grads = [grad if id(param) in part else None for param, grad in zip(current.params, grads, strict=True)]
            present = sum(grad is not None for grad in grads)
        elif release is not None:
            release.end(weight, in_loss=in_loss)
        window.begin(current, grads, weight)
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        # (fully_shard without its synchronization leaves them with the module, and brings their sum later.)
        if not present and not empty and not window.entered and not (in_loss and current.is_spread):
            raise RuntimeError("there is no new gradient to accumulate; call loss.backward() before each accumulate()")
        if last and group is None and not current.has_means:
            window.check_total(weight)
        if last and part is None and window.phase is Phase.OPEN:
            window.watch_writes()
        matched = current.match(grads)
        assert self._runtime.backend is not None
        complete = present == len(grads)
        closes = last and (part is None or group is None)
        with window.undone_by_an_error():
            if not window.entered:
                window.enter(current, weight, in_loss=in_loss)
            if part is None and release is not None:
                release.forget()
            if closes and part is None:
                self._agree(current, matched, last=True)
            window.fold(current, self._runtime.backend, matched, complete, last=closes, ends=part is None)
        if last and part is None:
            self._reduce()
            window.expose()
        if not self.state and window.phase is Phase.OPEN:
            # torch.distributed.checkpoint makes the state of an optimizer that has none by a step of its own, with
            # zeros in p.grad: an open window refuses that, and a learning rate of 0 would be left behind.
            rows = zip(window.params, window.accumulators, strict=True)
            marked = next((param for param, accumulator in rows if accumulator is not None), window.params[0])
            self.state[marked] = {}

    def _refuse_unreduced(self, current: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Refuses gradients that are not what their windows take them for, where there is more than one process."""
        if not groups.has_processes() or self._runtime.window.phase is Phase.OPEN:
            return
        own = [s is None and p.requires_grad for p, s in zip(current.params, current.shards, strict=True)]
        if current.has_means and weight is not None and not in_loss:
            raise RuntimeError(
                "the gradients are means over processes already (DTensors, or grads_are_reduced=True), and a weight "
                "would come too late; call optimizer.backward(loss, weight=...) in place of loss.backward() and "
                "accumulate(weight)"
            )
        if current.is_spread and self._settings.process_group is not None:
            raise RuntimeError(
                "gradients of DTensors are reduced already; leave process_group to optimizers of plain parameters"
            )
        if any(own) and self._settings.process_group is None and not self._settings.grads_are_reduced:
            raise RuntimeError(
                "there is more than one process, and accumulate() takes gradients out of the reach of "
                "DistributedDataParallel; give the optimizer process_group= and call accumfused.attach_ddp(ddp, "
                "optimizer), or say grads_are_reduced=True if every micro-batch's gradients are reduced already"
            )

    def _reduction(self) -> Reduction:
        if self._runtime.reduction is None:
            from accumfused.distributed.exchange import (
                Reduction,  # needs torch.distributed, which some builds of torch lack
            )

            self._runtime.reduction = Reduction(self._settings.process_group, self._settings.reduce_dtype)
        return self._runtime.reduction

    def _agree(self, current: Plan, grads: Grads, *, last: bool) -> None:
        """Before a window closes: processes tell each other their weights, and who has gradients of what."""
        window, settings = self._runtime.window, self._settings
        if settings.process_group is not None:
            reduction = self._reduction()
            reduction.agree(current, settings.seed)
            present = window.present(grads)
            if any(here and not p.requires_grad for p, here in zip(current.params, present, strict=True)):
                raise RuntimeError(
                    "a parameter that requires no gradient has one, and other processes may have none; freeze "
                    "parameters between windows, and set their p.grad to None"
                )
            divisor, missing = reduction.exchange(current, window.total, window.is_weighted, present, last=last)
            window.agree(current, divisor, missing)
        elif current.has_means:
            from accumfused.distributed.exchange import mean_of_totals

            divisor = mean_of_totals(current, window.total, window.is_weighted)
            window.agree(current, divisor, [False] * len(grads))

    def _reduce(self) -> None:
        """Adds up the accumulators of all processes."""
        window = self._runtime.window
        if self._settings.process_group is None or window.is_reduced:
            return
        try:
            self._reduction().add_up(window.arena.memory_of(self._plan(), window.accumulators))
        except BaseException:
            window.drop()  # some are added up, some are not
            raise
        window.reduced()

    def _take_own(self) -> None:
        """Where processes add up gradients, those in p.grad are this one's: a window of one micro-batch."""
        if self._settings.process_group is not None and self._runtime.window.phase is Phase.IDLE:
            current = self._plan()
            if current.gradients()[1]:
                self._fold(None, in_loss=False, last=False)
            else:
                self._runtime.window.open(current)  # others may have some

    def _measure(self, divisors: Divisors) -> Measured | None:
        """The coefficient of the gradients that a step takes now; None where there is no gradient."""
        if self._runtime.release is not None:
            self._runtime.release.end_before_step()
        self._take_own()
        runtime, window, current = self._runtime, self._runtime.window, self._plan()
        grads, present = current.gradients()
        if window.phase is Phase.CLOSED and not present:
            window.drop()  # model.zero_grad() has released it
        if window.phase is Phase.OPEN:
            self._refuse_live(present)
            window.follow(current)
            window.watch_writes()
            if not window.is_reduced:  # by a step that was refused, or with clip_together by another's
                self._agree(current, [None] * len(grads), last=False)
            window.check_total(0.0)
            grads = window.accumulators
            present = len(grads) - sum(grad is None for grad in grads)
        if not present:
            return None
        normalization: float | Tensor = 1.0
        if window.phase is Phase.OPEN:
            assert runtime.backend is not None
            normalization = window.settle(current, runtime.backend)
            self._reduce()
        matched = current.match(grads)
        if current.lacks_state(matched):
            current = self._with_states(current, matched)

        backend, complete = runtime.backend, present == len(grads)
        assert backend is not None
        scaling = self._scaling(current, divisors)
        scaling.normalize(normalization)
        stale: Grads | None = matched
        partials: Tensor | None = None
        if window.phase is Phase.OPEN:
            stale, partials = window.stale(matched), window.partials
        elif scaling.takes_norm:
            partials = self._partials(current, complete)
        if current.is_spread and partials is not None:
            outcome = self._norm_over_processes(current, stale, partials, scaling)
        else:
            outcome = backend.norm(current, stale, partials, scaling)
        outcome.spends_grads = window.phase is Phase.OPEN
        return Measured(current, grads, matched, complete, outcome)

    def _refuse_live(self, present: int) -> None:
        if present and self._runtime.window.phase is Phase.OPEN:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step()"
            )

    def _norm_over_processes(self, current: Plan, stale: Grads | None, partials: Tensor, scaling: Scaling) -> Outcome:
        from accumfused.distributed.exchange import sum_of_squares

        assert self._runtime.backend is not None
        self._runtime.backend.norm(current, stale, partials, Scaling(current.device, takes_norm=True))
        return finish_norm(sum_of_squares(current, partials), scaling)

    def _with_states(self, current: Plan, grads: Grads) -> Plan:
        """The plan once every parameter that has a gradient has its state."""
        graphs.refuse_new_tensors({current.device})  # the zeros would be a graph's, and never be there
        self._runtime.masters.settle()
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            param, tensor = current.params[index], current.tensors[index]
            if index in current.copied:
                tensor.copy_(current.owned[index])
            shard, entries = current.shards[index], self.state[param]
            own = entries if shard is None else shard.parts(entries)
            rule = current.rules[current.groups[index]]
            make_state(rule, current.formats[index], tensor, own, self._settings.seed)
            if shard is not None:
                shard.put(own, entries, names(rule, current.formats[index]))
            if index in current.copied:
                current.owned[index].copy_(tensor)
        self._runtime.masters.written()  # what was copied back is not somebody else's
        self._runtime.masters.see(self.state)  # a state that was converted lies elsewhere
        self._runtime.window.see_weights()
        return self._plan()

    def _scaling(self, current: Plan, divisors: Divisors) -> Scaling:
        settings, runtime = self._settings, self._runtime
        # Whoever uses a window is promised that bad weights skip the step.
        takes_norm = settings.takes_norm or runtime.window.phase is not Phase.IDLE
        is_unchecked = divisors.for_scaler and divisors.found_inf is None
        takes_norm = takes_norm or self._together is not None or is_unchecked
        scaling = Scaling(current.device, takes_norm=takes_norm, max_grad_norm=settings.max_grad_norm)
        if self._together is None and self._counts_skips(divisors):
            assert runtime.skips is not None
            scaling.skips = runtime.skips.count
        if divisors.found_inf is not None:
            found_inf = shards.replicated(torch.as_tensor(divisors.found_inf, dtype=torch.float32))
            scaling.found_inf = on_device(found_inf, current.device, torch.float32)
        if divisors.grad_scale is not None:
            scaling.normalize(divisors.grad_scale)
        if divisors.normalizer is not None:
            scaling.normalize(divisors.normalizer)
        checked = takes_norm or scaling.device_normalization is not None
        scaling.skips_nonfinite = checked and (settings.nonfinite != "propagate" or is_unchecked)
        return scaling

    def _counts_skips(self, divisors: Divisors) -> bool:
        """Others raise."""
        return self._settings.nonfinite != "raise" or divisors.for_scaler

    def _refuse_nonfinite(self, outcome: Outcome, divisors: Divisors) -> None:
        """With nonfinite="raise", which waits for the device."""
        if self._counts_skips(divisors) or not bool(outcome.skipped):
            return
        raise RuntimeError(
            f"the global norm of the gradients is {float(outcome.norm)}, nothing was updated; look for the "
            "non-finite gradient (or found_inf), and call zero_grad() to go on, or use nonfinite='skip'"
        )

    def _apply(self, measured: Measured) -> None:
        """The step itself."""
        current, grads, backend = measured.plan, measured.matched, self._runtime.backend
        assert backend is not None
        masters = self._runtime.masters
        masters.refresh(current)
        for index in current.copied:
            current.tensors[index].copy_(current.owned[index])
        hypers = [rule.hyper_values(group) for rule, group in zip(current.rules, self.param_groups, strict=True)]
        backend.step(current, grads, hypers, measured.outcome)
        for index in current.copied:
            if grads[index] is not None:
                current.owned[index].copy_(current.tensors[index])
        written = current.params
        if not measured.complete:
            written = [param for param, grad in zip(current.params, grads, strict=True) if grad is not None]
        # Kernels write past autograd: without this, a write between forward and backward would go unnoticed.
        torch.autograd.graph.increment_version(written)
        masters.written()

    def _partials(self, current: Plan, complete: bool) -> Tensor:
        """Room for the sums of squares; zero where there is no gradient."""
        runtime = self._runtime
        known = runtime.partials
        if known is None or len(known) != current.chunks or known.device != current.device:
            runtime.partials = torch.zeros(current.chunks, dtype=torch.float32, device=current.device)
        elif not complete:
            known.zero_()
        assert runtime.partials is not None
        return runtime.partials
