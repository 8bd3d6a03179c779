"""Loss scaling without an extra pass over memory or a wait for the device.

torch's GradScaler reads and writes every gradient to unscale it and to look for inf and NaN. The host then reads the
result to decide whether to step. Here the step does both: it divides by the scale in registers, and writes nothing if
its norm is not finite. Only the flag comes back, on the device, where `update()` lets the scale grow or back off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from accumfused.core.protocol import Divisors, on_device
from accumfused.core.window import refuse_unscaling
from accumfused.loop.clip_group import ClipGroup, refuse_unscaled
from accumfused.optimizer import FusedOptimizer
from accumfused.warn import AfterStepWarning, warn_after_step


class GradScaler(torch.amp.GradScaler):
    """Replaces `torch.amp.GradScaler`: same arguments, loop and checkpoints; torch's optimizers step as in torch.

    `step()` always calls the fused optimizer's step and never waits: after an overflow the optimizer writes nothing and
    counts the skip in `skipped_steps`. Where `nonfinite="drop"` has left an overflow out of the window, the rest of it
    steps, and the scale backs off once. `step()` takes open windows too. `unscale_()` serves an external clip: it costs
    the pass that `max_grad_norm` saves, and needs `accumulate(..., last=True)` before it.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales `p.grad`, as torch's does.

        Raises:
            RuntimeError: a window is open; torch's own reasons.
            ValueError: a gradient is fp16, which only a step unscales without rounding.
        """
        members = _members(optimizer) if self._enabled else []
        for member in members:
            refuse_unscaling(member._engine.window, member._engine.settings.process_group)
        groups = (group for member in members for group in member.param_groups)
        if any(p.grad is not None and p.grad.dtype == torch.float16 for group in groups for p in group["params"]):
            raise ValueError(
                "Attempting to unscale FP16 gradients, which would round them; leave unscale_() out: scaler.step() "
                "unscales them in fp32, and clips them if the optimizer has a max_grad_norm"
            )
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer with unscaled gradients, unless they are inf or NaN.

        Args:
            optimizer: an optimizer or a `ClipGroup`; its gradients are scaled by this scaler, or went through unscale_.
            args, kwargs: arguments of `optimizer.step()`, without a closure.

        Raises:
            RuntimeError: a second step before `update()`; a closure; a member of a group that was unscaled by itself.
        """
        if not self._enabled or not _members(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if any(closure is not None for closure in (*args[:1], kwargs.get("closure"))):
            raise RuntimeError("a GradScaler cannot step with a closure; call backward() before scaler.step()")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        for member in _members(optimizer):
            if member is not optimizer:
                refuse_unscaled(self._per_optimizer_states, member)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.UNSCALED:
            flags = [on_device(flag, scale.device, torch.float32) for flag in state["found_inf_per_device"].values()]
            divisors = Divisors(None, grad_scale, sum(flags), for_scaler=True)
        else:
            divisors = Divisors(None, scale if grad_scale is None else scale * grad_scale, for_scaler=True)
        taker: Any = optimizer
        members = [member._engine for member in _members(optimizer)]
        for engine in members:
            engine.scaler_divisors = divisors
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)  # a new one: update() adds to it
        result, failures = None, list[Exception]()
        try:
            result = taker.step(*args, **kwargs)
        except AfterStepWarning as warning:  # the step is made
            failures.append(warning)
        finally:
            for engine in members:
                engine.scaler_divisors = None
        state["found_inf_per_device"], state["stage"] = {found_inf.device: found_inf}, OptState.STEPPED
        try:
            for engine in members:
                if engine.outcome is not None:
                    found_inf += on_device(engine.outcome.overflowed, scale.device, torch.float32)
        except Exception as error:
            failures.append(error)
        warn_after_step(failures)
        return result


def _members(optimizer: Any) -> list[FusedOptimizer]:
    """Lists the optimizers of this package that step; none for an optimizer of torch."""
    if isinstance(optimizer, ClipGroup):
        return optimizer.optimizers
    return [optimizer] if isinstance(optimizer, FusedOptimizer) else []
