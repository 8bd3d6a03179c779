"""FusedOptimizer: what all optimizers of this package share. Rules add arithmetic, torch's classes their arguments.

One step is two verbs of a backend with nothing in between that waits for the host: `norm` makes the sums that
accumulation.py has left (or takes them from p.grad) one coefficient, `step` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from accumfused import backends, checkpoint, graphs, plan
from accumfused.accumulation import Phase, Window, checked_positive
from accumfused.backends.base import Backend, Outcome, Scaling, on_device, rescale
from accumfused.plan import Grads, Plan
from accumfused.rule import Rule
from accumfused.settings import SettingArguments, Settings
from accumfused.skips import Skips

if TYPE_CHECKING:
    from accumfused.clipping import ClipTogether


@dataclass
class Runtime:
    """What is built when first needed, and built again in a copy."""

    window: Window = field(default_factory=Window)
    backend: Backend | None = None
    devices: set[torch.device] | None = None  # that the backend was selected for
    plan: Plan | None = None
    partials: Tensor | None = None  # of the norm of gradients that came in p.grad
    outcome: Outcome | None = None  # of the last step
    skips: Skips | None = None
    scaled: tuple[Any, Any] | None = None  # what our GradScaler steps with in place of grad_scale and found_inf


@dataclass(frozen=True)
class Divisors:
    """What one step divides by, besides its window's weights, and who says that it is to be skipped."""

    normalizer: float | Tensor | None
    grad_scale: float | Tensor | None
    found_inf: float | Tensor | None
    for_scaler: bool  # who wants to know whether the gradients are finite, and does not want to hear of it by an error


