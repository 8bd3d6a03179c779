"""The stock recipes for norm, clipping and AdamW: what a training loop writes today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.exact import MAX_GRAD_NORM

CLIP_FUSED_PASSES = ("read", "scale", "step")
TRICK_PASSES = ("read", "step_rewriting_grad")
UNSCALE_PASSES = ("scale", "read", "scale", "step")
LOSS_SCALE = 0.25  # so small that gradients which are unscaled (and clipped) again and again stay ordinary numbers


def clip_and_step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """`clip_grad_norm_`, then the optimizer's step."""

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()

    return run


def step_scaled(optimizer: Any, scale: Tensor) -> None:
    """What a GradScaler does: the scale is on the device, and step() divides gradients by it."""
    optimizer.grad_scale = scale
    optimizer.step()
    del optimizer.grad_scale


def grad_scale_trick(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Deferred clipping: the fused step divides by `optimizer.grad_scale`, so clipping needs no pass of its own.

    The strongest stock recipe. torch reads the attribute for its GradScaler; the fused kernels also write the divided
    gradient back.
    """

    def run() -> None:
        norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        step_scaled(optimizer, ((norm + 1e-6) / MAX_GRAD_NORM).clamp(min=1.0))

    return run


def unscale_clip_and_step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What `GradScaler.unscale_` does, then `clip_grad_norm_`, then the step, if no inf was found."""
    device = params[0].device
    inverse_scale = torch.tensor(1 / LOSS_SCALE, device=device)

    def run() -> None:
        found_inf = torch.zeros((), device=device)
        grads: list[Tensor] = [param.grad for param in params if param.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        if not found_inf.item():
            optimizer.step()

    return run
