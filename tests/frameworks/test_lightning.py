"""An accumfused optimizer in Lightning's own loop, where `configure_optimizers` is the one line that changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import accumfused as af

pytest.importorskip("lightning", minversion="2.4")
from compare import assert_same_bits, everything
from lightning_loops import (
    LIGHTNING_WARNINGS,
    MAX_NORM,
    OPTIONS,
    ROUNDING,
    Batch,
    K,
    Stock,
    assert_trained,
    batches,
    cut,
    difference,
    fit,
    network,
    ours,
    ours_clipping,
    parameters,
    precision,
    stock,
    truth,
)

pytestmark = [pytest.mark.filterwarnings(text) for text in LIGHTNING_WARNINGS]

every_precision = pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])


def fused(params: Any) -> torch.optim.Optimizer:
    return af.fuse(stock(params))


@every_precision
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("make", [ours, fused])
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_the_run_is_the_stock_one(name: str, k: int, make: Any, clip: float | None) -> None:
    runs = []
    for optimizer in (stock, make):
        model = Stock(optimizer)
        # Two epochs of 8: an epoch's last window is shorter. The loss scale doubles until float16 overflows.
        trainer = fit(model, max_epochs=2, accumulate_grad_batches=k, gradient_clip_val=clip, **precision(name))
        runs.append((model.net, trainer.global_step))
    (expected, updates), (net, our_updates) = runs
    assert_trained(net, expected)
    assert our_updates == updates == (16 if k == 1 else 6)
    assert difference(net, network()) > 0.1


@pytest.mark.parametrize("make", [ours, fused])
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_16_bit_parameters_train_closer_to_float64_than_the_stock_run(make: Any, clip: float | None) -> None:
    """Lightning's bf16-true: the masters keep what the parameters round away."""
    exact = truth(cut(batches(), 1), clip)
    errors = []
    for optimizer in (stock, make):
        model = Stock(optimizer)
        fit(model, gradient_clip_val=clip, **precision("bf16-true"))
        found = parameters(model.net)
        assert {param.dtype for param in found} == {torch.bfloat16}
        errors.append(max(float((p.double() - q).abs().max()) for p, q in zip(found, exact, strict=True)))
    assert errors[1] < ROUNDING["bf16-true"]
    assert errors[1] < errors[0] / 2


@every_precision
def test_max_grad_norm_is_the_trainers_clip(name: str) -> None:
    expected, model = Stock(stock), Stock(ours_clipping)
    fit(expected, gradient_clip_val=MAX_NORM, accumulate_grad_batches=K, **precision(name))
    fit(model, accumulate_grad_batches=K, **precision(name))
    assert_trained(model.net, expected.net)


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_where_a_stock_fused_optimizer_cannot_be_clipped(name: str) -> None:
    def stock_fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **OPTIONS)

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Stock(stock_fused), gradient_clip_val=MAX_NORM, **precision(name))
    expected = Stock(stock)
    fit(expected, gradient_clip_val=MAX_NORM, **precision(name))
    for optimizer in (ours, lambda params: af.fuse(stock_fused(params))):
        model = Stock(optimizer)
        fit(model, gradient_clip_val=MAX_NORM, **precision(name))
        assert_trained(model.net, expected.net)


@pytest.mark.parametrize("make", [ours, ours_clipping])
def test_an_overflow_leaves_everything_as_it_was_and_the_scale_backs_off(make: Any) -> None:
    data = batches()
    data[1][1].fill_(torch.inf)
    before, after = Stock(make), Stock(make)
    fit(before, data[:1], **precision("16-mixed"))
    settings = precision("16-mixed")
    trainer = fit(after, data[:2], **settings)
    states, kept = everything(trainer.optimizers[0]), parameters(before.net)
    assert float(states["step 0"]) == 1
    for param, expected in zip(parameters(after.net), kept, strict=True):
        assert_same_bits(param, expected)
    assert settings["plugins"].scaler.get_scale() == 2.0**9
    model = Stock(make)
    fit(model, data, gradient_clip_val=None if make is ours_clipping else MAX_NORM, **precision("16-mixed", 2.0**8))
    del data[1]
    assert_trained(model.net, truth(cut(data, 1), MAX_NORM), ROUNDING["16-mixed"])


# ---- schedulers ----------------------------------------------------------------------------------------------------


class Scheduled(Stock):
    """Notes the learning rate that each micro-batch sees."""

    def __init__(self, make_optimizer: Any, interval: str) -> None:
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


@pytest.mark.parametrize("make", [stock, ours, fused])
@pytest.mark.parametrize(
    ("interval", "halvings"),
    [("step", [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5]), ("epoch", [0] * 8 + [1] * 8)],
)
def test_a_scheduler_steps_with_the_updates_or_the_epochs(make: Any, interval: str, halvings: list[int]) -> None:
    model = Scheduled(make, interval)
    fit(model, accumulate_grad_batches=K, max_epochs=2)
    assert model.rates == [OPTIONS["lr"] * 0.5**n for n in halvings]
    expected = Scheduled(stock, interval)
    fit(expected, accumulate_grad_batches=K, max_epochs=2)
    assert_trained(model.net, expected.net)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@every_precision
@pytest.mark.parametrize("make", [ours, ours_clipping, fused])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, name: str, make: Any) -> None:
    whole, first, second = (Scheduled(make, "step") for _ in range(3))
    settings: dict[str, Any] = {"accumulate_grad_batches": K}
    expected = fit(whole, max_epochs=2, **settings, **precision(name))
    fit(first, max_epochs=1, **settings, **precision(name)).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = fit(second, max_epochs=2, ckpt_path=tmp_path / "epoch.ckpt", **settings, **precision(name))
    assert first.rates + second.rates == whole.rates
    assert resumed.global_step == expected.global_step == 6
    states = everything(resumed.optimizers[0])
    for key, value in everything(expected.optimizers[0]).items():
        assert_same_bits(states[key], value, key)


@pytest.mark.parametrize(("saves", "loads"), [(stock, ours), (ours, stock)])
def test_a_checkpoint_of_the_stock_optimizer_and_the_other_way_round(tmp_path: Path, saves: Any, loads: Any) -> None:
    expected, model = Stock(saves), Stock(loads)
    fit(expected, max_epochs=2)
    fit(Stock(saves)).save_checkpoint(tmp_path / "epoch.ckpt")
    fit(model, max_epochs=2, ckpt_path=tmp_path / "epoch.ckpt")
    assert_trained(model.net, expected.net)


def test_nothing_of_lightning_is_imported_with_the_package() -> None:
    code = (
        "import sys, accumfused, accumfused.integrations.lightning as integration; "
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules); integration.FusedAccumulation"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