@dataclass
class Measured:
    """The gradients of one step with their coefficient: what is left is to apply them."""

    plan: Plan
    grads: Grads  # as the step found them: p.grad, or an open window's accumulators
    matched: Grads  # as the kernels read them
    complete: bool  # there is one for every parameter
    outcome: Outcome


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step also normalizes, unscales and clips, in one pass over the gradients.

    Subclasses set `rules` and `rule_of`. See docs/state-machine.md for what may follow what.
    """

    rules: ClassVar[tuple[type[Rule], ...]] = ()
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = None  # whose checkpoints are ours

    _settings: Settings
    _runtime: Runtime
    _together: ClipTogether | None = None

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        """The rule for a parameter group."""
        raise NotImplementedError

    def _configure(self, settings: SettingArguments, *, differentiable: bool = False) -> None:
        if differentiable:
            raise ValueError("differentiable=True is not supported: the step is not recorded by autograd")
        self._settings = Settings(**settings)
        self._runtime = Runtime()

    # ---- the calls of a training loop -------------------------------------------------------------------------------

    @_disable_dynamo  # a compiled function calls it as it is
    @torch.no_grad()
    def accumulate(self, weight: float | Tensor | None = None, *, last: bool = False) -> None:
        """Adds every fresh `p.grad` to the open window, in fp32, and releases it (`p.grad = None`).

        Args:
            weight: of this micro-batch. Its gradients are multiplied by it and the window's sum is divided by the sum
                of weights: means over n tokens become, with weight=n, the mean over all tokens of the window. A number
                (checked), or a one-element tensor (not read: a bad one makes the step be skipped). 0 leaves the
                micro-batch out, whatever its gradients are. None: a plain sum, as autograd's.
            last: closes the window: divides by the sum of weights, and `p.grad` becomes the accumulator.

        Raises:
            RuntimeError: no new gradient; `p.grad` is still the previous window's accumulator; parameters changed
                within the window; gradients that cannot be used.
            ValueError: a negative or non-finite weight; weights that are all zero; weights for some micro-batches only.
            TypeError: a weight, parameter or gradient of a wrong type.
        """
        try:
            self._fold(weight, in_loss=False, last=last)
        finally:
            self._let_go()

    @_disable_dynamo
    def backward(self, loss: Tensor, weight: float | Tensor | None = None, last: bool = False) -> None:
        """Multiplies the loss by the weight, runs backward, and accumulates.

        The same window as with `loss.backward(); accumulate(weight, last=last)`, with the weight in the loss.

        Raises:
            RuntimeError: there is a gradient that was not accumulated; otherwise as `accumulate`.
        """
        weight = _checked_weight(weight)
        window, current = self._runtime.window, self._plan()
        grads, present = current.gradients()
        self._let_go()
        window.begin(current, grads, weight)
        if present:
            raise RuntimeError("there is a gradient that was not accumulated; call accumulate() or zero_grad() first")
        if last:
            window.check_total(weight)
        (loss if weight is None else loss * weight).backward()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                self._fold(weight, in_loss=True, last=last)
        finally:
            self._let_go()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, normalizer: float | Tensor | None = None) -> Any:
        """Updates the parameters from the window, or where there is none from `p.grad`.

        Gradients are divided by `normalizer` and `self.grad_scale`, clipped to `max_grad_norm` and applied in one
        pass. Nothing is written if the norm is non-finite (see `nonfinite`) or `self.found_inf` is not 0. A window is
        consumed and its accumulators are released; other gradients stay in `p.grad`, unchanged. With `write_grad`
        `p.grad` is the applied gradient instead, also of a window, which stays closed until `zero_grad()`.

        Args:
            closure: re-evaluates the model and returns the loss.
            normalizer: divides the gradients too: a number (checked), or a one-element tensor (not read: a bad one
                makes the step be skipped).

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: a window is open and there is a fresh gradient; a gradient that cannot be used; a non-finite
                norm with nonfinite="raise".
            ValueError: a normalizer that is not > 0; a window whose weights are all zero.
        """
        self._opt_called = True  # what LR schedulers look for
        if normalizer is not None:
            normalizer = checked_positive(normalizer, "normalizer")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._runtime.outcome = None
        try:
            self._step(normalizer)
        finally:
            self._let_go()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it tells schedulers itself, and need not be wrapped

    def _step(self, normalizer: float | Tensor | None) -> None:
        runtime, window = self._runtime, self._runtime.window
        scaled = runtime.scaled or (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        divisors = Divisors(normalizer, *scaled, for_scaler=runtime.scaled is not None)
        measured = self._measure(divisors) if self._together is None else self._together.measure(self, divisors)
        if measured is not None:
            runtime.outcome = measured.outcome
            self._refuse_nonfinite(measured.outcome)
            self._apply(measured)
            if self._settings.write_grad:
                self._write_grad(measured)
            assert runtime.skips is not None
            runtime.skips.watch()
        kept = measured is not None and self._settings.write_grad and window.phase is Phase.CLOSED
        if window.phase is not Phase.IDLE and not kept:
            window.consume()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, as torch does, and drops the window if there is one."""
        super().zero_grad(set_to_none)
        self._runtime.window.drop()
        if self._together is not None:
            self._together.forget(self)

    @property
    def max_grad_norm(self) -> float | None:
        """What the global norm is clipped to, None for no clipping; may be set between steps. Not in `state_dict()`."""
        return self._settings.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and self._together is not None:
            raise ValueError("max_grad_norm is that of clip_together; set it on what clip_together() returned")
        self._settings = replace(self._settings, max_grad_norm=value)

    # ---- what is known after a step ---------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global norm, after normalization and before clipping: fp32, shape [], on the device.

        None where none was taken.
        """
        outcome = self._runtime.outcome
        return outcome.norm if outcome is not None and outcome.normed else None

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step wrote nothing: bool, shape [], on the device."""
        outcome = self._runtime.outcome
        return torch.tensor(False) if outcome is None else outcome.skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps wrote nothing: int64, shape [], on the device."""
        skips = self._runtime.skips
        return torch.zeros((), dtype=torch.int64) if skips is None else skips.count.clone()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a stock GradScaler leaves unscaling and skipping to the step.

        It reads this before it decides: the one moment to refuse a window that it cannot see. With `clip_together` the
        norm is over gradients of others, which it would unscale one optimizer after the other.
        """
        if self._runtime.window.phase is Phase.OPEN:
            raise RuntimeError(
                "a stock GradScaler cannot see into an open window; close it with accumulate(..., last=True) before "
                "scaler.unscale_() or scaler.step(), or use accumfused.GradScaler, which steps open windows"
            )
        return self._settings.amp == "fused" or self._together is not None

    # ---- torch.optim's protocol -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does.

        Raises:
            TypeError: a parameter that requires a gradient and is not fp32.
            RuntimeError: one that cannot be updated: complex, or overlapping itself.
            ValueError: a parameter that is listed twice; a `max_grad_norm` of the group's own.
        """
        if isinstance(param_group, dict) and "max_grad_norm" in param_group:
            raise ValueError("max_grad_norm is one for all groups; give it to the optimizer, not to a group")
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            given = param_group["params"]
            param_group["params"] = given = [given] if isinstance(given, Tensor) else list(given)
            check_parameters([p[1] if isinstance(p, tuple) else p for p in given])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of torch's of the same name; an open window goes on.

        Raises:
            ValueError: a checkpoint that does not fit; this optimizer stays as it was.
            RuntimeError: while a window is open: its gradients are not those of the loaded state.
        """
        if self._runtime.window.phase is Phase.OPEN:
            raise RuntimeError(
                "a window is open, and its gradients are not those of the checkpoint; "
                "call step() or zero_grad() before load_state_dict()"
            )
        window = None

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal window
            checkpoint.check(self, loaded)
            loaded, window = checkpoint.without_window(self, loaded)
            return loaded

        last = self.register_load_state_dict_pre_hook(check)  # after those of the user, which may change what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._runtime.plan = None
        if window is not None:
            self._runtime.window = window

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict; an open window is in `state`, under keys that torch's optimizers leave alone."""
        if self._runtime.window.phase is not Phase.OPEN:
            return super().state_dict()
        state = self.state
        self.state = checkpoint.with_window(self)
        try:
            return super().state_dict()
        finally:
            self.state = state

    def __getstate__(self) -> dict[str, Any]:
        carried = {**super().__getstate__(), "_settings": self._settings, "_together": self._together}
        if self._runtime.window.phase is Phase.OPEN:
            carried["_window"] = self._runtime.window.copied()
        return carried

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_runtime" not in self.__dict__:
            self._runtime = Runtime(window=state.pop("_window", None) or Window())
        super().__setstate__(state)

    # ---- the gradient tail ------------------------------------------------------------------------------------------

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
            runtime.plan = known = plan.build(self.param_groups, self.state, rules)
            runtime.backend.prepare(known, self.param_groups, self.state)
            if runtime.skips is None or runtime.skips.count.device != known.device:
                runtime.skips = Skips(known.device)
        return known

    def _let_go(self) -> None:
        if self._runtime.plan is not None:
            self._runtime.plan.let_go()

    def _fold(self, weight: float | Tensor | None, *, in_loss: bool, last: bool) -> None:
        weight = _checked_weight(weight)
        window, current = self._runtime.window, self._plan()
        grads, present = current.gradients()
        window.begin(current, grads, weight)
        empty = not isinstance(weight, Tensor) and weight == 0  # an empty micro-batch may come without gradients
        if not present and not empty:
            raise RuntimeError("there is no new gradient to accumulate; call loss.backward() before each accumulate()")
        if last:
            window.check_total(weight)
        matched = current.match(grads)
        assert self._runtime.backend is not None
        complete = present == len(grads)
        window.fold(current, self._runtime.backend, matched, complete, weight, in_loss=in_loss, last=last)

    def _measure(self, divisors: Divisors) -> Measured | None:
        """The coefficient of the gradients that a step takes now; None where there is no gradient."""
        runtime, window, current = self._runtime, self._runtime.window, self._plan()
        grads, present = current.gradients()
        if window.phase is Phase.CLOSED and not present:
            window.drop()  # model.zero_grad() has released it
        if window.phase is Phase.OPEN:
            if present:
                raise RuntimeError(
                    "a window is open and there is a gradient that was not accumulated; "
                    "call accumulate() after the last backward(), before step()"
                )
            window.follow(current)
            window.check_total(0.0)
            grads = window.accumulators
            present = len(grads) - sum(grad is None for grad in grads)
        if not present:
            return None
        matched = current.match(grads)
        if current.lacks_state(matched):
            graphs.refuse_new_tensors({current.device})  # the zeros would be a graph's, and never be there
            current.make_states(matched, self.state)
            current = self._plan()

        backend, complete = runtime.backend, present == len(grads)
        assert backend is not None
        scaling = self._scaling(current, divisors)
        if window.phase is Phase.OPEN:
            scaling.normalize(window.settle(current, backend))
            outcome = backend.norm(current, window.stale(matched), window.partials, scaling)
        else:
            partials = self._partials(current, complete) if scaling.takes_norm else None
            outcome = backend.norm(current, matched, partials, scaling)
        return Measured(current, grads, matched, complete, outcome)

    def _scaling(self, current: Plan, divisors: Divisors) -> Scaling:
        settings, runtime = self._settings, self._runtime
        # Whoever uses a window is promised that bad weights skip the step.
        takes_norm = settings.takes_norm or runtime.window.phase is not Phase.IDLE
        takes_norm = takes_norm or self._together is not None or (divisors.for_scaler and divisors.found_inf is None)
        scaling = Scaling(current.device, takes_norm=takes_norm, max_grad_norm=settings.max_grad_norm)
        if self._together is None and (settings.nonfinite != "raise" or divisors.for_scaler):
            assert runtime.skips is not None
            scaling.skips = runtime.skips.count
        if divisors.found_inf is not None:
            scaling.found_inf = on_device(torch.as_tensor(divisors.found_inf), current.device, torch.float32)
        if divisors.grad_scale is not None:
            scaling.normalize(checked_positive(divisors.grad_scale, "grad_scale"))
        if divisors.normalizer is not None:
            scaling.normalize(divisors.normalizer)
        checked = takes_norm or scaling.device_normalization is not None
        scaling.skips_nonfinite = checked and (settings.nonfinite != "propagate" or divisors.for_scaler)
        return scaling

    def _refuse_nonfinite(self, outcome: Outcome) -> None:
        """With nonfinite="raise", which waits for the device; a scaler's overflow is nothing to raise for."""
        if self._settings.nonfinite != "raise" or self._runtime.scaled is not None or not bool(outcome.skipped):
            return
        raise RuntimeError(
            f"the global norm of the gradients is {float(outcome.norm)}, nothing was updated; look for the "
            "non-finite gradient (or found_inf), and call zero_grad() to go on, or use nonfinite='skip'"
        )

    def _apply(self, measured: Measured) -> None:
        """The step itself."""
        current, grads, backend = measured.plan, measured.matched, self._runtime.backend
        assert backend is not None
        for index in current.copied:
            current.tensors[index].copy_(current.params[index])
        hypers = [rule.hyper_values(group) for rule, group in zip(current.rules, self.param_groups, strict=True)]
        backend.step(current, grads, hypers, measured.outcome)
        for index in current.copied:
            if grads[index] is not None:
                current.params[index].copy_(current.tensors[index])
        written = current.params
        if not measured.complete:
            written = [param for param, grad in zip(current.params, grads, strict=True) if grad is not None]
        # Kernels write past autograd: without this, a write between forward and backward would go unnoticed.
        torch.autograd.graph.increment_version(written)

    def _write_grad(self, measured: Measured) -> None:
        """p.grad becomes what was applied; that of a skipped step stays as it came."""
        if self._runtime.window.phase is Phase.OPEN:
            self._runtime.window.expose()
        outcome = measured.outcome
        factor = torch.where(outcome.skipped, 1.0, outcome.coefficient)
        assert self._runtime.backend is not None
        rescale(self._runtime.backend, measured.plan, measured.grads, measured.matched, factor)

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


def check_parameters(params: list[Tensor]) -> None:
    """Refuses parameters that require a gradient and cannot be updated, and one that is listed twice."""
    for param in params:
        if isinstance(param, Tensor) and param.requires_grad and param.device.type != "meta":
            plan.check_parameter(param)
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter group holds the same parameter twice; remove one of them")


def _checked_weight(weight: float | Tensor | None) -> float | Tensor | None:
    return None if weight is None else checked_positive(weight, "weight", or_zero=True)
