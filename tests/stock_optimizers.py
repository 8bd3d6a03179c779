"""torch's optimizers and users' own, for the tests of fuse(): made in pairs, of which one is to be fused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

OPTIONS = {"lr": 0.1, "weight_decay": 0.1}
RULED = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.5, nesterov=True, **OPTIONS),
    "Adam": functools.partial(torch.optim.Adam, betas=(0.5, 0.7), amsgrad=True, **OPTIONS),
    "AdamW": functools.partial(torch.optim.AdamW, betas=(0.5, 0.7), **OPTIONS),
    "AdamW, fused": functools.partial(torch.optim.AdamW, betas=(0.5, 0.7), fused=True, **OPTIONS),
}


class Doubling(torch.optim.AdamW):
    """A user's subclass, which does something of its own around torch's step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.mul_(1.5)
        return super().step(closure)


class SignSGD(torch.optim.Optimizer):
    """Written by hand, without decorators, and without a closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * param.grad.sign() + 0.01 * param.grad
                    self.state[param]["seen"] = self.state[param].get("seen", 0) + 1


def logged(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapper(self: Any, *args: Any) -> Any:
        self.log.append("step")
        return step(self, *args)

    return wrapper


class Logged(torch.optim.SGD):
    """A user's decorator around a step is a part of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.log: list[str] = []

    @logged
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


FOREIGN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NAdam": functools.partial(torch.optim.NAdam, **OPTIONS),
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.5, **OPTIONS),
    "Adagrad": functools.partial(torch.optim.Adagrad, **OPTIONS),
    "RAdam": functools.partial(torch.optim.RAdam, **OPTIONS),
    "Doubling": functools.partial(Doubling, **OPTIONS),
    "SignSGD": SignSGD,
}


def parameters() -> list[Parameter]:
    return [Parameter(torch.randn(5, 3)), Parameter(torch.randn(7)), Parameter(torch.randn(2))]


def twins(make: Callable[..., torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    params = parameters()
    return make(params), make([Parameter(param.detach().clone()) for param in params])


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(*optimizers: torch.optim.Optimizer, factor: float = 1.0) -> None:
    """The same random gradients for all; none for the last parameter."""
    for params in zip(*map(params_of, optimizers), strict=True):
        grad = torch.randn_like(params[0]) * factor
        for param in params:
            param.grad = None if len(grad) == 2 else grad.clone()


def stock_step(optimizer: torch.optim.Optimizer, max_grad_norm: float = 1.0) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_grad_norm)
    optimizer.step()
    return norm


def assert_equal_parameters(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for param, truth in zip(params_of(ours), params_of(theirs), strict=True):
        # Both float32: clipping and some steps differ by a few roundings of values around 1. A step is about 0.1.
        torch.testing.assert_close(param, truth, rtol=1e-5, atol=2e-6)
