"""AdamW with clipping in double precision: what every variant has to come out at before its time counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LR, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.1, 1.0
BETAS, EPS = (0.9, 0.999), 1e-8  # torch's defaults, and ours

_PIECE = 1 << 22  # elements at a time: doubles of a whole embedding would be gigabytes

# Parameters are about 0.1 at most and rounded twice or three times; first moments about 0.005, from fp32 gradients.
PARAM_TOLERANCE, MOMENT_TOLERANCE = 2e-8, 5e-9
# What clips may be that much off: torch sums a norm on a CPU with errors up to 1e-3 (8.7e-4 for GPT-2's gradients).
COEFFICIENT_TOLERANCE = {"cpu": 2e-3, "cuda": 1e-5}


def moment_tolerance(largest_grad: float, device: str) -> float:
    """What a first moment may be off, where the largest gradient is so large after clipping."""
    return MOMENT_TOLERANCE + (1 - BETAS[0]) * largest_grad * COEFFICIENT_TOLERANCE[device]


def pieces(*lists: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Goes through lists of tensors of the same sizes, side by side: flat pieces, of small tensors many in one."""
    together: list[tuple[Tensor, ...]] = []
    elements = 0
    for tensors in zip(*lists, strict=True):
        flat = tuple(tensor.detach().view(-1) for tensor in tensors)
        if len(flat[0]) >= _PIECE:
            for start in range(0, len(flat[0]), _PIECE):
                yield [each[start : start + _PIECE] for each in flat]
            continue
        together.append(flat)
        elements += len(flat[0])
        if elements >= _PIECE:
            yield [torch.cat(each) for each in zip(*together, strict=True)]
            together, elements = [], 0
    if elements:
        yield [torch.cat(each) for each in zip(*together, strict=True)]


def total(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the micro-batches' gradients."""
    return torch.stack([grad.double() for grad in grads]).sum(0)


def coefficient(sets: Sequence[Sequence[Tensor]], scale: float) -> float:
    """What gradients are multiplied by: `scale`, and what clips their norm."""
    squares = [total(grads).square().sum() for grads in pieces(*sets)]
    norm = scale * math.sqrt(float(torch.stack(squares).sum()))
    return scale * min(1.0, MAX_GRAD_NORM / (norm + 1e-6))


def step(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, count: int, *, debiased: bool
) -> tuple[Tensor, Tensor]:
    """The parameter and its first moment after step number `count`.

    `debiased`: states are kept with their bias already corrected, as optimi keeps them.
    """
    beta1, beta2 = BETAS
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    if debiased:
        beta1, beta2 = ((beta**count - beta) / (beta**count - 1) for beta in BETAS)
        correction1 = correction2 = 1.0
    exp_avg = beta1 * exp_avg.double() + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq.double() + (1 - beta2) * grad.square()
    denominator = (exp_avg_sq / correction2).sqrt() + EPS
    return param.double() * (1 - LR * WEIGHT_DECAY) - LR / correction1 * exp_avg / denominator, exp_avg
