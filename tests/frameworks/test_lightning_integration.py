"""FusedAccumulation: weighted windows, and the Trainer's clip inside the step, in automatic optimization."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning", minversion="2.4")
import lightning
from compare import assert_close, assert_same_bits, everything
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_loops import (
    LIGHTNING_WARNINGS,
    MAX_NORM,
    ROUNDING,
    Batch,
    K,
    Stock,
    Weighted,
    Windowed,
    assert_trained,
    batches,
    cut,
    difference,
    fit,
    loss_of,
    mean_gradients,
    network,
    ours,
    ours_clipping,
    parameters,
    precision,
    stock,
    truth,
)

import accumfused as af
from accumfused.integrations.lightning import FusedAccumulation

pytestmark = [pytest.mark.filterwarnings(text) for text in LIGHTNING_WARNINGS]

every_precision = pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])
every_clip = pytest.mark.parametrize("clip", [None, MAX_NORM])


@pytest.mark.parametrize("name", ROUNDING)
@every_clip
@pytest.mark.parametrize("k", [1, K])
def test_with_weights_a_window_is_the_mean_over_its_samples(name: str, clip: float | None, k: int) -> None:
    model = Weighted()
    settings = {"accumulate_grad_batches": k, "gradient_clip_val": clip}
    trainer = fit(model, **settings, **precision(name, 2.0**6))
    assert_trained(model.net, truth(cut(batches(), k), clip), ROUNDING[name])
    assert trainer.global_step == len(cut(batches(), k))


def test_the_shorter_last_window_that_lightning_under_weights() -> None:
    """One window of 2, where K is 3: Lightning's gradient is 2/3 of the mean."""
    data = [(x[:1], y[:1]) for x, y in batches()[:2]]  # of equal sizes

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    moved = {}
    for name, model in (("stock", Stock(sgd)), ("weighted", Weighted(lambda params: af.fuse(sgd(params))))):
        start = parameters(model.net)
        fit(model, data, accumulate_grad_batches=K)
        moved[name] = [after - before for after, before in zip(parameters(model.net), start, strict=True)]
    for ours_, stock_ in zip(moved["weighted"], moved["stock"], strict=True):
        torch.testing.assert_close(stock_, ours_ * 2 / 3, rtol=0, atol=ROUNDING["32-true"])
    assert max(float(moves.abs().max()) for moves in moved["weighted"]) > 0.1


@every_precision
@every_clip
def test_without_weights_the_run_is_the_stock_one(name: str, clip: float | None) -> None:
    expected, model = Stock(stock), Windowed()
    for each in (expected, model):
        fit(each, max_epochs=2, accumulate_grad_batches=K, gradient_clip_val=clip, **precision(name))
    assert_trained(model.net, expected.net)


@pytest.mark.parametrize("k", [1, K])
def test_batch_norm_is_warned_of_once_where_windows_have_several_micro_batches(k: int) -> None:
    model = Weighted()
    model.add_module("norm", torch.nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, max_epochs=2, accumulate_grad_batches=k)
    found = [str(each.message) for each in seen if each.category is af.BatchNormWarning]
    assert ["norm (BatchNorm1d)" in text for text in found] == [True] * (k > 1)


def test_weights_may_be_tensors_and_zero() -> None:
    class Masked(Windowed):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            tokens = torch.tensor(0 if batch_idx == 4 else len(batch[0]))
            self.micro_batch_weight = tokens
            return loss_of(self.net, batch) * (tokens / tokens)  # of nothing: NaN

    model = Masked()
    fit(model, accumulate_grad_batches=K, gradient_clip_val=MAX_NORM)
    windows = cut(batches())
    del windows[1][1]
    assert_trained(model.net, truth(windows, MAX_NORM))


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.parametrize("skipped", [[4], [5], [4, 5]])
def test_a_training_step_may_leave_a_batch_out(skipped: list[int]) -> None:
    class Leaves(Weighted):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    model = Leaves()
    fit(model, accumulate_grad_batches=K, gradient_clip_val=MAX_NORM)
    windows = cut(batches())
    windows[1] = [batch for i, batch in enumerate(windows[1], start=K) if i not in skipped]
    assert_trained(model.net, truth(windows, MAX_NORM))


@pytest.mark.filterwarnings("ignore:When using .* the hooks will not be called on every batch")  # a hook of the mixin
def test_the_number_of_micro_batches_may_change_between_epochs() -> None:
    model = Weighted()
    fit(model, max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 2, 1: 3})])
    assert_trained(model.net, truth(cut(batches(), 2) + cut(batches(), 3)))


# ---- clipping ------------------------------------------------------------------------------------------------------


@every_precision
def test_grad_norm_is_that_of_the_whole_window(name: str) -> None:
    model = Weighted()
    fit(model, batches()[:K], accumulate_grad_batches=K, gradient_clip_val=MAX_NORM, **precision(name))
    gradients = mean_gradients(network().double(), batches()[:K])
    expected = torch.cat([grad.flatten() for grad in gradients]).norm()
    norm = model.optimizers(use_pl_optimizer=False).grad_norm
    torch.testing.assert_close(norm.double(), expected, rtol=ROUNDING[name], atol=0)
    assert expected > 2 * MAX_NORM


def test_the_clip_takes_no_pass_of_its_own() -> None:
    counts = {}
    for model in (Stock(ours), Windowed()):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fit(model, accumulate_grad_batches=K, gradient_clip_val=MAX_NORM)
        counts[type(model)] = sum(e.count for e in profile.key_averages() if e.key in CLIPS)
    assert counts[Stock] > 0
    assert counts[Windowed] == 0


