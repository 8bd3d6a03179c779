"""Lightning: one changed line, or FusedAccumulation with its exact windows; and windows by hand, in Fabric too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from lightning.fabric.plugins.precision import MixedPrecision as FabricPrecision
from lightning_loops import PRECISIONS, Stock, Weighted, Windowed, fit, lightning, precision
from regression import (
    MAX_NORM,
    OPTIONS,
    ROUNDING,
    Batch,
    K,
    MakeOptimizer,
    assert_trained,
    batches,
    clipping,
    cut,
    difference,
    fused,
    loss_of,
    mean_gradients,
    network,
    ours,
    stock,
    stock_fused,
    truth,
    with_an_infinity,
)
from torch import Tensor, nn

import accumfused as af
from accumfused.integrations.lightning import FusedAccumulation
from accumfused.loop import linears

callbacks: Any = lightning.pytorch.callbacks
CLIPS: dict[str, dict[str, Any]] = {
    "never": {}, "norm": {"gradient_clip_val": MAX_NORM},
    "in the step": {"gradient_clip_val": 0.0},  # which leaves the optimizer's own
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}  # fmt: skip
WINDOWS: dict[str, Any] = {"accumulate_grad_batches": K}


# ---- numbers -------------------------------------------------------------------------------------------------------


@functools.cache
def stock_run(name: str, k: int, clip: str) -> tuple[nn.Module, int]:
    """Two epochs of 8: an epoch's last window is shorter. The loss scale doubles until float16 overflows."""
    model = Stock(stock)
    settings = CLIPS["norm" if clip == "in the step" else clip]
    trainer = fit(model, max_epochs=2, accumulate_grad_batches=k, **settings, **precision(name))
    assert difference(model.net, network()) > 0.1
    return model.net, trainer.global_step


@pytest.mark.pairwise(kind=(Stock, Windowed), make=(ours, fused), name=PRECISIONS, k=(1, K), clip=tuple(CLIPS))
def test_without_weights_the_run_is_the_stock_one(kind: Any, make: MakeOptimizer, name: str, k: int, clip: str) -> None:
    expected, updates = stock_run(name, k, clip)
    model = kind(clipping if clip == "in the step" else make)
    trainer = fit(model, max_epochs=2, accumulate_grad_batches=k, **CLIPS[clip], **precision(name))
    assert_trained(model.net, expected)
    assert trainer.global_step == updates == (16 if k == 1 else 6)
    assert clip == "never" or difference(expected, stock_run(name, k, "never")[0]) > 0.01


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_what_lightning_refuses_to_clip_it_clips_once_fused(name: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Stock(stock_fused), **CLIPS["norm"], **precision(name))
    model = Stock(fused)
    fit(model, max_epochs=2, **CLIPS["norm"], **precision(name))
    assert_trained(model.net, stock_run(name, 1, "norm")[0])


@pytest.mark.pairwise(
    kind=(Stock, Weighted), make=(ours, fused), k=(1, K), name=tuple(ROUNDING), clip=("never", "in the step", "norm")
)
def test_with_weights_a_window_is_the_mean_over_its_samples(
    kind: Any, make: MakeOptimizer, k: int, name: str, clip: str
) -> None:
    k = 1 if kind is Stock else k  # where the stock mean is exact: the masters of bf16-true keep what it rounds away
    model = kind(clipping if clip == "in the step" else make)
    trainer = fit(model, accumulate_grad_batches=k, **CLIPS[clip], **precision(name, 2.0**6))
    assert_trained(model.net, truth(cut(batches(), k), clip != "never"), name)
    assert trainer.global_step == len(cut(batches(), k))
    assert (model.net[0].weight.dtype == torch.bfloat16) == (name == "bf16-true")


