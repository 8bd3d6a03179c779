"""The small regression in Lightning: modules with automatic optimization, and how they are trained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from regression import Batch, MakeOptimizer, batches, loss_of, network, ours
from torch import Tensor

lightning = pytest.importorskip("lightning", minversion="2.4")

from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from accumfused.integrations.lightning import FusedAccumulation, fuse_trainer  # noqa: E402

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# Lightning's own: a small loader needs no workers, a small network no GPU; Lightning calls what torch 2.13 has
# deprecated; and it warns of a training step without a loss, and of hooks such as the mixin's.
QUIET = (
    ".*does not have many workers", "GPU available but not used", ".*LeafSpec.*is deprecated",
    ".*`training_step` returned `None`", "When using .* the hooks will not be called on every batch",
)  # fmt: skip


# ---- automatic optimization ------------------------------------------------------------------------------------------


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
    """Arguments of a Trainer; on a CPU "16-mixed" alone would become "bf16-mixed" without a scaler."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


FUSES = ("audit", "metrics", "noise_scale")  # arguments of fuse_trainer; the others are the Trainer's


def fit(
    model: Any, data: list[Batch] | None = None, *, ckpt_path: Any = None, package: Any = lightning, **settings: Any
) -> Any:
    """Trains in silence; one epoch over `data` unless told otherwise. With FUSES the trainer is fused."""
    fuses = {name: settings.pop(name) for name in FUSES if name in settings}
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, **settings}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    loader = torch.utils.data.DataLoader(data or batches(), batch_size=None, num_workers=0)
    with warnings.catch_warnings():
        for text in QUIET:
            warnings.filterwarnings("ignore", text)
        trainer = package.Trainer(**settings)
        if fuses:
            fuse_trainer(trainer, **fuses)
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer
