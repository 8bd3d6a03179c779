"""One global norm over several optimizers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import optimizer as torch_optimizer

from accumfused.arguments import checked_positive
from accumfused.clip import check_limit
from accumfused.core.norm import Measured, share
from accumfused.core.protocol import Divisors
from accumfused.core.window import Phase, refuse_stock_scaler
from accumfused.eager import without_grad
from accumfused.optimizer import FusedOptimizer, check_fused, hooks_before_step
from accumfused.warn import warn_after_step


class ClipGroup:
    """Clips the gradients of several optimizers by one norm over all of them, as one `clip_grad_norm_` would.

    The group steps instead of its members: it measures all of them, and each applies the common coefficient. All
    members skip if one has a non-finite gradient; `grad_norm` of each is the common norm. Members keep everything else:
    `accumulate()`, `backward()`, checkpoints, hooks, schedulers. A GradScaler takes the group as it takes an optimizer;
    it must not unscale a member.

    Args:
        optimizers: two or more of this package, without a `max_grad_norm` of their own (`accumfused.fuse` converts
            others). The group changes them: they refuse to step alone.
        max_grad_norm: a number > 0; inf measures the norm and does not clip. It may be set between steps.

    Raises:
        TypeError: an optimizer is of another package; `max_grad_norm` is no number.
        ValueError: `max_grad_norm` is not > 0; fewer than two optimizers; two optimizers share a parameter; an
            optimizer is listed twice, has its own `max_grad_norm`, policy or `norm_group`, or is in a group already.

    Examples:
        >>> muon, adamw = af.fuse(torch.optim.Muon(matrices)), af.AdamW(others)
        >>> group = af.ClipGroup([muon, adamw], max_grad_norm=1.0)
        >>> loss.backward()
        >>> group.step()
        >>> group.zero_grad()
    """

    def __init__(self, optimizers: Sequence[FusedOptimizer], max_grad_norm: float) -> None:
        if not isinstance(optimizers, Iterable):
            raise TypeError(
                f"ClipGroup takes a list of optimizers, got {type(optimizers).__name__}; write "
                "ClipGroup([muon, adamw], max_grad_norm=1.0)"
            )
        self.optimizers = list(optimizers)
        self.max_grad_norm = max_grad_norm
        for optimizer in self.optimizers:
            check_fused(optimizer, "ClipGroup")
            if optimizer.max_grad_norm is not None:
                raise ValueError("one of the optimizers has a max_grad_norm of its own; give it to the group alone")
            _refuse_policies(optimizer)
            if optimizer._engine.group is not None and optimizer._engine.group() is not None:
                raise ValueError("one of the optimizers is in a group already")
        if len(set(self.optimizers)) != len(self.optimizers) or len(self.optimizers) < 2:
            raise ValueError(f"ClipGroup takes two or more different optimizers, got {len(self.optimizers)}")
        self._refuse_shared()
        self._bind()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()

    def _bind(self) -> None:
        for optimizer in self.optimizers:
            optimizer._engine.group = weakref.ref(self)

    def _refuse_shared(self) -> None:
        params = [id(param) for group in self.param_groups for param in group["params"]]
        if len(set(params)) != len(params):
            raise ValueError("a parameter is in two of the optimizers, and would count twice in the norm")

    @property
    def max_grad_norm(self) -> float:
        """The bound of the common norm."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        check_limit(value, "max_grad_norm", "inf is off")
        self._max_grad_norm = value

    # ---- an optimizer's face, for training loops and GradScalers -----------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def grad_norm(self) -> Tensor:
        """The last step's norm over all members, before clipping: fp32, shape [], on the device; NaN without one."""
        norms = [optimizer.grad_norm for optimizer in self.optimizers if optimizer._engine.outcome is not None]
        return norms[0] if norms else torch.tensor(torch.nan, device="cpu")

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step wrote nothing: bool, shape [], on the device."""
        outcomes = [optimizer._engine.outcome for optimizer in self.optimizers]
        return next((outcome.skipped for outcome in outcomes if outcome is not None), torch.tensor(False, device="cpu"))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a stock GradScaler leaves unscaling and skipping to the step, which does both for all members."""
        scaler = sys._getframe(1).f_locals.get("self")  # it tells nothing of what it has unscaled
        states = getattr(scaler, "_per_optimizer_states", {})
        for optimizer in self.optimizers:
            refuse_stock_scaler(optimizer._engine.window, optimizer._engine.settings)
            refuse_unscaled(states, optimizer)
        return True

    if not TYPE_CHECKING:  # which would take any name for known

        def __getattr__(self, name: str) -> Any:
            """Names the members where the rest of an optimizer is looked for."""
            raise AttributeError(f"a ClipGroup has no {name}: torch optimizers are its members, group.optimizers")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all members."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, *, normalizer: float | Tensor | None = None) -> Any:
        """Steps all members with gradients that are clipped by the norm over all of them.

        Args:
            closure, normalizer: as in `FusedOptimizer.step`, shared by all members.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: as `FusedOptimizer.step` of any member. No member has written anything then, unless a member's
                step itself failed (out of memory, say) after another's was made: members that have not stepped then
                refuse every call but `zero_grad()`.
            ValueError: the normalizer is not > 0; two members share a parameter; a group of parameters has a limit.
        """
        if normalizer is not None:
            normalizer = checked_positive(normalizer, "normalizer")
        for optimizer in self.optimizers:  # a hook may write gradients, so all run before the norm
            hooks = hooks_before_step(optimizer)
            if optimizer._engine.window.is_open:
                optimizer._engine.window.habits.watch_hooks(hooks)
            for hook in hooks:
                hook(optimizer, (optimizer,), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_shared()
        divisors = Divisors.of(self, normalizer, self.optimizers[0]._engine.scaler_divisors, is_shared=True)
        parts = without_grad(self._step, divisors)
        warn_after_step(failure for part in parts if part is not None for failure in part.failures)
        return loss

    def _step(self, divisors: Divisors) -> list[Measured | None]:
        """Steps all members, once all of them are measured."""
        parts = self._measure(divisors)
        members = list(zip(self.optimizers, parts, strict=True))
        try:
            for optimizer, measured in members:
                if measured is not None and optimizer._engine.counts_skips(divisors):
                    measured.count()
                _finish(optimizer, measured)
        except BaseException:
            waiting = [optimizer for optimizer, part in members if part is not None and not part.is_made]
            if len(waiting) < sum(part is not None for _, part in members):
                for optimizer in waiting:
                    optimizer._engine.window.phase = Phase.BROKEN
            raise
        for optimizer in self.optimizers:  # an error in a hook finds all steps made
            _run_post_hooks(optimizer)
        return parts

    def _measure(self, divisors: Divisors) -> list[Measured | None]:
        """Measures each member's gradients; the results hold the common coefficient."""
        engines = [optimizer._engine for optimizer in self.optimizers]
        for engine in engines:  # before any of them converts its states
            engine.plans.owner._refuse_gradients()
            _refuse_policies(engine.plans.owner)
            if engine.during_backward is not None:
                engine.during_backward.end_before_step()
            engine.refuse_live(engine.plans.current().reader.present())
        parts: list[Measured | None] = []
        for engine in engines:
            engine.outcome = None
            parts.append(engine.measure(divisors))
        pairs = [(engine, part) for engine, part in zip(engines, parts, strict=True) if part is not None]
        if pairs:
            propagates = all(engine.settings.nonfinite == "propagate" for engine in engines)
            dtype = max((part.plan.dtype for _, part in pairs), key=lambda dtype: dtype.itemsize)
            scaling = divisors.scaling(pairs[0][1].plan.device, dtype)
            scaling.max_grad_norm, scaling.skips_nonfinite = self._max_grad_norm, divisors.for_scaler or not propagates
            share([part for _, part in pairs], scaling)
        for engine, part in pairs:
            engine.outcome = part.outcome
        for engine, part in pairs:  # before any member steps or counts a skip
            engine.refuse_nonfinite(part, divisors)
        return parts


def refuse_unscaled(states: Mapping[int, Mapping[str, Any]], member: FusedOptimizer) -> None:
    """Refuses a member that a GradScaler, whose states these are, has unscaled: the step would divide it again."""
    if states.get(id(member), {}).get("stage") is OptState.UNSCALED:
        raise RuntimeError("a member of the group was unscaled by itself; call scaler.unscale_() on the group instead")


def _refuse_policies(optimizer: Any) -> None:
    if optimizer._engine.settings.norm_group is not None:
        raise ValueError("one of the optimizers has a norm_group, which a ClipGroup does not know; leave it out")
    if optimizer._engine.clipping.policies(optimizer.param_groups) is not None:
        raise ValueError(
            "one of the optimizers has a clip, a skip_above or a parameter group's max_grad_norm, and a ClipGroup "
            "clips by one norm; leave them out"
        )


def _finish(optimizer: Any, measured: Measured | None) -> None:
    """Finishes a member's step after the group has measured, with torch's label for profilers."""
    optimizer._opt_called = True  # LR schedulers look for it
    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        optimizer._engine.finish(measured)


def _run_post_hooks(optimizer: Any) -> None:
    hooks = (*optimizer._optimizer_step_post_hooks.values(), *torch_optimizer._global_optimizer_post_hooks.values())
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
