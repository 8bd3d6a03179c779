"""2000 steps so small that a 16-bit weight cannot take one of them: what arrives, against the same steps in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.numerics import contenders
from bench.numerics.contenders import BF16, Contender
from bench.numerics.peers import quiet

STEPS = 2000
LEARNING_RATES = (1e-5, 1e-6, 1e-7)
SIZES = (0.02, 1.0)  # of the weights, which spread from half to one and a half of it
DECAY = {"lr": 1e-3, "weight_decay": 0.1}
# Updates vary from step to step, so that no rounding error repeats itself 2000 times, fp32's own included; no first
# moment and a short second one, so that even states in bf16, as some peers keep them, do not disturb what is measured.
OPTIONS: dict[str, Any] = {"betas": (0.0, 0.9), "eps": 1e-8, "weight_decay": 0.0}

_PERIOD = 1 << 13  # elements with gradients of their own; then they repeat
_MOST = 1 << 23  # elements, where small steps of large weights make random rounding rare


def weights(size: float, elements: int, seed: int = 0) -> Tensor:
    """bf16 numbers, in fp32, so that every format begins at the same place."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(elements, generator=generator).mul_(size).add_(size / 2)
    sign = torch.randint(0, 2, (elements,), generator=generator).mul_(2).sub_(1)
    return (spread * sign).to(BF16).float()


def gradients(count: int) -> Iterator[Tensor]:
    """bf16, shape [_PERIOD]: normal around 1, times a scale of each element, so that updates go one way in sum."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(_PERIOD, generator=generator).mul_(3).exp_().mul_(1e-3)
    for _ in range(count):
        yield torch.randn(_PERIOD, generator=generator).add_(1).mul_(scale).to(BF16)


def exact_updates(count: int) -> Tensor:
    """The sum of AdamW's updates per unit of lr, fp64, shape [_PERIOD]."""
    beta1, beta2 = OPTIONS["betas"]
    first, second, total = (torch.zeros(_PERIOD, dtype=torch.double) for _ in range(3))
    for number, grad in enumerate(gradients(count), 1):
        first = beta1 * first + (1 - beta1) * grad.double()
        second = beta2 * second + (1 - beta2) * grad.double().square()
        total -= first / (1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + OPTIONS["eps"])
    return total


def displacement(name: str, quick: bool, most: int = _MOST) -> list[dict[str, Any]]:
    """A row for each size and lr: how far the weights moved, against fp64.

    `bias` is the mean displacement over the exact one, minus 1, and `bias_error` its statistical error; `error` is the
    root mean square of an element's error over that of its displacement.

    Args:
        most: elements of a cell.
    """
    contender = contenders.named(name)
    sizes = [(size, lr) for size in SIZES for lr in LEARNING_RATES]
    if quick:
        return follow(contender, [(size, lr, _PERIOD) for size, lr in sizes], 100)
    return follow(contender, [(size, lr, min(most, _elements(contender, size, lr))) for size, lr in sizes], STEPS)


def follow(contender: Contender, cells: Sequence[tuple[float, float, int]], count: int) -> list[dict[str, Any]]:
    """The rows of `displacement`, of cells (size, lr, elements), after that many steps."""
    with quiet():
        params = [_parameter(contender, weights(size, elements)) for size, _, elements in cells]
        starts = [param.detach().clone().double() for param in params]
        groups = [{"params": [param], "lr": lr} for param, (_, lr, _) in zip(params, cells, strict=True)]
        optimizer = contender.make(groups, **OPTIONS)
        grads = [torch.empty_like(param, dtype=contender.grad_dtype) for param in params]
        for grad in gradients(count):
            for param, own in zip(params, grads, strict=True):
                own.view(-1, _PERIOD).copy_(grad)
                param.grad = own  # heavyball takes it away
            optimizer.step()
        ends = [contender.weight(optimizer, param) for param in params]
    updates = exact_updates(count)
    rows = []
    for (size, lr, _), start, end in zip(cells, starts, ends, strict=True):
        row = {"name": contender.name, "size": size, "lr": lr, "steps": count, "bytes": contender.bytes_per_parameter}
        rows.append({**row, **_compare((end - start).view(-1, _PERIOD), lr * updates)})
    return rows


def decay(name: str, quick: bool) -> dict[str, Any]:
    """Weight decay alone: what is left of the weights, and of what should be left."""
    contender, count = contenders.named(name), 100 if quick else STEPS
    with quiet():
        param = _parameter(contender, weights(0.02, 1 << 14))
        start = param.detach().clone().double()
        optimizer = contender.make(
            [{"params": [param], "lr": DECAY["lr"]}],
            betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY["weight_decay"],
        )  # fmt: skip
        grad = torch.zeros_like(param, dtype=contender.grad_dtype)
        for _ in range(count):
            param.grad = grad
            optimizer.step()
        end = contender.weight(optimizer, param)
    ratio = float((end * start).sum() / start.square().sum())
    exact = (1 - DECAY["lr"] * DECAY["weight_decay"]) ** count
    return {"name": name, "ratio": ratio, "exact": exact, "difference": ratio - exact}


def _elements(contender: Contender, size: float, lr: float) -> int:
    """As many as the contender's statistics need in this cell: the rarer its random steps, the more."""
    if contender.elements <= 1 << 14:
        return 1 << 14
    wanted = contender.elements * (lr / LEARNING_RATES[-1]) ** -1 * (8 if size == 1.0 else 1)
    return max(1 << 14, min(_MOST, 1 << round(math.log2(wanted))))


def _parameter(contender: Contender, values: Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(values.to(contender.dtype))
    if contender.dtype != contender.grad_dtype:
        param.grad_dtype = contender.grad_dtype
    return param


def _compare(moved: Tensor, exact: Tensor) -> dict[str, float]:
    """Args: moved: [repetitions, _PERIOD]; exact: [_PERIOD]."""
    errors = moved - exact
    mean = exact.mean()
    return {
        "displacement": float(mean),
        "bias": float(errors.mean() / mean),
        "bias_error": float(errors.std() / math.sqrt(errors.numel()) / mean.abs()),
        "error": float(errors.square().mean().sqrt() / exact.square().mean().sqrt()),
        "elements": errors.numel(),
    }
