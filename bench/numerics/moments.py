"""Moments in few bits, as the optimizers keep them: the updates that come of them, against moments in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.numerics import contenders
from bench.numerics.codec_study import BETAS, KINDS, gradients
from bench.numerics.contenders import Contender
from bench.numerics.peers import quiet

OPTIONS: dict[str, Any] = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.0}
_LR = 1e-3
_PROBE = 1e-4  # a gradient that is too small to change a second moment, and shows it in its update


class Updates:
    """An optimizer over parameters that are put back to zero before each step, so that each shows its update."""

    def __init__(self, contender: Contender, count: int, elements: int) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(elements, dtype=contender.dtype)) for _ in range(count)]
        self._optimizer = contender.make([{"params": self.params, "lr": _LR}], **OPTIONS)

    def step(self, grads: Tensor) -> Tensor:
        """Args: grads: one row per parameter. Returns: the updates over lr, fp64, in the same shape."""
        for param, grad in zip(self.params, grads, strict=True):
            param.detach().zero_()
            param.grad = grad.to(param.dtype)
        self._optimizer.step()
        return torch.stack([param.detach().double() for param in self.params]) / -_LR


class Exact:
    """The same in fp64."""

    def __init__(self) -> None:
        self.first, self.second, self._number = torch.zeros(()), torch.zeros(()), 0

    def step(self, grads: Tensor) -> Tensor:
        beta1, beta2 = BETAS
        self._number += 1
        self.first = beta1 * self.first + (1 - beta1) * grads.double()
        self.second = beta2 * self.second + (1 - beta2) * grads.double().square()
        root = (self.second / (1 - beta2**self._number)).sqrt()
        return self.first / (1 - beta1**self._number) / (root + OPTIONS["eps"])


def largest_updates(name: str, elements: int = 1 << 14, count: int = 300) -> list[dict[str, Any]]:
    """A row for each kind of gradient; see `codec_study.study` for the columns."""
    with quiet():
        updates, exact = Updates(contenders.named(name), len(KINDS), elements), Exact()
        largest, exact_largest, squares, exact_squares = (torch.zeros(len(KINDS), dtype=torch.double) for _ in range(4))
        moved = exact_moved = torch.zeros(())
        for number, grads in enumerate(gradients(elements, count), 1):
            found, right = (updates.step(grads), exact.step(grads.to(updates.params[0].dtype)))
            moved, exact_moved = moved + found, exact_moved + right
            largest = torch.maximum(largest, found.abs().amax(1))
            exact_largest = torch.maximum(exact_largest, right.abs().amax(1))
            if number > count // 2:
                squares += (found - right).square().mean(1)
                exact_squares += right.square().mean(1)
    drift = (moved - exact_moved).norm(dim=1) / exact_moved.norm(dim=1)
    rows = zip(KINDS, largest / exact_largest, (squares / exact_squares).sqrt(), drift, strict=True)
    return [
        {"name": name, "gradients": kind, "largest": float(ratio), "error": float(error), "drift": float(off)}
        for kind, ratio, error, off in rows
    ]


def zeros(name: str, after: Sequence[int]) -> dict[str, Any]:
    """What zero gradients do: from the start, and to a second moment that was there.

    `from_start` is the largest |update| when there never was a gradient. `after N` is the mean second moment after N
    steps of zero gradients over the exact one, 0.999^N of what it was; it is taken from the update of a tiny gradient.
    """
    elements = 1 << 12
    with quiet():
        contender = contenders.named(name)
        never = Updates(contender, 1, elements)
        nothing = torch.zeros(1, elements)
        from_start = max(float(never.step(nothing).abs().max()) for _ in range(20))
        updates, exact = Updates(contender, 1, elements), Exact()
        generator = torch.Generator().manual_seed(2)
        for _ in range(50):
            grads = torch.randn(1, elements, generator=generator)
            updates.step(grads), exact.step(grads.to(contender.dtype))
        row: dict[str, Any] = {"name": name, "from_start": from_start}
        for number in range(1, after[-1] + 1):
            probing = number in after
            grads = torch.full((1, elements), _PROBE if probing else 0.0)
            found, right = updates.step(grads), exact.step(grads.to(contender.dtype))
            if probing:  # an update is the first moment, which both have alike, over the root of the second
                kept = (right / found).square() * exact.second
                row[f"after {number}"] = float(kept.mean() / exact.second.mean())
    return row
