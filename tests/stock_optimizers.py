"""The parameters of any optimizer, and gradients for them."""

from __future__ import annotations

import torch
from torch.nn import Parameter


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(*optimizers: torch.optim.Optimizer, factor: float = 1.0) -> None:
    """The same random gradients for all; none for a parameter of two elements."""
    for params in zip(*map(params_of, optimizers), strict=True):
        grad = torch.randn_like(params[0]) * factor
        for param in params:
            param.grad = None if len(grad) == 2 else grad.clone()
