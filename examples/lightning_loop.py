"""accumfused in Lightning: automatic optimization, manual optimization and Fabric, each beside the stock run.

Prints how far the parameters are apart, and which passes over the gradients are gone, counted by torch's profiler.
Needs `lightning`; runs on a CPU in seconds: python examples/lightning_loop.py
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af
from accumfused.integrations.lightning import FusedAccumulation

K, CLIP = 4, 0.5  # micro-batches in a window; the norm that gradients are clipped to
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
SIZES = (32, 32, 32, 32, 32, 32, 32, 32, 32, 5)  # samples per micro-batch; the last window has two

Batch = tuple[Tensor, Tensor]


class Model(lightning.LightningModule):
    """The stock one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **OPTIONS)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class OneLine(Model):
    """Automatic optimization: the one line. With max_grad_norm the Trainer needs no gradient_clip_val."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return af.AdamW(self.parameters(), **OPTIONS, max_grad_norm=CLIP)


class Weighted(FusedAccumulation, Model):
    """Automatic optimization with exact windows; the Trainer keeps its gradient_clip_val, which moves into the step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return af.AdamW(self.parameters(), **OPTIONS)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.micro_batch_weight = len(batch[1])
        return super().training_step(batch, batch_idx)


class Manual(OneLine):
    """Manual optimization with exact windows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        optimizer: Any = self.optimizers()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        last = (batch_idx + 1) % K == 0 or self.trainer.is_last_batch
        optimizer.accumulate(weight=len(batch[1]), last=last)
        if last:
            optimizer.step()
            optimizer.zero_grad()  # for a scaler that skips


def trained(model: Model, **settings: Any) -> nn.Module:
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(batches(), batch_size=None))
    return model.net


def fabric_loop() -> nn.Module:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = Model().net
    model, optimizer = fabric.setup(net, af.AdamW(net.parameters(), **OPTIONS, max_grad_norm=CLIP))
    for (x, y), last in af.windows(batches(), K):
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.accumulate(weight=len(y), last=last)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return net


def exact_loop() -> nn.Module:
    """torch alone: every window's samples in one batch."""
    net = Model().net
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    for start in range(0, len(SIZES), K):
        x, y = (torch.cat(parts) for parts in zip(*batches()[start : start + K], strict=True))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
    return net


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, 64, generator=generator) for n in SIZES]
    return [(x, x[:, :10].argmax(1)) for x in inputs]


def difference(net: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(net.parameters(), other.parameters(), strict=True))


PASSES = {
    "norm": ("aten::linalg_vector_norm",),
    "clip": ("aten::_foreach_mul_",),
    "step": ("aten::lerp_", "aten::addcmul_", "aten::addcdiv_"),
}


def counted(run: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """What it trained, and the calls of torch's operators that norm, clip and step take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net = run()
    calls = {event.key: event.count for event in profile.key_averages()}
    return net, "  ".join(f"{part} {sum(calls.get(name, 0) for name in names):3d}" for part, names in PASSES.items())


def main() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
    windows = {"accumulate_grad_batches": K}
    stock, exact = trained(Model(), **windows, gradient_clip_val=CLIP), exact_loop()
    runs: dict[str, Callable[[], nn.Module]] = {
        "Trainer, stock": lambda: trained(Model(), **windows, gradient_clip_val=CLIP),
        "Trainer, one line": lambda: trained(OneLine(), **windows),
        "Trainer, FusedAccumulation": lambda: trained(Weighted(), **windows, gradient_clip_val=CLIP),
        "manual optimization": lambda: trained(Manual()),
        "Fabric": fabric_loop,
    }
    print(f"{'':28}{'to stock':>10}{'to exact':>10}   calls of torch's operators")
    for name, run in runs.items():
        net, calls = counted(run)
        print(f"{name:28}{difference(net, stock):10.1e}{difference(net, exact):10.1e}   {calls}")
    print("exact: the mean over each window's samples; stock divides the last window, of 2 micro-batches, by 4")


if __name__ == "__main__":
    main()
