"""What Lightning does with FusedAccumulation beside the table of test_trainings.py: its own features, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_loops import CLIPS, Stock, Weighted, Windowed, fit, lightning, precision
from regression import (
    MAX_NORM,
    PRECISIONS,
    ROUNDING,
    Batch,
    K,
    assert_trained,
    batches,
    clipping,
    cut,
    fused,
    loss_of,
    mean_gradients,
    network,
    stock,
    stock_fused,
    truth,
)
from torch import Tensor, nn

import accumfused as af
from accumfused.core.window import Window
from accumfused.integrations.lightning import FusedAccumulation

callbacks: Any = lightning.pytorch.callbacks
WINDOWS: dict[str, Any] = {"accumulate_grad_batches": K}
CLIP: dict[str, Any] = {"gradient_clip_val": MAX_NORM}


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_what_lightning_refuses_to_clip_it_clips_once_fused(name: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Stock(stock_fused), **CLIP, **precision(name))
    model, expected = Stock(fused), Stock(stock)
    for each in (model, expected):
        fit(each, **CLIP, **precision(name))
    assert_trained(model.net, expected.net)


class LeavesOut(Weighted):
    """Some batches count for nothing: the step returns no loss, or a weight of 0 and the loss of nothing, NaN."""

    def __init__(self, left_out: list[int], returns_none: bool) -> None:
        super().__init__()
        self.left_out, self.returns_none = left_out, returns_none

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in self.left_out:
            return loss
        self.micro_batch_weight = torch.zeros(())
        return None if self.returns_none else loss * torch.nan


@pytest.mark.parametrize(
    ("left_out", "returns_none"), [([4], True), ([5], True), ([4, 5], True), ([4], False), ([5], False)]
)
def test_a_training_step_may_leave_a_batch_out(left_out: list[int], returns_none: bool) -> None:
    model = LeavesOut(left_out, returns_none)
    fit(model, **CLIP, **WINDOWS)
    windows = cut(batches())
    windows[1] = [batch for index, batch in enumerate(windows[1], start=K) if index not in left_out]
    assert_trained(model.net, truth(windows))


def test_the_number_of_micro_batches_may_change_between_epochs() -> None:
    model = Weighted(clipping)
    fit(model, max_epochs=2, callbacks=[callbacks.GradientAccumulationScheduler({0: 2, 1: 3})])
    assert_trained(model.net, truth(cut(batches(), 2) + cut(batches(), 3)))


def test_the_package_pytorch_lightning_will_do_too() -> None:
    package = pytest.importorskip("pytorch_lightning", minversion="2.4")

    class Model(FusedAccumulation, package.LightningModule):
        make_optimizer, interval = staticmethod(clipping), None
        configure_optimizers, training_step = Stock.configure_optimizers, Weighted.training_step

    model = Model()
    model.net = network()
    fit(model, package=package, **CLIP, **WINDOWS)
    assert_trained(model.net, truth(cut(batches())))


@pytest.mark.parametrize("name", PRECISIONS)
def test_hooks_before_the_step_see_the_windows_mean_and_its_norm_is_told(name: str) -> None:
    class Looks(callbacks.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.extend(param.grad.clone() for param in pl_module.net.parameters())

    seen, model = list[Tensor](), Weighted()
    fit(model, batches()[:K], **CLIP, callbacks=[Looks()], **WINDOWS, **precision(name))
    gradients = mean_gradients(network().double(), batches()[:K])
    norm = nn.utils.get_total_norm(gradients)
    assert nn.utils.get_total_norm([g - s for g, s in zip(gradients, seen, strict=True)]) <= ROUNDING[name] * norm
    assert float(model.optimizers(use_pl_optimizer=False).grad_norm) == pytest.approx(float(norm), rel=ROUNDING[name])
    assert norm > 2 * MAX_NORM


@pytest.mark.parametrize("looks", [None, "hook", "value", "scaler"])
def test_a_window_is_divided_in_a_pass_of_its_own_only_where_something_reads_it(
    looks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looks(callbacks.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert all(param.grad is not None for param in pl_module.net.parameters())

    passes, scale = [], Window.scale
    monkeypatch.setattr(Window, "scale", lambda self, *given: passes.append(1) or scale(self, *given))  # type: ignore[func-returns-value]
    settings: dict[str, Any] = {"hook": {"callbacks": [Looks()]}, "value": CLIPS["value"], None: CLIP}.get(looks, CLIP)
    fit(Weighted(), batches()[:K], **WINDOWS, **settings, **precision("16-mixed" if looks == "scaler" else "32-true"))
    assert len(passes) == (looks is not None)


def test_schedule_free_validates_saves_and_ends_with_the_weights_to_evaluate(tmp_path: Path) -> None:
    class Notes(Stock):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            modes.append(self.optimizers(use_pl_optimizer=False).param_groups[0]["train_mode"])

    modes = list[bool]()
    model = Notes(lambda params: af.AdamWScheduleFree(params, lr=0.1))
    saves = callbacks.ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    fit(model, valid=True, metrics=None, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    assert modes
    assert not any(modes)
    saved = torch.load(saves.best_model_path, weights_only=True)
    assert not saved["optimizer_states"][0]["param_groups"][0]["train_mode"]
    for name, value in model.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value)


def test_metrics_without_a_logger_are_told(caplog: pytest.LogCaptureFixture) -> None:
    fit(Stock(stock), metrics="groups", logger=False)
    assert "the Trainer has no logger" in caplog.text


def test_a_checkpoint_within_a_window_has_its_sums(tmp_path: Path) -> None:
    class Saves(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    fit(Weighted(), callbacks=[Saves()], **WINDOWS)
    net = network()
    optimizer: Any = clipping(net.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "within.ckpt", weights_only=True)["optimizer_states"][0])
    for batch in batches()[2:K]:
        loss_of(net, batch).backward()
        optimizer.accumulate(len(batch[1]))
    optimizer.step()
    assert_trained(net, truth(cut(batches())[:1]))


# ---- what is refused, and another package ----------------------------------------------------------------------------


class Forgets(Windowed):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx != 1:
            self.micro_batch_weight = 1.0
        return super().training_step(batch, batch_idx)


def of_two_processes() -> Any:
    strategy: Any = lightning.pytorch.strategies.SingleDeviceStrategy("cpu")
    strategy.world_size = 2  # what it says is what is asked
    return strategy


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        (Forgets, dict, ValueError, "weights for some micro-batches of a window only"),
        (lambda: Weighted(stock), dict, TypeError, r"needs a fused optimizer, got AdamW; return accumfused\.AdamW"),
        (Weighted, lambda: {"strategy": of_two_processes()}, RuntimeError, "works in one process, got 2"),
    ],
)
def test_a_training_that_the_mixin_refuses(model: Any, settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(model(), **WINDOWS, **settings())


@pytest.mark.parametrize("is_fused", [False, True])
def test_overflows_that_are_dropped_are_refused_with_torchs_scaler(is_fused: bool) -> None:
    """By `fuse_trainer` before the first batch, and where the scaler first asks: no weight is written."""
    model: Any = (Stock if is_fused else Weighted)(lambda params: af.AdamW(params, nonfinite="drop"))
    before = [param.clone() for param in model.net.parameters()]
    settings = {"metrics": None} if is_fused else {}
    with pytest.raises(ValueError if is_fused else RuntimeError, match=r"take accumfused\.GradScaler"):
        fit(model, **WINDOWS, **settings, **precision("16-mixed"))
    assert all(torch.equal(param, weight) for param, weight in zip(model.net.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_class_that_the_mixin_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip(name)
    with pytest.raises(TypeError, match=r"write class Wrong\(FusedAccumulation, LightningModule\)"):
        type("Wrong", (package.LightningModule, FusedAccumulation), {})
    monkeypatch.setattr(package, "__version__", "1.9.5")
    with pytest.raises(ImportError, match=rf"needs {name} 2\.0 or newer, got 1\.9\.5"):
        type("Old", (FusedAccumulation, package.LightningModule), {})
