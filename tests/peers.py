"""Two optimizers side by side, ours or torch's: the same gradients for both, and what both hold compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from compare import assert_close, assert_same_bits, everything
from table import random_grads, set_grads
from torch import Tensor

from accumfused.optimizers import RULES


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone().requires_grad_() for param in params]


def train(*optimizers: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    """The same random gradients for all; every step moves something."""
    for step in range(steps):
        for optimizer in optimizers:
            params = [param for param in params_of(optimizer) if param.requires_grad]
            before = params[0].detach().clone()
            grads = random_grads(params, 10 * seed + step)
            set_grads(params, [grad.to(param.device) for grad, param in zip(grads, params, strict=True)])
            optimizer.step()
            assert not torch.equal(params[0], before)


def assert_same(ours: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """The same parameters and states, bit for bit."""
    found, expected = everything(ours), everything(other)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


NUMBERS = {"step", *(name for rule in RULES for name in rule.tensor_states)}  # one for each parameter


def assert_like(peer: torch.optim.Optimizer, ours: torch.optim.Optimizer, what: object = "") -> None:
    """The peer's parameters and states up to roundings, in fp32 tensors of its shapes; ours may also count steps."""
    for param, truth in zip(params_of(ours), params_of(peer), strict=True):
        assert_close(param, truth, "torch.optim", f"{what}: parameter")
        mine = ours.state.get(param, {})
        theirs = {name: value for name, value in peer.state.get(truth, {}).items() if value is not None}
        assert mine.keys() | {"step"} == theirs.keys() | {"step"}
        for name, value in mine.items():
            shape = torch.Size() if name in NUMBERS else param.shape
            assert (value.dtype, value.device, value.shape) == (torch.float32, param.device, shape)
            if name in theirs:
                assert_close(value, torch.as_tensor(theirs[name]), "torch.optim", f"{what}: {name}")
