"""The small regression in Lightning and Fabric: modules, and loops by hand that both can run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from regression import MAX_NORM, Batch, MakeOptimizer, batches, loss_of, network, ours
from torch import Tensor, nn

lightning = pytest.importorskip("lightning", minversion="2.4")

from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from accumfused.integrations.lightning import FusedAccumulation  # noqa: E402

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


def precision(name: str, init_scale: float = 2.0**10, plugin: Any = MixedPrecision) -> dict[str, Any]:
    """Arguments of a Trainer or a Fabric; on a CPU "16-mixed" alone would become "bf16-mixed" without a scaler."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": plugin("16-mixed", "cpu", scaler=scaler)}


def fit(
    model: Any, data: list[Batch] | None = None, *, ckpt_path: Any = None, package: Any = lightning, **settings: Any
) -> Any:
    """Trains in silence; one epoch over `data` unless told otherwise."""
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, **settings}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    loader = torch.utils.data.DataLoader(data or batches(), batch_size=None, num_workers=0)
    with warnings.catch_warnings():
        for text in QUIET:
            warnings.filterwarnings("ignore", text)
        trainer = package.Trainer(**settings)
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


# ---- loops by hand -------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """What a framework has made of a network and its optimizer, and its calls.

    Attributes:
        model, wrapper: what to use in place of `net` and `optimizer`.
        clip: clips to MAX_NORM.
    """

    net: nn.Module
    model: Any
    wrapper: Any
    backward_of: Callable[[Tensor], None]
    clip: Callable[[], Any]
    scaler: Any
    fabric: Any = None

    @property
    def optimizer(self) -> Any:
        return self.wrapper.optimizer

    def backward(self, batch: Batch) -> None:
        self.backward_of(loss_of(self.model, batch))

    def window(self, window: list[Batch], *, by: str = "wrapper", closes: bool = True) -> None:
        """All before the step, weighted by samples. Args: by: whom the micro-batches are given to."""
        for batch in window:
            self.backward(batch)
            getattr(self, by).accumulate(len(batch[0]), last=closes and batch is window[-1])

    def train(self, windows: list[list[Batch]]) -> None:
        for window in windows:
            self.window(window)
            self.wrapper.step()
            self.wrapper.zero_grad()


class Manual(Stock):
    """Manual optimization: the whole loop is in one training step."""

    def __init__(self, make_optimizer: MakeOptimizer, body: Callable[[Loop], None], scaler: Any) -> None:
        super().__init__(make_optimizer)
        self.automatic_optimization = False
        self.body, self.scaler = body, scaler
        self.loop: Any = None

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        wrapper = self.optimizers()
        clip = partial(self.clip_gradients, wrapper, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
        self.loop = Loop(self.net, self.net, wrapper, self.manual_backward, clip, self.scaler)
        self.body(self.loop)


class ManualWindowed(FusedAccumulation, Manual):
    """With the mixin, which leaves it alone."""


KINDS = {"fabric": None, "manual": Manual, "manual with the mixin": ManualWindowed}


def by_hand(
    kind: str, body: Callable[[Loop], None], make: MakeOptimizer = ours, name: str = "32-true", scale: float = 2.0**6
) -> Loop:
    """Runs the body with what Fabric has set up, or in the training step of a module with manual optimization."""
    module = KINDS[kind]
    settings = precision(name, scale, MixedPrecision if module else FabricMixedPrecision)
    scaler = settings["plugins"].scaler if name == "16-mixed" else None
    if module is not None:
        model = module(make, body, scaler)
        fit(model, batches()[:1], **settings)
        loop: Loop = model.loop
        return loop
    fabric, net = lightning.Fabric(accelerator="cpu", devices=1, **settings), network()
    model, wrapper = fabric.setup(net, make(net.parameters()))
    clip = partial(fabric.clip_gradients, model, wrapper, max_norm=MAX_NORM)
    loop = Loop(net, model, wrapper, fabric.backward, clip, scaler, fabric)
    body(loop)
    return loop
