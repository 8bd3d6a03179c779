"""AdamW with clipping in double precision: what every variant has to come out at before its time counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

LR, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.1, 1.0
ADAMW: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
BETAS, EPS = (0.9, 0.999), 1e-8  # torch's defaults, and ours

# Elements at a time, in doubles: what a CPU's cache holds, and what a GPU is busy with for longer than with a launch.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}

# Parameters are about 0.1 at most and rounded twice or three times; first moments about 0.005, from fp32 gradients.
PARAM_TOLERANCE, MOMENT_TOLERANCE = 2e-8, 5e-9
# What clips may be that much off: torch sums a norm on a CPU with errors up to 1e-3 (8.7e-4 for GPT-2's gradients).
COEFFICIENT_TOLERANCE = {"cpu": 2e-3, "cuda": 1e-5}


class WrongError(AssertionError):
    """A step came out at something else; `error` is the largest one of a parameter."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


def pieces(*lists: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Goes through lists of tensors of the same sizes, side by side: flat pieces, of small tensors many in one."""
    together: list[tuple[Tensor, ...]] = []
    elements, longest = 0, _PIECE[lists[0][0].device.type]
    for tensors in zip(*lists, strict=True):
        flat = tuple(tensor.detach().view(-1) for tensor in tensors)
        if len(flat[0]) >= longest:
            for start in range(0, len(flat[0]), longest):
                yield [each[start : start + longest] for each in flat]
            continue
        together.append(flat)
        elements += len(flat[0])
        if elements >= longest:
            yield [torch.cat(each) for each in zip(*together, strict=True)]
            together, elements = [], 0
    if elements:
        yield [torch.cat(each) for each in zip(*together, strict=True)]


def total(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the micro-batches' gradients."""
    return sum(grads[1:], grads[0].double())


def coefficient(sets: Sequence[Sequence[Tensor]], scale: float) -> float:
    """What gradients are multiplied by: `scale`, and what clips their norm."""
    squares = [total(grads).square().sum() for grads in pieces(*sets)]
    norm = scale * math.sqrt(float(torch.stack(squares).sum()))
    return scale * min(1.0, MAX_GRAD_NORM / (norm + 1e-6))


class Moments:
    """Adam's moments in fp64, after `count` steps. A call takes a step's gradients, and returns its update over lr."""

    def __init__(
        self, first: Tensor | float = 0.0, second: Tensor | float = 0.0, count: int = 0,
        betas: tuple[float, float] = BETAS, eps: float = EPS,
    ) -> None:  # fmt: skip
        self.moments = [first, second]
        self._betas, self._eps, self._count = betas, eps, count

    def __call__(self, grads: Tensor) -> Tensor:
        grads = grads.double()
        self._count += 1
        values = zip(self._betas, self.moments, (grads, grads.square()), strict=True)
        first, second = self.moments = [beta * moment + (1 - beta) * value for beta, moment, value in values]
        correction1, correction2 = (1 - beta**self._count for beta in self._betas)
        return (first / correction1) / ((second / correction2).sqrt() + self._eps)


def stepped(param: Tensor, update: Tensor) -> Tensor:
    """Returns the parameter after an update over lr, and weight decay."""
    return param * (1 - LR * WEIGHT_DECAY) - LR * update


def deviation(before: Sequence[Tensor], found: Sequence[Tensor], sets: Sequence[Sequence[Tensor]]) -> float:
    """How far parameters are from where clipped AdamW steps lead, beginning with moments of zero.

    For formats that round: some elements are far off, so what counts is all of them together.

    Args:
        before: the parameters before the first step; `found`: after the last one.
        sets: the gradients of each step, as they were before clipping.

    Returns:
        The error's root mean square over that of the whole change.
    """
    factors = [coefficient([grads], 1.0) for grads in sets]
    squares = torch.zeros(2, dtype=torch.float64, device=found[0].device)
    for start, end, *grads in pieces(before, found, *sets):
        param, moments = start.double(), Moments()
        for grad, factor in zip(grads, factors, strict=True):
            param = stepped(param, moments(grad.double() * factor))
        squares += torch.stack([(end.double() - param).square().sum(), (param - start.double()).square().sum()])
    wrong, whole = squares.sqrt().tolist()
    return float(wrong / whole)


def master(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The weight that an optimizer of ours remembers, fp64: a master where there is one, or the parameter."""
    state = optimizer.state.get(param, {})
    if "master_weight" in state:
        return state["master_weight"].detach().double()
    remainder = state.get("master_remainder")
    if remainder is None:
        return param.detach().double()
    shift = {torch.int16: 0, torch.int8: 8}[remainder.dtype]
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + (remainder.to(torch.int32) << shift)).view(torch.float32).double()
