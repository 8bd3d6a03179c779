"""FusedOptimizer, the base of this package's optimizers. Rules add arithmetic, torch's classes their arguments.

It has the calls of a training loop; core/engine.py does the work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from accumfused.arguments import checked_positive, checked_weight, checked_whole
from accumfused.core.engine import Engine
from accumfused.core.metrics import Metrics
from accumfused.core.noise import NoiseEstimate
from accumfused.core.norm import Measured
from accumfused.core.protocol import Divisors
from accumfused.core.window import refuse_stock_scaler
from accumfused.eager import uncompiled, without_grad
from accumfused.settings import setting_like
from accumfused.torch_optimizer import TorchOptimizer
from accumfused.warn import warn_after_step


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
        if is_watched and self._engine.window.is_open:
            self._engine.window.habits.watch_hooks(hooks_before_step(self))
        return (watched if is_watched else func)(self, *args, **kwargs)

    return step


def hooks_before_step(optimizer: Any) -> list[Callable[..., Any]]:
    """Lists the hooks that run before a step: those of all optimizers, then this one's."""
    of_all = torch_optimizer._global_optimizer_pre_hooks.values()
    return [*of_all, *optimizer._optimizer_step_pre_hooks.values()]


class FusedOptimizer(TorchOptimizer):
    """An optimizer whose step also normalizes, unscales and clips, in one pass over the gradients.

    Subclasses set `rules`. The documentation's page "Window states" has the allowed order of calls.
    """

    def _refuse_gradients(self) -> None:
        """Raises if the parameters are not those to train with: called before each micro-batch and each step."""

    @uncompiled  # a compiled function calls it uncompiled
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
        without_grad(self._engine.fold, checked_weight(weight), in_loss=False, last=last)

    @uncompiled
    def backward(self, loss: Tensor, weight: float | Tensor | None = None, last: bool = False) -> None:
        """Multiplies the loss by the weight, runs backward, and accumulates.

        The window is that of `loss.backward(); accumulate(weight, last=last)`, but the weight enters through the loss.
        A 16-bit loss would round some weights: then the weight multiplies the gradients, where these still exist.

        Raises:
            RuntimeError: a gradient was not accumulated; a 16-bit loss would round the weight, and gradients are
                folded during backward or are means over processes; otherwise as `accumulate`.
        """
        weight, engine = checked_weight(weight), self._engine
        plan, _, present = engine.check(weight, in_loss=True, last=last)
        if present or engine.window.in_progress is not None:
            raise RuntimeError(
                "there is a gradient that was not accumulated; call accumulate() first, or, if another loss has left "
                f"it (a GAN's generator, in the discriminator), {engine.remedy_of_other_losses}"
            )
        in_loss = weight is None or _holds(loss.dtype, weight)
        if not in_loss and (engine.during_backward is not None or plan.exchange.has_means):
            raise RuntimeError(
                f"the loss is {loss.dtype}, which would round its weight; compute it in fp32 (from logits.float(), say)"
            )
        engine.window.weights.check(weight, plan, in_loss=in_loss)
        with (
            contextlib.nullcontext()
            if engine.during_backward is None
            else engine.during_backward.expecting(weight, last)
        ):
            (loss * weight if in_loss and weight is not None else loss).backward()  # type: ignore[no-untyped-call]
        without_grad(engine.fold, weight, in_loss=in_loss, last=last)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, *, normalizer: float | Tensor | None = None) -> Any:
        """Updates the parameters from the window, or from `p.grad` if there is no window.

        One pass divides gradients by the window's weights, `normalizer` and `self.grad_scale`, clips them to
        `max_grad_norm` and applies them. The step writes nothing if the norm is non-finite (see `nonfinite`) or
        `self.found_inf` is not 0. It consumes a window and frees its accumulators; other gradients stay in `p.grad`,
        unchanged.

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

        An error after the update (metrics run out of memory, say) causes a warning and is not raised: the step is made.
        """
        self._opt_called = True  # what LR schedulers look for
        engine = self._engine
        if not _makes_states(self):
            self._refuse_gradients()
            if engine.group is not None:
                raise RuntimeError("the optimizer is in a ClipGroup, which clips by one norm; call the group's step()")
        if normalizer is not None:
            normalizer = checked_positive(normalizer, "normalizer")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine.outcome = None
        divisors = Divisors.of(self, normalizer, engine.scaler_divisors)
        measured = without_grad(_step, engine, divisors)
        if measured is not None:
            warn_after_step(measured.failures)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step tells schedulers itself, without a wrapper

    profile_hook_step = staticmethod(with_hooks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, as torch does, and drops any window."""
        engine = self._engine
        if engine.window.holds_micro_batches:
            engine.window.habits.watch_drops()
        super().zero_grad(set_to_none or engine.during_backward is not None)  # folded gradients cannot become zeros
        engine.drop()
        if engine.during_backward is not None:
            engine.during_backward.forget()

    @uncompiled
    def release_memory(self) -> None:
        """Frees all memory but the states', for a pause in the training: while the model generates, say.

        It frees accumulators that are kept for the next window, tables, copies and intermediate tensors. On a CPU it
        also returns freed memory to the system; on a card `torch.cuda.empty_cache()` does, called after it. `p.grad`,
        `grad_norm`, `metrics()` and all counts stay. The next call makes everything again, with the same bits, and
        takes as long as a first one.

        Raises:
            RuntimeError: a window is open, or closed and in `p.grad`; a CUDA graph has captured a call of this
                optimizer.
        """
        self._engine.release_memory()

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings by name, as they are now; read-only."""
        return MappingProxyType(vars(self._engine.settings))

    @property
    def accumulates_in_backward(self) -> bool:
        """Whether gradients are accumulated during backward: after `release_gradients` or `fuse_linears`.

        A weight then has to be in the loss: see `backward`.
        """
        return self._engine.during_backward is not None

    @property
    def max_grad_norm(self) -> float | None:
        """The limit of the global norm, or of parameter groups without their own; None: no clipping.

        May be set between steps; `state_dict()` omits it.
        """
        return self._engine.settings.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and self._engine.group is not None:
            raise ValueError("the optimizer is in a ClipGroup; set max_grad_norm on that")
        # In place: Lightning's wrappers run this setter on themselves, and the optimizer never sees their attributes.
        settings = self._engine.settings
        settings.max_grad_norm = replace(settings, max_grad_norm=value).max_grad_norm

    # ---- what its steps have measured -------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor:
        """The last step's global norm, after normalization and before clipping: fp32, shape [], on the device.

        NaN before the first step, and if the step took no norm.
        """
        outcome = self._engine.outcome
        return outcome.norm if outcome is not None and outcome.normed else torch.tensor(torch.nan, device="cpu")

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step wrote nothing: bool, shape [], on the device."""
        outcome = self._engine.outcome
        return torch.tensor(False, device="cpu") if outcome is None else outcome.skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps wrote nothing: int64, shape [], on the device."""
        return self._engine.plans.skips.count.clone()

    @property
    def dropped_micro_batches(self) -> Tensor:
        """How many micro-batches `nonfinite="drop"` has left out: int64, shape [], on the device."""
        dropped = self._engine.dropped
        return torch.zeros((), dtype=torch.int64, device="cpu") if dropped is None else dropped.clone()

    def metrics(self) -> Metrics:
        """Returns norms and counts of the last measured step: of gradients, parameters, updates, per tensor and group.

        Returns:
            One small tensor on the device with its names; to read it waits for the device.

        Raises:
            RuntimeError: the optimizer was made without metrics=True (or n); no step was measured yet.
        """
        meter = self._engine.meter
        if meter is None:
            raise RuntimeError(
                "no metrics are measured; make the optimizer with metrics=True, or metrics=n for every n steps"
            )
        metrics = meter.read()
        if metrics is None:
            raise RuntimeError("no step was measured yet; call metrics() after step() (with metrics=n after the n-th)")
        return metrics

    def set_metrics_step(self, step: int) -> None:
        """Sets how many steps the training has made: `metrics=n` measures every n-th of them, also after a resume.

        Args:
            step: the number of steps so far; -1 makes the next one step 0, which is measured. Without metrics it has no
                effect.

        Raises:
            ValueError: not a whole number >= -1.
        """
        step = checked_whole(step, "step", -1)
        if self._engine.meter is not None:
            self._engine.meter.steps = step

    def noise_scale(self) -> NoiseEstimate:
        """Estimates the gradient noise scale from the windows so far: how large a batch still helps.

        Signal and noise are exponential means over windows (the setting `noise_scale`), the noise scale is their ratio.
        The estimate assumes that

        - micro-batches are drawn independently, each of samples that are independent, too;
        - a micro-batch's gradient is a mean over its weight (samples or tokens), which the window's weights say;
          without weights all micro-batches are of one size, and that size is the unit;
        - the true gradient changes little within the windows that the mean holds;
        - a parameter's gradient of a micro-batch comes in one piece.

        Windows of one micro-batch do not enter, nor do skipped steps. Processes that add up their windows have one
        estimate, from the micro-batches of all. Where gradients are means over processes before they are folded, a
        micro-batch is that of all processes together.

        Returns:
            Tensors on the device; to read one waits for it.

        Raises:
            RuntimeError: the optimizer was made without noise_scale=True; no window of two micro-batches was stepped.
        """
        if self._engine.noise is None:
            raise RuntimeError("the noise scale is not measured; make the optimizer with noise_scale=True")
        return self._engine.noise.estimate()

    # ---- what is refused ---------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers refuse every unknown name, unless they see this

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuses new attributes with the name of a setting, or nearly: they would do nothing."""
            setting = setting_like(name)
            if setting is not None and hasattr(self, "_engine"):
                if name == setting != "max_grad_norm":
                    raise AttributeError(f"{name} is fixed when the optimizer is made; give it to the class or fuse()")
                if not hasattr(self, name):
                    raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; did you mean {setting!r}?")
            super().__setattr__(name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a stock GradScaler leaves unscaling and skipping to the step: no.

        The scaler reads this first: the only moment to refuse gradients that it cannot see.
        """
        refuse_stock_scaler(self._engine.window, self._engine.settings)
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's constructors set it for fused=True; a GradScaler gets the same answer as before."""


def check_fused(optimizer: Any, caller: str) -> None:
    """Raises a TypeError for an optimizer of another package, or none."""
    if not isinstance(optimizer, FusedOptimizer):
        remedy = "convert it with accumfused.fuse()"
        if isinstance(getattr(optimizer, "optimizer", None), FusedOptimizer):
            remedy = "give it the .optimizer that is wrapped"
        elif isinstance(optimizer, torch.nn.Module):
            remedy = "give it the optimizer of this model"
        raise TypeError(f"{caller} takes an optimizer of this package, got {type(optimizer).__name__}; {remedy}")


def _makes_states(optimizer: FusedOptimizer) -> bool:
    """Tells whether torch.distributed.checkpoint steps to make states: there are none, and all learning rates are 0."""
    return not optimizer.state and all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)


def _step(engine: Engine, divisors: Divisors) -> Measured | None:
    """Makes a step; None: there is no gradient."""
    measured = engine.measure(divisors)
    if measured is not None:
        engine.refuse_nonfinite(measured, divisors)
    engine.finish(measured)
    return measured


def _holds(dtype: torch.dtype, weight: float | Tensor) -> bool:
    """Tells whether a loss of this dtype holds the weight without rounding it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return True
    return (
        not isinstance(weight, Tensor)
        and float(torch.tensor(weight, dtype=torch.float64, device="cpu").to(dtype)) == weight
    )
