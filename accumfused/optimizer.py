"""FusedOptimizer, the base of this package's optimizers. Rules add arithmetic, torch's classes their arguments.

It has the calls of a training loop and torch.optim's protocol; core/engine.py does the work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from accumfused import accepted, backends
from accumfused.arguments import checked_positive, checked_weight
from accumfused.batch_norm import check_graph
from accumfused.clipping import LIMIT
from accumfused.core.engine import Engine, divisors_of
from accumfused.core.plan import Plan, rule_of
from accumfused.core.plans import Prepared, Surroundings
from accumfused.core.protocol import Backend, Exchange, OwnStep
from accumfused.core.window import Phase, Window, refuse_foreign_scaler
from accumfused.distributed import exchange, groups
from accumfused.formats import kinds
from accumfused.measures import Measures
from accumfused.rule import Rule
from accumfused.saving import checkpoint, full_precision, history
from accumfused.settings import Settings, setting_like


def _select(
    settings: Settings, plan: Plan, devices: set[torch.device], known: Prepared | None
) -> tuple[Backend, Exchange]:
    backend = None
    if known is not None and known.devices == devices and set(plan.rules) <= known.rules:
        backend = known.backend
    return (
        backend or backends.select(settings.backend, devices, plan.rules),
        exchange.select(settings, plan, None if known is None else known.exchange),
    )


_SURROUNDINGS = Surroundings(_select, groups.default_seed)


def with_hooks(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step` as torch does, to run the hooks and to label the step for a profiler.

    The label adds 25 us to the 250 us of a step of 1000 small tensors. So a step without hooks and torch.profiler
    bypasses torch's wrapper. (Bare observers, ExecutionTraceObserver for one, miss the label.)
    """
    watched = torch.optim.Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
        is_watched = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
        )
        return (watched if is_watched else func)(self, *args, **kwargs)

    return step


