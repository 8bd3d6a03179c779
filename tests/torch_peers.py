"""Our optimizers and torch's of the same name, trained side by side on the same gradients."""

from __future__ import annotations

from typing import Any

import torch
from stock_optimizers import params_of, set_grads
from torch.nn import Parameter

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.5, "dampening": 0.25, "maximize": True}),
    "SGD with nesterov": ("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.1}),
    "AdamW": ("AdamW", {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.1, "maximize": True}),
    "AdamW with amsgrad": ("AdamW", {"lr": 0.1, "betas": (0.5, 0.7), "amsgrad": True}),
}


def make(module: Any, case: str, **settings: Any) -> torch.optim.Optimizer:
    name, options = CASES[case]
    torch.manual_seed(1)
    params = [Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2,))]
    return getattr(module, name)(params, **options, **settings)


def train(steps: int, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        set_grads(*optimizers)
        for optimizer in optimizers:
            optimizer.step()


def assert_alike(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    pairs = list(zip(params_of(ours), params_of(theirs), strict=True))
    for param, truth in pairs:
        # Both float32, with operations in another order: a few roundings of values below 4. A step is about 0.1.
        torch.testing.assert_close(param, truth, rtol=1e-5, atol=2e-6)
    for param, truth in pairs:
        for name, value in theirs.state.get(truth, {}).items():
            mine = ours.state[param][name]  # torch keeps step counts on the CPU
            torch.testing.assert_close(mine, value.to(mine.device), rtol=1e-5, atol=2e-6)
