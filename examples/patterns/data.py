"""What the patterns share: a small task, a small model, and whole batches in float64 to compare with."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def micro_batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The same samples whatever the sizes: inputs [size, 8] and classes [size], one of 3."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 8, generator=generator)
    y = (x[:, :3] + torch.randn(sum(sizes), 3, generator=generator)).argmax(1)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def model(norm: nn.Module | None = None) -> nn.Sequential:
    """A small classifier, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm or nn.Identity(), nn.Tanh(), nn.Linear(16, 3))


def whole_batches(net: nn.Module, sizes: Sequence[int], lr: float, max_norm: float = 1e9) -> nn.Module:
    """Trains a float64 copy with torch's own SGD, one update for each of these batches: the truth."""
    net = copy.deepcopy(net).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for x, y in micro_batches(sizes):
        optimizer.zero_grad()
        F.cross_entropy(net(x.double()), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
    return net


def weights(net: nn.Module) -> Tensor:
    """All of them, one after the other, in float64."""
    return torch.cat([param.detach().double().flatten() for param in net.parameters()])


def off(net: nn.Module, truth: nn.Module, start: nn.Module) -> float:
    """How far the weights are from the truth, relative to the way from the start to the truth."""
    return float((weights(net) - weights(truth)).norm() / (weights(truth) - weights(start)).norm())