class FusedOptimizer(Measures, torch.optim.Optimizer):
    """An optimizer whose step also normalizes, unscales and clips, in one pass over the gradients.

    Subclasses set `rules`. docs/internals/state-machine.md shows the allowed order of calls.
    """

    rules: ClassVar[tuple[type[Rule], ...]] = ()
    own_step: ClassVar[OwnStep | None] = None  # in place of the kernels' step

    engine: Engine  # works on its gradients; for the package's own use, and for benchmarks
    _checked_graph = False  # for BatchNorm, by backward(loss)

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        """The rule for a parameter group."""
        return rule_of(cls.rules, group)

    def configure(self, settings: Settings) -> None:
        """Gives the optimizer, which has its groups already, these settings and an engine.

        Raises:
            ValueError, TypeError, RuntimeError: settings that do not fit its parameters, group, or machine.
        """
        accepted.check_settings(settings, self.param_groups)
        accepted.refuse_differentiable(self.defaults)
        for group in self.param_groups:
            accepted.check_formats(self.rule_of(group), group["params"], settings)
        self.engine = Engine(self, settings, _SURROUNDINGS)

    def refuse_gradients(self) -> None:
        """Raises if the parameters are not those to train with: called before each micro-batch and each step."""

    # ---- the calls of a training loop -------------------------------------------------------------------------------

    @_disable_dynamo  # a compiled function calls it uncompiled
    @torch.no_grad()
    def accumulate(self, weight: float | Tensor | None = None, *, last: bool = False) -> None:
        """Adds every fresh `p.grad` to the open window, in fp32, and releases it (`p.grad = None`).

        Args:
            weight: multiplies the gradients of this micro-batch; the sum of weights divides the window's sum. So with
                weight=n, means over n tokens become the mean over all tokens of the window. A number (checked), or a
                one-element tensor (not read: a bad one skips the step). 0 leaves the micro-batch out,
                even if its gradients are NaN. None: a plain sum, as autograd's.
            last: closes the window: the sum of weights divides the sum, and `p.grad` becomes the accumulator.

        Raises:
            RuntimeError: no new gradient; `p.grad` is still the previous window's accumulator; parameters changed
                within the window; unusable gradients; a weight after `release_gradients` has folded them.
            ValueError: a negative or non-finite weight; weights that are all zero; weights for some micro-batches only.
            TypeError: a weight, parameter or gradient of a wrong type.
        """
        try:
            self.engine.fold(checked_weight(weight), in_loss=False, last=last)
        finally:
            self.engine.plans.let_go()

    @_disable_dynamo
    def backward(self, loss: Tensor, weight: float | Tensor | None = None, last: bool = False) -> None:
        """Multiplies the loss by the weight, runs backward, and accumulates.

        The window is that of `loss.backward(); accumulate(weight, last=last)`, but the weight enters through the loss.
        A 16-bit loss would round some weights: then the weight multiplies the gradients, where these still exist.

        Raises:
            RuntimeError: a gradient was not accumulated; a 16-bit loss would round the weight, and gradients are
                folded during backward or are means over processes; otherwise as `accumulate`.
        """
        weight, engine = checked_weight(weight), self.engine
        prepared, _, present = engine.begin(weight, in_loss=True)
        engine.plans.let_go()
        if present or engine.window.entered:
            raise RuntimeError("there is a gradient that was not accumulated; call accumulate() or zero_grad() first")
        if last:
            engine.check_total(prepared, weight)
        in_loss = weight is None or _holds(loss.dtype, weight)
        if not in_loss and (engine.release is not None or prepared.exchange.has_means):
            raise RuntimeError(
                f"the loss is {loss.dtype}, which would round its weight; compute it in fp32 (from logits.float(), say)"
            )
        with contextlib.nullcontext() if engine.release is None else engine.release.expecting(weight, last):
            (loss * weight if in_loss and weight is not None else loss).backward()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                engine.fold(weight, in_loss=in_loss, last=last)
        finally:
            engine.plans.let_go()
        if engine.window.weights.count > 1 and not self._checked_graph:  # last: a warning may be an error
            self._checked_graph = True
            check_graph(loss, engine.plans.params)

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, *, normalizer: float | Tensor | None = None) -> Any:
        """Updates the parameters from the window, or from `p.grad` if there is no window.

        One pass divides gradients by `normalizer` and `self.grad_scale`, clips them to `max_grad_norm` and applies
        them. The step writes nothing if the norm is non-finite (see `nonfinite`) or `self.found_inf` is not 0. It
        consumes a window and releases its accumulators; other gradients stay in `p.grad`, unchanged.

        Args:
            closure: re-evaluates the model and returns the loss.
            normalizer: also divides the gradients: a number (checked), or a one-element tensor (not read: a bad one
                skips the step).

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: a fresh gradient while a window is open; an unusable gradient; a non-finite norm with
                nonfinite="raise".
            ValueError: a normalizer that is not > 0; a window whose weights are all zero.
        """
        self._opt_called = True  # what LR schedulers look for
        engine = self.engine
        if not _makes_states(self):
            self.refuse_gradients()
            if engine.group is not None:
                raise RuntimeError("the optimizer is in a ClipGroup, which clips by one norm; call the group's step()")
        if normalizer is not None:
            normalizer = checked_positive(normalizer, "normalizer")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine.outcome = None
        divisors = divisors_of(self, normalizer, engine.loss_scale)
        try:
            with torch.no_grad():
                measured = engine.measure(divisors)
                if measured is not None:
                    engine.refuse_nonfinite(measured, divisors)
                engine.finish(measured)
        finally:
            engine.plans.let_go()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step tells schedulers itself, without a wrapper

    profile_hook_step = staticmethod(with_hooks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, as torch does, and drops any window."""
        engine = self.engine
        engine.window.watch_drops()
        super().zero_grad(set_to_none or engine.release is not None)  # folded gradients cannot become zeros
        engine.window.drop()
        if engine.release is not None:
            engine.release.forget()

    @property
    def max_grad_norm(self) -> float | None:
        """The limit of the global norm, or of parameter groups without their own; None: no clipping.

        May be set between steps; `state_dict()` omits it.
        """
        return self.engine.settings.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and self.engine.group is not None:
            raise ValueError("the optimizer is in a ClipGroup; set max_grad_norm on that")
        # In place: Lightning's wrappers run this setter on themselves, and the optimizer never sees their attributes.
        settings = self.engine.settings
        settings.max_grad_norm = replace(settings, max_grad_norm=value).max_grad_norm

    if not TYPE_CHECKING:  # type checkers refuse every unknown name, unless they see this

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuses new attributes with the name of a setting, or nearly: they would do nothing."""
            setting = setting_like(name)
            if setting is not None and hasattr(self, "engine"):
                if name == setting != "max_grad_norm":
                    raise AttributeError(f"{name} is fixed when the optimizer is made; give it to the class or fuse()")
                if not hasattr(self, name):
                    raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; did you mean {setting!r}?")
            super().__setattr__(name, value)

    # ---- the results of a step --------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global norm, after normalization and before clipping: fp32, shape [], on the device.

        None if the step took no norm.
        """
        outcome = self.engine.outcome
        return outcome.norm if outcome is not None and outcome.normed else None

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step wrote nothing: bool, shape [], on the device."""
        outcome = self.engine.outcome
        return torch.tensor(False) if outcome is None else outcome.skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps wrote nothing: int64, shape [], on the device."""
        skips = self.engine.plans.skips
        return torch.zeros((), dtype=torch.int64) if skips is None else skips.count.clone()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a stock GradScaler leaves unscaling and skipping to the step: no.

        The scaler reads this first: the only moment to refuse gradients that it cannot see.
        """
        refuse_foreign_scaler(self.engine.window, self.engine.settings.process_group)
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's constructors set it for fused=True; a GradScaler gets the same answer as before."""

    def __repr__(self) -> str:
        """torch's text, then the class, settings other than defaults, the backend, the formats and the window."""
        if not hasattr(self, "engine"):  # within torch's constructors
            return super().__repr__()
        settings, prepared, window = self.engine.settings, self.engine.plans.last, self.engine.window
        lines = {field.name: getattr(settings, field.name) for field in fields(Settings)}
        lines = {field.name: lines[field.name] for field in fields(Settings) if lines[field.name] != field.default}
        lines["backend"] = lines.get("backend") or ("not chosen yet" if prepared is None else prepared.backend.name)
        kept = {
            kinds.described(rule, form, param)
            for group in self.param_groups
            for rule, param in ((self.rule_of(group), param) for param in group["params"])
            if param.requires_grad
            if (form := kinds.format_of(rule, param, settings)) != kinds.Format() or param.dtype != torch.float32
        }
        if kept:
            lines["formats"] = "; ".join(sorted(kept))
        if window.phase is not Phase.IDLE:
            lines["window"] = f"{window.phase.value}, micro-batches: {window.weights.count}"
        ours = next(each for each in type(self).__mro__ if each.__module__.startswith("accumfused."))
        text = "".join(f"    {name}: {value}\n" for name, value in lines.items())
        return f"{super().__repr__()}\naccumfused.{ours.__name__} (\n{text})"

    # ---- torch.optim's protocol -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does.

        Raises:
            TypeError: a parameter that requires a gradient and is not fp32, fp16 or bf16.
            RuntimeError: a complex parameter, or one that overlaps itself.
            ValueError: a parameter that is listed twice, or whose dtype `master_weights` does not serve; amsgrad with
                8-bit states; a setting other than `max_grad_norm` for one group alone, or that for some groups only.
        """
        if isinstance(param_group, dict):
            for name in ({setting.name for setting in fields(Settings)} - {LIMIT}) & param_group.keys():
                raise ValueError(f"{name} is one for all groups; give it to the optimizer, not to a group")
            accepted.refuse_differentiable(param_group)
            if hasattr(self, "engine"):
                accepted.check_limits(self.engine.settings, [*self.param_groups, param_group])
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            given = param_group["params"]
            param_group["params"] = given = [given] if isinstance(given, Tensor) else list(given)
            params = [p[1] if isinstance(p, tuple) else p for p in given]
            accepted.check_parameters(params)
            engine = getattr(self, "engine", None)  # None: torch's constructor calls this too
            if engine is not None:
                accepted.check_formats(self.rule_of(self.defaults | param_group), params, engine.settings)
                if engine.release is not None:
                    engine.release.follow(params)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of torch's of the same name, and resumes its open window.

        It releases this optimizer's closed window. Master weights, and limits of groups, that the checkpoint lacks stay
        as they are.

        Raises:
            ValueError: a checkpoint that does not fit; this optimizer stays as it was.
            RuntimeError: a window is open here: its gradients do not belong to the loaded state.
        """
        engine = self.engine
        engine.refuse_open("load_state_dict()", ", and its gradients are not those of the checkpoint")
        window: Window | None = None
        kept: dict[Tensor, dict[str, Tensor]] = {}
        brought: set[Tensor] = set()
        histories: history.Histories = {}

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal window, kept, brought, histories
            loaded, histories = history.without_histories(loaded)
            checkpoint.check(self, loaded)
            loaded = history.with_limits(self.param_groups, loaded)
            accepted.check_limits(engine.settings, loaded["param_groups"])
            loaded, window = checkpoint.without_window(self, loaded)
            loaded, kept, brought = checkpoint.without_formats(self, loaded)
            return loaded

        def complete(_: torch.optim.Optimizer) -> None:
            for param, entries in kept.items():
                self.state[param].update(entries)

        last = self.register_load_state_dict_pre_hook(check)  # after the user's hooks, which may edit the checkpoint
        first = self.register_load_state_dict_post_hook(complete, prepend=True)  # before the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()
        engine.plans.forget()
        engine.plans.masters.see(self.state, but=brought)
        history.resume(engine, histories)
        engine.end_window()  # a closed one: its gradients are not those of the checkpoint either
        if window is not None:
            engine.window = window
            window.measures = engine.noise is not None

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict; `state` holds an open window, under keys that torch's optimizers ignore.

        While a window of DTensors is open, every process must call this: the processes agree on its weights.
        """
        self.engine.plans.masters.settle()
        first = []
        if self.engine.window.is_open:
            checkpoint.refuse_part(self.engine)
            first.append(self.register_state_dict_post_hook(checkpoint.with_window, prepend=True))
        if history.of(self.engine):
            first.append(self.register_state_dict_post_hook(history.with_histories, prepend=True))
        try:
            return super().state_dict()
        finally:
            for hook in first:
                hook.remove()

    def full_precision_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """`model.state_dict()` with every 16-bit parameter in fp32: from its master if it has one, else upcast.

        Args:
            model: the model of this optimizer's parameters; it upcasts other parameters, and leaves buffers alone.

        Raises:
            TypeError, ValueError: not a model, or a model without a parameter of this optimizer.
        """
        return full_precision.state_dict(self, model)

    def load_full_precision_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Loads fp32 weights into the model and into the masters of its parameters.

        It restores the weights of `full_precision_state_dict` bit for bit ("split8" rounds them to nearest, with 16
        bits of mantissa). It makes the (zero) states of parameters with masters that have none yet. To resume, call it
        after `load_state_dict`, whose masters it replaces.

        Args:
            model, state_dict, strict: as in `model.load_state_dict(state_dict, strict)`.

        Returns:
            The result of `model.load_state_dict`.

        Raises:
            TypeError, ValueError: as `full_precision_state_dict`; names or shapes do not fit. Nothing changes then.
            RuntimeError: a window is open.
        """
        return full_precision.load_state_dict(self, model, state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        engine = self.engine
        engine.plans.masters.settle()
        settings = replace(engine.settings, process_group=None, reduce_dtype=None)
        carried = {**super().__getstate__(), "settings": settings, "is_grouped": engine.group is not None}
        carried["histories"] = {name: own.clone() for name, own in history.of(engine).items()}
        if engine.window.is_open:
            checkpoint.refuse_part(engine)
            carried["window"] = engine.window.copied()
        return carried

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_copy = not hasattr(self, "engine")  # a wrapper may have it outside its __dict__
        names = ("settings", "window", "is_grouped", "histories")
        settings, window, is_grouped, histories = (state.pop(name, None) for name in names)
        states = state["state"]  # torch's Adagrad looks for a step count in all, and a window's mark has none
        marks = {key: states.pop(key) for key in [*states] if isinstance(states[key], dict) and not states[key]}
        super().__setstate__(state)
        states.update(marks)
        if is_copy:
            self.engine = Engine(self, settings, _SURROUNDINGS, window)
            self.engine.plans.masters.see(self.state)
            history.resume(self.engine, histories or {})
            self.engine.group = (lambda: None) if is_grouped else None  # a copy of the group takes it up


def _makes_states(optimizer: FusedOptimizer) -> bool:
    """Whether torch.distributed.checkpoint steps to make states: there are none, and all learning rates are 0."""
    return not optimizer.state and all(float(group["lr"]) == 0 for group in optimizer.param_groups)


def _holds(dtype: torch.dtype, weight: float | Tensor) -> bool:
    """Whether a loss of this dtype holds the weight without rounding it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return True
    return (
        not isinstance(weight, Tensor)
        and float(torch.tensor(weight, dtype=torch.float64, device="cpu").to(dtype)) == weight
    )