CLIPS = ("aten::linalg_vector_norm", "aten::_foreach_norm", "aten::_foreach_mul_")


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_no_clip_leaves_the_optimizers_own_setting(value: float | None) -> None:
    model = Weighted(ours_clipping)
    fit(model, accumulate_grad_batches=K, gradient_clip_val=value)
    assert_trained(model.net, truth(cut(batches()), MAX_NORM))


@pytest.mark.parametrize("name", ["32-true", "16-mixed"])
def test_clipping_by_value_is_lightnings(name: str) -> None:
    expected, model = Stock(stock), Windowed()
    for each in (expected, model):
        settings = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
        fit(each, accumulate_grad_batches=K, **settings, **precision(name))
    assert_trained(model.net, expected.net)
    unclipped = Windowed()
    fit(unclipped, accumulate_grad_batches=K)
    assert difference(model.net, unclipped.net) > 0.01


def test_hooks_before_the_step_see_the_windows_mean() -> None:
    seen: list[list[Tensor]] = []

    class Looks(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append([param.grad.clone() for param in pl_module.net.parameters()])

    fit(Weighted(), batches()[:K], accumulate_grad_batches=K, callbacks=[Looks()])
    for grad, expected in zip(seen[0], mean_gradients(network().double(), batches()[:K]), strict=True):
        assert_close(grad, expected, "model")


@every_clip
def test_an_overflow_drops_its_window_and_the_scale_backs_off(clip: float | None) -> None:
    data = batches()
    data[1][1].fill_(torch.inf)
    model, settings = Weighted(), precision("16-mixed", 2.0**6)
    trainer = fit(model, data, accumulate_grad_batches=K, gradient_clip_val=clip, **settings)
    assert_trained(model.net, truth(cut(data)[1:], clip), ROUNDING["16-mixed"])
    assert settings["plugins"].scaler.get_scale() == 2.0**6  # halved, and doubled after two good steps
    assert float(everything(trainer.optimizers[0])["step 0"]) == 2


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@every_precision
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": K, "gradient_clip_val": MAX_NORM}
    expected = fit(Weighted(), max_epochs=2, **settings, **precision(name))
    fit(Weighted(), max_epochs=1, **settings, **precision(name)).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = fit(Weighted(), max_epochs=2, ckpt_path=tmp_path / "epoch.ckpt", **settings, **precision(name))
    states = everything(resumed.optimizers[0])
    for key, value in everything(expected.optimizers[0]).items():
        assert_same_bits(states[key], value, key)


def test_checkpoints_by_the_number_of_steps_fall_between_windows(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Weighted(), accumulate_grad_batches=K, enable_checkpointing=True, callbacks=[saves])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_a_checkpoint_within_a_window_has_its_sums(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    fit(Weighted(), accumulate_grad_batches=K, callbacks=[Saves()])
    net = network()
    saved = torch.load(tmp_path / "within.ckpt", weights_only=True)["optimizer_states"][0]
    optimizer = ours(net.parameters())
    optimizer.load_state_dict(saved)
    for batch in batches()[2:K]:
        loss_of(net, batch).backward()
        optimizer.accumulate(len(batch[1]))
    optimizer.step()
    assert_trained(net, truth(cut(batches())[:1]))


# ---- what is refused, and what is left alone -------------------------------------------------------------------------


def test_weights_for_some_micro_batches_only_are_refused() -> None:
    class Forgets(Windowed):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx != 1:
                self.micro_batch_weight = 1.0
            return loss_of(self.net, batch)

    with pytest.raises(ValueError, match="weights for some micro-batches of a window only"):
        fit(Forgets(), accumulate_grad_batches=K)


def test_a_stock_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a fused optimizer, got AdamW; return accumfused\.AdamW"):
        fit(Weighted(stock))


def test_several_processes_are_refused() -> None:
    strategy = SingleDeviceStrategy("cpu")
    strategy.world_size = 2  # what it says is what is asked
    with pytest.raises(RuntimeError, match="works in one process, got 2"):
        fit(Weighted(), strategy=strategy)


def test_the_bases_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write class Wrong\(FusedAccumulation, LightningModule\)"):

        class Wrong(lightning.LightningModule, FusedAccumulation):
            pass


def test_an_old_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "__version__", "1.9.5")
    with pytest.raises(ImportError, match=r"needs lightning 2\.0 or newer, got 1\.9\.5"):

        class Old(FusedAccumulation, lightning.LightningModule):
            pass


def test_manual_optimization_is_left_alone() -> None:
    class ByHand(Windowed):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(loss_of(self.net, batch))
            assert all(param.grad is not None for param in self.net.parameters())
            optimizer.step()
            optimizer.zero_grad()

    model = ByHand()
    fit(model)
    assert_trained(model.net, truth(cut(batches(), 1)))


def test_the_package_pytorch_lightning_will_do_too() -> None:
    package = pytest.importorskip("pytorch_lightning", minversion="2.4")

    class Model(FusedAccumulation, package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_optimizers(self) -> Any:
            return ours(self.net.parameters())

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.micro_batch_weight = len(batch[0])
            return loss_of(self.net, batch)

    model = Model()
    fit(model, package=package, accumulate_grad_batches=K, gradient_clip_val=MAX_NORM)
    assert_trained(model.net, truth(cut(batches()), MAX_NORM))


def test_a_gpu_that_is_not_used_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Lightning does not give the warning that these tests leave out."""
    monkeypatch.setattr(lightning.pytorch.accelerators.CUDAAccelerator, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="GPU available but not used"):
        fit(Windowed())
    fit(Windowed())