class Linears(Weighted):
    """Its linear layers add their weights' gradients to the sums; it may release the others."""

    releases = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.releases:
            af.release_gradients(optimizer, 1)
        assert len(af.fuse_linears(self, optimizer).fused) == 2
        return optimizer


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("releases", [False, True])
def test_with_fused_linears_too(name: str, releases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    model = Linears(clipping)
    model.releases = releases
    trainer = fit(model, accumulate_grad_batches=K, **CLIPS["norm"], **precision(name, 2.0**6))
    assert_trained(model.net, truth(cut(batches())), name)
    assert trainer.global_step == len(cut(batches()))


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
    fit(model, gradient_clip_val=MAX_NORM, **WINDOWS)
    windows = cut(batches())
    windows[1] = [batch for index, batch in enumerate(windows[1], start=K) if index not in left_out]
    assert_trained(model.net, truth(windows))


def test_the_number_of_micro_batches_may_change_between_epochs() -> None:
    model = Weighted(clipping)
    fit(model, max_epochs=2, callbacks=[callbacks.GradientAccumulationScheduler({0: 2, 1: 3})])
    assert_trained(model.net, truth(cut(batches(), 2) + cut(batches(), 3)))


@pytest.mark.parametrize("name", PRECISIONS)
def test_hooks_before_the_step_see_the_windows_mean_and_its_norm_is_told(name: str) -> None:
    class Looks(callbacks.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.extend(param.grad.clone() for param in pl_module.net.parameters())

    seen, model = list[Tensor](), Weighted()
    fit(model, batches()[:K], gradient_clip_val=MAX_NORM, callbacks=[Looks()], **WINDOWS, **precision(name))
    gradients = mean_gradients(network().double(), batches()[:K])
    norm = nn.utils.get_total_norm(gradients)
    assert nn.utils.get_total_norm([g - s for g, s in zip(gradients, seen, strict=True)]) <= ROUNDING[name] * norm
    assert float(model.optimizers(use_pl_optimizer=False).grad_norm) == pytest.approx(float(norm), rel=ROUNDING[name])
    assert norm > 2 * MAX_NORM


@pytest.mark.parametrize(("kind", "k", "scale"), [(Stock, 1, 2.0**8), (Weighted, K, 2.0**6)])
@pytest.mark.parametrize("clips", [{}, {"gradient_clip_val": MAX_NORM}])
def test_an_overflow_drops_its_window_and_the_scale_backs_off(kind: Any, k: int, scale: float, clips: Any) -> None:
    windows = cut(with_an_infinity(), k)
    del windows[1 // k]
    model, settings = kind(ours if clips else clipping), precision("16-mixed", 2.0**6)
    trainer = fit(model, with_an_infinity(), accumulate_grad_batches=k, **clips, **settings)
    assert_trained(model.net, truth(windows), "16-mixed")
    assert settings["plugins"].scaler.get_scale() == scale  # halved, and doubled after two good steps, and two
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {len(windows)}


# ---- loops by hand ---------------------------------------------------------------------------------------------------


def train(net: Any, wrapper: Any, backward: Any, data: list[Batch], clip: Callable[[], Any] = lambda: None) -> None:
    """Windows through what the framework has made of the optimizer."""
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


def fabric_of(make: MakeOptimizer, name: str = "32-true") -> tuple[Any, Any, Any, nn.Module]:
    net, settings = network(), precision(name, 2.0**6)
    if name == "16-mixed":
        settings["plugins"] = FabricPrecision(name, "cpu", scaler=settings["plugins"].scaler)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
    return fabric, *fabric.setup(net, make(net.parameters())), net


@pytest.mark.pairwise(kind=("fabric", "fabric clips", Manual, ManualWindowed), name=PRECISIONS, overflows=(False, True))
def test_windows_by_hand_are_exact_through_the_frameworks_wrapper(kind: Any, name: str, overflows: bool) -> None:
    overflows &= name == "16-mixed"
    data = with_an_infinity() if overflows else batches()
    if isinstance(kind, str):
        fabric, model, wrapper, net = fabric_of(ours if kind == "fabric clips" else clipping, name)
        clip = functools.partial(fabric.clip_gradients, model, wrapper, max_norm=MAX_NORM, error_if_nonfinite=False)
        train(model, wrapper, fabric.backward, data, clip if kind == "fabric clips" else lambda: None)
    else:
        model = kind(clipping)
        model.data, net = data, model.net
        fit(model, batches()[:1], **precision(name, 2.0**6))
    assert_trained(net, truth(cut(data)[overflows:]), name)


def test_a_fabric_checkpoint_has_an_open_window(tmp_path: Path) -> None:
    (fabric, model, wrapper, _), (other, fresh, unwrapped, _) = (fabric_of(clipping) for _ in range(2))
    train(model, wrapper, fabric.backward, batches())
    fabric.backward(loss_of(model, batches()[0]))
    wrapper.accumulate(2.0)
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": wrapper})
    other.load(tmp_path / "run.ckpt", {"model": fresh, "optimizer": unwrapped})
    for each_model, each in ((model, wrapper), (fresh, unwrapped)):
        fabric.backward(loss_of(each_model, batches()[1]))
        each.accumulate(3.0)
        each.step()
    assert_same(unwrapped.optimizer, wrapper.optimizer)


# ---- schedulers and checkpoints --------------------------------------------------------------------------------------


class Scheduled(Stock):
    """Notes the learning rate that each micro-batch sees."""

    def __init__(self, make_optimizer: MakeOptimizer, interval: str = "step") -> None:
        super().__init__(make_optimizer)
        self.interval = interval
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class ScheduledAndWeighted(Weighted, Scheduled):
    """Both."""


@pytest.mark.parametrize("make", [ours, fused])
@pytest.mark.parametrize(
    ("interval", "halvings"),
    [("step", [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5]), ("epoch", [0] * 8 + [1] * 8)],
)
def test_a_scheduler_steps_with_the_updates_or_the_epochs(make: Any, interval: str, halvings: list[int]) -> None:
    expected, model = Scheduled(stock, interval), Scheduled(make, interval)
    for each in (expected, model):
        fit(each, max_epochs=2, **WINDOWS)
    assert model.rates == expected.rates == [OPTIONS["lr"] * 0.5**n for n in halvings]
    assert_trained(model.net, expected.net)


@pytest.mark.pairwise(kind=(Scheduled, ScheduledAndWeighted), make=(ours, clipping, fused), name=PRECISIONS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, kind: Any, make: MakeOptimizer, name: str
) -> None:
    whole, first, second = (kind(make) for _ in range(3))
    expected = fit(whole, max_epochs=2, **WINDOWS, **precision(name))
    fit(first, max_epochs=1, **WINDOWS, **precision(name)).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = fit(second, max_epochs=2, ckpt_path=tmp_path / "epoch.ckpt", **WINDOWS, **precision(name))
    assert first.rates + second.rates == whole.rates
    assert resumed.global_step == expected.global_step == 6
    assert_same(resumed.optimizers[0], expected.optimizers[0])


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


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_class_that_the_mixin_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip(name)
    with pytest.raises(TypeError, match=r"write class Wrong\(FusedAccumulation, LightningModule\)"):
        type("Wrong", (package.LightningModule, FusedAccumulation), {})
    monkeypatch.setattr(package, "__version__", "1.9.5")
    with pytest.raises(ImportError, match=rf"needs {name} 2\.0 or newer, got 1\.9\.5"):
        type("Old", (FusedAccumulation, package.LightningModule), {})


@pytest.mark.parametrize("k", [1, 2])
def test_batch_norm_is_warned_of_once_where_windows_have_several_micro_batches(k: int) -> None:
    model = Weighted()
    model.add_module("norm", nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, max_epochs=2, accumulate_grad_batches=k)
    found = [str(each.message) for each in seen if each.category is af.BatchNormWarning]
    assert ["norm (BatchNorm1d)" in text for text in found] == [True] * (k > 1)


def test_the_package_pytorch_lightning_will_do_too() -> None:
    package = pytest.importorskip("pytorch_lightning", minversion="2.4")

    class Model(FusedAccumulation, package.LightningModule):
        make_optimizer = staticmethod(ours)
        configure_optimizers = Stock.configure_optimizers
        training_step = Weighted.training_step

    model = Model()
    model.net = network()
    fit(model, package=package, gradient_clip_val=MAX_NORM, **WINDOWS)
    assert_trained(model.net, truth(cut(batches())))
