"""A window of micro-batches whose gradients stay where they are, for graphs that are captured and replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Window:
    """Micro-batches and a step, with gradients that stay where they are, as a graph's do."""

    def __init__(self, optimizer: Any, params: list[Tensor], *values: list[Tensor]) -> None:
        self.optimizer, self.params, self.values = optimizer, params, values
        self.grads = [[torch.empty_like(value) for value in each] for each in values]

    def write_grads(self) -> None:
        """As backward would: a window's first gradients may have become its accumulators."""
        for grads, values in zip(self.grads, self.values, strict=True):
            for grad, value in zip(grads, values, strict=True):
                grad.copy_(value)

    def __call__(self) -> None:
        self.write_grads()
        for grads in self.grads:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad_dtype = grad.dtype
                param.grad = grad
            self.optimizer.accumulate()
        self.optimizer.step()
        self.optimizer.zero_grad()
