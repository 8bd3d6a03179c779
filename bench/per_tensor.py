"""A stand-in for optimizers that launch one Triton kernel per tensor, to compare with where none is installed.

It is the plainest such AdamW, not anyone's: torch's clip_grad_norm_ stands in front of it. Imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.exact import BETAS, EPS, LR, WEIGHT_DECAY

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, numel,
    lr, beta1, beta2, eps, weight_decay, correction1, root_correction2,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    grad = tl.load(grad_ptr + index, inside)
    param = tl.load(param_ptr + index, inside)
    exp_avg = tl.load(exp_avg_ptr + index, inside)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + index, inside)
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    param = param * (1 - lr * weight_decay)
    param -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq) / root_correction2 + eps)
    tl.store(param_ptr + index, param, inside)
    tl.store(exp_avg_ptr + index, exp_avg, inside)
    tl.store(exp_avg_sq_ptr + index, exp_avg_sq, inside)


class PerTensorAdamW:
    """`states`: exp_avg and exp_avg_sq of every parameter; `count`: the steps made so far, on the host."""

    def __init__(self, params: list[torch.nn.Parameter], states: list[dict[str, Tensor]], count: Tensor) -> None:
        self._params, self._states, self._count = params, states, count

    def step(self) -> None:
        self._count += 1
        count, (beta1, beta2) = float(self._count), BETAS
        correction1, root_correction2 = 1 - beta1**count, (1 - beta2**count) ** 0.5
        for param, state in zip(self._params, self._states, strict=True):
            numel = param.numel()
            adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
                param, param.grad, state["exp_avg"], state["exp_avg_sq"], numel,
                LR, beta1, beta2, EPS, WEIGHT_DECAY, correction1, root_correction2, BLOCK=_BLOCK,
            )  # fmt: skip
