"""The model, data, trainer and truths of the Lightning tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

import accumfused as af
from accumfused.integrations.lightning import FusedAccumulation

# As large an eps as a gradient: without, Adam divides a wrong scale or clip out again.
OPTIONS = {"lr": 0.2, "betas": (0.5, 0.7), "eps": 0.3, "weight_decay": 0.1}
MAX_NORM = 0.3  # of gradients whose norm is around 1
K = 3
SIZES = (4, 1, 7, 2, 5, 3, 8, 2)  # samples per micro-batch: with K = 3 the last window has two

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]

# Lightning's own: a small loader needs no workers, a small network no GPU, and it calls what torch 2.13 has deprecated.
LIGHTNING_WARNINGS = (
    "ignore:.*does not have many workers",
    "ignore:GPU available but not used",
    "ignore:.*LeafSpec.*is deprecated",
)


def stock(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **OPTIONS)


def ours(params: Iterator[nn.Parameter]) -> af.FusedOptimizer:
    return af.AdamW(params, **OPTIONS)


def ours_clipping(params: Iterator[nn.Parameter]) -> af.FusedOptimizer:
    return af.AdamW(params, **OPTIONS, max_grad_norm=MAX_NORM)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(sizes: Sequence[int] = SIZES) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(size, 6, generator=generator) for size in sizes]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(net(x).to(y.dtype), y)


class Stock(lightning.LightningModule):
    """Automatic optimization as people write it."""

    def __init__(self, make_optimizer: MakeOptimizer = ours) -> None:
        super().__init__()
        self.net = network()
        self.make_optimizer = make_optimizer

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return loss_of(self.net, batch)


class Windowed(FusedAccumulation, Stock):
    """With the mixin, without weights."""


class Weighted(Windowed):
    """With the mixin, and the number of samples as the weight."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.micro_batch_weight = len(batch[0])
        return loss_of(self.net, batch)


def precision(name: str, init_scale: float = 2.0**10) -> dict[str, Any]:
    """Arguments of a Trainer or a Fabric; on a CPU "16-mixed" alone would become "bf16-mixed" without a scaler."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


def fit(
    model: Any, data: list[Batch] | None = None, *, ckpt_path: Any = None, package: Any = lightning, **settings: Any
) -> Any:
    """Trains in silence; one epoch over `data` unless told otherwise."""
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, **settings}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = package.Trainer(**{"enable_checkpointing": False, **settings})
    loader = torch.utils.data.DataLoader(data or batches(), batch_size=None, num_workers=0)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def mean_gradients(net: nn.Module, window: list[Batch]) -> list[Tensor]:
    """Those of the mean over all samples of the window, left in `p.grad` of this float64 network."""
    x, y = (torch.cat(parts).double() for parts in zip(*window, strict=True))
    net.zero_grad()
    loss_of(net, (x, y)).backward()
    return [param.grad for param in net.parameters()]


def truth(windows: list[list[Batch]], clip: float | None = None) -> list[Tensor]:
    """The parameters after these windows, in float64."""
    net = network().double()
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    for window in windows:
        mean_gradients(net, window)
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return parameters(net)


def cut(data: list[Batch], k: int = K) -> list[list[Batch]]:
    return [data[start : start + k] for start in range(0, len(data), k)]


def parameters(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


# Of parameters of order 1, after updates of some 0.1. In 16 bits forward and backward round each product, by 2^-11 or
# 2^-8.
ROUNDING = {"32-true": 2e-6, "16-mixed": 5e-4, "bf16-mixed": 5e-3, "bf16-true": 5e-3}


def assert_trained(net: nn.Module, expected: nn.Module | list[Tensor], rounding: float = ROUNDING["32-true"]) -> None:
    expected = parameters(expected) if isinstance(expected, nn.Module) else expected
    for param, truth in zip(parameters(net), expected, strict=True):
        torch.testing.assert_close(param.double(), truth.double(), rtol=0, atol=rounding)


def difference(net: nn.Module, other: nn.Module | list[Tensor]) -> float:
    """The largest, over all parameters."""
    other = parameters(other) if isinstance(other, nn.Module) else other
    return max(float((a - b).abs().max()) for a, b in zip(parameters(net), other, strict=True))
