"""The small regression in Lightning, by automatic and by manual optimization, and in Fabric."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from regression import MAX_NORM, Batch, Case, MakeOptimizer, Trained, batches, cut, loss_of, network, ours
from torch import Tensor

lightning = pytest.importorskip("lightning", minversion="2.4")

from lightning.fabric.plugins.precision import MixedPrecision as FabricPrecision  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

import accumfused as af  # noqa: E402
from accumfused.integrations.lightning import FusedAccumulation, fuse_trainer  # noqa: E402

# Lightning's own: a small loader needs no workers, a small network no GPU; Lightning calls what torch 2.13 has
# deprecated; and it warns of a training step without a loss, and of hooks such as the mixin's.
QUIET = (
    ".*does not have many workers", "GPU available but not used", ".*LeafSpec.*is deprecated",
    ".*`training_step` returned `None`", "When using .* the hooks will not be called on every batch",
)  # fmt: skip


# ---- automatic optimization ------------------------------------------------------------------------------------------


class Stock(lightning.LightningModule):
    """Automatic optimization as people write it; notes the learning rate that each micro-batch sees.

    Args: interval: of a scheduler, if there is one: "step" or "epoch".
    """

    def __init__(self, make_optimizer: MakeOptimizer = ours, interval: str | None = None) -> None:
        super().__init__()
        self.net = network()
        self.make_optimizer, self.interval = make_optimizer, interval
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.net.parameters())
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.rates.append(self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return loss_of(self.net, batch)


class Windowed(FusedAccumulation, Stock):
    """With the mixin, without weights."""


class Weighted(Windowed):
    """With the mixin, and the number of samples as the weight."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.micro_batch_weight = len(batch[0])
        return loss_of(self.net, batch)


class Logging(Stock):
    """Logs in its training step, as most modules do."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggingAndWeighted(Logging, Weighted):
    """Both."""


def precision(name: str, init_scale: float = 2.0**10) -> dict[str, Any]:
    """Arguments of a Trainer; on a CPU "16-mixed" alone would become "bf16-mixed" without a scaler."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


CLIPS: dict[str, dict[str, Any]] = {  # as Lightning's Trainer is told
    "never": {}, "norm": {"gradient_clip_val": MAX_NORM},
    "in the step": {"gradient_clip_val": 0.0},  # which leaves the optimizer's own
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}  # fmt: skip
FUSES = ("audit", "metrics", "noise_scale")  # arguments of fuse_trainer; the others are the Trainer's


DEFAULTS: dict[str, Any] = {
    "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def fit(
    model: Any, data: list[Batch] | None = None, *, ckpt_path: Any = None, package: Any = lightning,
    valid: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Trains in silence; one epoch over `data` unless told otherwise. With FUSES the trainer is fused.

    Args: valid: validates with the same data.
    """
    fuses = {name: settings.pop(name) for name in FUSES if name in settings}
    settings = DEFAULTS | settings
    loader = torch.utils.data.DataLoader(data or batches(), batch_size=None, num_workers=0)
    with warnings.catch_warnings():
        for text in QUIET:
            warnings.filterwarnings("ignore", text)
        trainer = package.Trainer(**settings)
        if fuses:
            fuse_trainer(trainer, **fuses)
        trainer.fit(model, loader, loader if valid else None, ckpt_path=ckpt_path)
    return trainer


class Linears(Weighted):
    """Its linear layers add their weights' gradients to the sums."""

    releases = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.releases:
            af.release_gradients(optimizer, 1)
        assert len(af.fuse_linears(self, optimizer).fused) == 2
        return optimizer


class ReleasedLinears(Linears):
    """And it releases the other gradients."""

    releases = True


def train(net: Any, wrapper: Any, backward: Any, data: Any, clip: Callable[[], Any] = lambda: None) -> None:
    """Windows by hand, through what the framework has made of the optimizer."""
    wrapper.load_state_dict(wrapper.optimizer.state_dict())
    known = dict(vars(wrapper))  # no call leaves anything there
    for window in cut(data):
        for batch in window:
            backward(loss_of(net, batch))
            wrapper.accumulate(len(batch[0]), last=batch is window[-1])
        clip()
        wrapper.step()
        wrapper.zero_grad()
    assert vars(wrapper) == known


class Manual(Stock):
    """Manual optimization: the whole loop is in one training step."""

    automatic_optimization, data = False, list[Batch]()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        train(self.net, self.optimizers(), self.manual_backward, self.data)


class ManualWindowed(FusedAccumulation, Manual):
    """With the mixin, which leaves it alone."""


def by_lightning(kind: Any, case: Case) -> Trained:
    """In two epochs the loss scale doubles until float16 overflows."""
    is_long, by_hand = case.by_epoch is not None, issubclass(kind, Manual)
    model = kind(case.optimizer_of, {None: None, True: "epoch", False: "step"}[case.by_epoch])
    model.data, settings = case.data, precision(case.precision, 2.0**10 if is_long else 2.0**6)
    loop = {"limit_train_batches": 1} if by_hand else {"accumulate_grad_batches": case.k, **CLIPS[case.clip]}
    trainer = fit(model, case.data, max_epochs=2 if is_long else 1, **loop, **settings)
    assert (model.net[0].weight.dtype == torch.bfloat16) == (case.precision == "bf16-true")
    scaler = settings["plugins"].scaler if "plugins" in settings else None
    updates = 0 if by_hand else trainer.global_step
    return Trained(model.net, trainer.optimizers[0], updates, scaler, rates=model.rates)


def fabric_of(case: Case) -> tuple[Any, Any, Any, Any]:
    net, settings = network(), precision(case.precision, 2.0**6)
    scaler = settings["plugins"].scaler if "plugins" in settings else None
    if scaler is not None:
        settings["plugins"] = FabricPrecision(case.precision, "cpu", scaler=scaler)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
    model, wrapper = fabric.setup(net, case.optimizer_of(net.parameters()))
    return fabric, model, wrapper, Trained(net, wrapper.optimizer, scaler=scaler)


def by_fabric(case: Case) -> Trained:
    fabric, model, wrapper, result = fabric_of(case)
    clips = functools.partial(fabric.clip_gradients, model, wrapper, max_norm=MAX_NORM, error_if_nonfinite=False)
    train(model, wrapper, fabric.backward, case.data, clips if case.clip == "norm" else lambda: None)
    return result
