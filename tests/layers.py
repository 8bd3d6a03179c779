"""Small models of linear layers, with an optimizer whose window takes their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accumfused as af

WIDTH = 24


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, WIDTH, bias=False), nn.Tanh(),
        nn.Linear(WIDTH, 16),
    )  # fmt: skip


class Net(nn.Module):
    """Args: way: what `forward` does with two layers, or its name in WAYS."""

    def __init__(self, way: str | Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = WAYS[way] if isinstance(way, str) else way
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def _nested(net: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return net.a(torch.tanh(net.b(x)))

    def outer(x: Tensor) -> Tensor:
        return net.b(checkpoint(inner, net.a(x), use_reentrant=reentrant))  # type: ignore[no-any-return]

    return checkpoint(outer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "twice": lambda net, x: net.a(torch.tanh(net.a(x))) + net.b(x),
    "outside": lambda net, x: F.linear(torch.tanh(net.a(x)), net.a.weight) + net.b(x),
    "checkpoint": lambda net, x: checkpoint(net.b, checkpoint(net.a, x, use_reentrant=False), use_reentrant=False),  # type: ignore
    "reentrant": lambda net, x: checkpoint(net.b, checkpoint(net.a, x, use_reentrant=True), use_reentrant=True),  # type: ignore
    "nested": lambda net, x: _nested(net, x, reentrant=False),
    "nested reentrant": lambda net, x: _nested(net, x, reentrant=True),
    "unused": lambda net, x: net.a(x),
    "one dimension": lambda net, x: net.b(net.a(x.reshape(-1)[:WIDTH])),
    "four dimensions": lambda net, x: net.b(net.a(x[None])),
    "transposed": lambda net, x: net.b(net.a(x.transpose(0, 1))).transpose(0, 1),
    "expanded": lambda net, x: net.b(net.a(x[:1].expand(3, -1, -1))).sum((0, 1)).expand(2, -1),
    "sliced": lambda net, x: net.b(net.a(x[::2, 1:])),
    "batch of 0": lambda net, x: torch.cat([net.b(net.a(x[:0])), net.a(x)]),
    "nothing else": lambda net, x: net.a(x).detach() + net.b(x.detach()),
}


def batch(model: nn.Module, number: int, *shape: int) -> Tensor:
    """Random numbers, the same for each number, in the model's dtype."""
    drawn = torch.randn(*(shape or (4, 3, WIDTH)), generator=torch.Generator().manual_seed(number))
    return drawn.to(next(model.parameters()).dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def backward(model: nn.Module, number: int = 0, *shape: int) -> None:
    loss_of(model, batch(model, number, *shape)).backward()


def fused(model: nn.Module, backend: str = "auto") -> af.SGD:
    """An optimizer with all parameters, whose window the layers add to."""
    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    af.fuse_linears(model, optimizer)
    return optimizer


def assert_same_gradients(model: nn.Module, truth: nn.Module, divisor: float = 1.0) -> None:
    """The gradients of the one are those of the other, divided; none where that has none."""
    for (name, param), right in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert (param.grad is None) == (right.grad is None), name
        if param.grad is not None and right.grad is not None:
            assert_close(param.grad, right.grad / divisor, "model", name)
