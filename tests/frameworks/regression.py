"""A small regression that frameworks train: network, unequal micro-batches, optimizers, and the float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import accumfused as af

# As large an eps as a gradient: without, Adam divides a wrong scale or clip out again.
OPTIONS = {"lr": 0.2, "betas": (0.5, 0.7), "eps": 0.3, "weight_decay": 0.1}
MAX_NORM = 0.3  # of gradients whose norm is around 1
K = 3
SIZES = (4, 1, 7, 2, 5, 3, 8, 2)  # samples per micro-batch: with K = 3 the last window has two
# Of parameters of order 1, after updates of some 0.1. In 16 bits forward and backward round each product, by 2^-11 or
# 2^-8.
ROUNDING = {"32-true": 2e-6, "16-mixed": 5e-4, "bf16-mixed": 5e-3, "bf16-true": 5e-3}

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
OVERFLOW = "16-mixed and an infinity"

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]


def stock(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **OPTIONS)


def ours(params: Iterator[nn.Parameter]) -> af.FusedOptimizer:
    return af.AdamW(params, **OPTIONS)


def clipping(params: Iterator[nn.Parameter]) -> af.FusedOptimizer:
    return af.AdamW(params, **OPTIONS, max_grad_norm=MAX_NORM)


def stock_fused(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Which Lightning and Fabric refuse to clip in 16 bits."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def fused(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return af.fuse(stock_fused(params))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(size, 6, generator=generator) for size in SIZES]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def with_an_infinity() -> list[Batch]:
    data = batches()
    data[1][1].fill_(torch.inf)
    return data


def cut(data: list[Batch], k: int = K) -> list[list[Batch]]:
    return [data[start : start + k] for start in range(0, len(data), k)]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(net(x).to(y.dtype), y)


# ---- a training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a loop trains with, in every framework."""

    make: MakeOptimizer
    name: str = "32-true"  # a precision as Lightning calls it; or OVERFLOW
    k: int = K
    clip: str = "in the step"  # of CLIPS
    # Lightning's rates change, Accelerate's windows end, and Trainer stops, with an epoch, or not; None: one epoch.
    by_epoch: bool | None = None

    @property
    def precision(self) -> str:
        return self.name.removesuffix(" and an infinity")

    @property
    def data(self) -> list[Batch]:
        return with_an_infinity() if self.name == OVERFLOW else batches()

    @property
    def optimizer_of(self) -> MakeOptimizer:
        return clipping if self.clip == "in the step" and self.make is not stock else self.make


@dataclass
class Trained:
    """A training that is over. `norms` and `rates`: one an update; the norm of an update that is skipped is inf."""

    net: nn.Module
    optimizer: Any  # without the framework's wrapper
    updates: int = 0  # 0: nobody counts them
    scaler: Any = None
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Updates that were not skipped."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @property
    def scale(self) -> float:
        return self.scaler.get_scale() if self.scaler else 1.0


# ---- truth ---------------------------------------------------------------------------------------------------------


def mean_gradients(net: nn.Module, window: list[Batch]) -> list[Tensor]:
    """Those of the mean over all samples of the window, left in `p.grad` of this float64 network."""
    x, y = (torch.cat(parts).double() for parts in zip(*window, strict=True))
    net.zero_grad()
    loss_of(net, (x, y)).backward()
    return [param.grad for param in net.parameters()]


def truth(windows: list[list[Batch]], clip: bool = True) -> nn.Module:
    """The network after these windows, in float64."""
    net = network().double()
    optimizer = stock(net.parameters())
    for window in windows:
        mean_gradients(net, window)
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM if clip else torch.inf)
        optimizer.step()
    return net


def difference(net: nn.Module, other: nn.Module) -> float:
    """The largest, over all parameters."""
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)


def assert_trained(net: nn.Module, expected: nn.Module, name: str = "32-true") -> None:
    assert difference(net, expected) <= ROUNDING[name]
