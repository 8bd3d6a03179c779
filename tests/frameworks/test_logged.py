"""What frameworks log of an optimizer, at their own steps: metrics of groups or tensors, and the noise scale."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits, everything
from device import NoReads
from lightning_loops import LoggingAndWeighted, Stock, fit, lightning
from lightning_loops import fuse_trainer as fuse_lightning
from regression import MAX_NORM, Batch, K, fused, stock
from torch import nn
from trainers import STEPS, Trainer, fuse_trainer, history, make, trained

import accumfused as af
from accumfused.integrations.logged import readings

# ---- names and numbers -----------------------------------------------------------------------------------------------


def stepped(optimizer: Any) -> Any:
    """After a window of three micro-batches, of all parameters but those that are frozen."""
    for scale in (1.0, 2.0, 4.0):
        for index, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            param.grad = torch.full_like(param, scale * (index + 1)) if param.requires_grad else None
        optimizer.accumulate(1.0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize("noise_scale", [False, True])
def test_names_are_the_models_every_number_is_told_once_and_one_copy_brings_them(
    monkeypatch: pytest.MonkeyPatch, has_names: bool, noise_scale: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    given = list(model.named_parameters() if has_names else model.parameters())
    groups = [{"params": given[3:]}, {"params": given[:3]}]  # in another order than the model's
    optimizer = stepped(af.AdamW(groups, lr=0.1, metrics=True, noise_scale=noise_scale))
    copies, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self) or tolist(self))
    found = readings(optimizer, model, "tensors")
    (one,) = copies
    assert len(found) == one.numel()
    own = optimizer.metrics().as_dict()
    noise = {"noise_scale": float(optimizer.noise_scale().noise_scale)} if noise_scale else {}
    assert sorted(map(str, found.values())) == sorted(map(str, [*own.values(), *noise.values()]))
    assert found["grad_norm/all"] == own["grad_norm"]
    assert found["update_ratio/group1"] == own["group1/update_ratio"]
    assert found["grad_norm/0.weight"] == pytest.approx(7 / 3 * 4 * 6**0.5)  # the fourth of the optimizer
    assert found["grad_norm/0.bias"] == 0.0
    assert found["clip"] == own["clip"]
    assert found.get("noise_scale") == noise.get("noise_scale")
    groups_only = readings(optimizer, model, None)
    assert groups_only == {name: value for name, value in found.items() if "." not in name}


def test_what_is_not_measured_is_left_out_and_costs_no_read() -> None:
    model = nn.Linear(2, 3)
    with NoReads():
        for optimizer in (af.SGD(model.parameters(), lr=0.1), af.SGD(model.parameters(), lr=0.1, metrics=2)):
            assert readings(optimizer, model, "tensors") == {}
        assert readings(af.SGD(model.parameters(), lr=0.1, noise_scale=True), model, None) == {}


# ---- transformers ----------------------------------------------------------------------------------------------------


def ours_with(**settings: Any) -> Any:
    return lambda params: af.AdamW(params, lr=1e-2, **settings)


def test_a_trainer_measures_the_steps_that_it_logs_and_trains_the_same(tmp_path: Path) -> None:
    options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "logging_first_step": True}
    ours = trained(fuse_trainer(make(tmp_path, **options), metrics="tensors", noise_scale=True))
    plain = trained(fuse_trainer(make(tmp_path, **options)))
    assert ours.optimizer.optimizer.settings["metrics"] == 2
    for entry, other in zip(history(ours), history(plain), strict=True):
        assert {name: entry[name] for name in other} == other
        assert entry["grad_norm/all"] == pytest.approx(entry["grad_norm"], rel=1e-6)
        assert entry["update_norm/lm_head.weight"] > 0
        assert entry["noise_scale"] > 0
    assert [entry["step"] for entry in history(ours)] == [1, *range(2, STEPS + 1, 2)]
    assert not any("clip" in entry for entry in ours.state.log_history if "loss" not in entry)
    assert_all_same_bits(everything(ours.optimizer.optimizer), everything(plain.optimizer.optimizer))


def test_an_optimizer_that_measures_has_its_groups_logged(tmp_path: Path) -> None:
    measuring = ours_with(metrics=True, noise_scale=True)
    ours = trained(fuse_trainer(make(tmp_path, optimizer_of=measuring, logging_strategy="epoch")))
    for entry in history(ours):
        assert math.isfinite(entry["param_norm/group0"])
        assert not any("." in name for name in entry)


def test_steps_are_all_measured_where_those_that_are_logged_are_not_known(tmp_path: Path) -> None:
    trainer = trained(fuse_trainer(make(tmp_path, logging_strategy="epoch", max_steps=1), metrics="groups"))
    assert trainer.optimizer.optimizer.settings["metrics"] is True


def of_steps(entry: dict[str, float]) -> dict[str, float]:
    """The entry without means that begin anew with the process: of clipped steps, and Trainer's own of losses."""
    return {name: value for name, value in entry.items() if name not in ("clip_share", "loss")}


def test_a_resumed_trainer_logs_the_same(tmp_path: Path) -> None:
    """It measures the steps that it logs, and goes on from the means of the noise scale."""
    options: dict[str, Any] = {"logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    measured: dict[str, Any] = {"metrics": "groups", "noise_scale": True}
    whole = trained(fuse_trainer(make(tmp_path, **options), **measured))
    resumed = fuse_trainer(make(tmp_path, **options), **measured)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for entry, other in zip(history(resumed)[-2:], history(whole)[-2:], strict=True):
        assert of_steps(entry) == of_steps(other)
        assert entry["grad_norm/all"] == pytest.approx(entry["grad_norm"], rel=1e-6)
    assert resumed.optimizer.optimizer.noise_scale() == whole.optimizer.optimizer.noise_scale()


# ---- Lightning -------------------------------------------------------------------------------------------------------


class Seen(lightning.pytorch.loggers.Logger):
    """Keeps what it is given."""

    name, version = "seen", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))


@pytest.mark.parametrize("k", [1, K])
def test_lightning_logs_beside_its_own_numbers_and_trains_the_same(k: int) -> None:
    module, plain, seen = LoggingAndWeighted(stock), LoggingAndWeighted(fused), Seen()
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": k, "log_every_n_steps": 2}
    silent = pytest.warns(af.AccumulationWarning, match="measures nothing") if k == 1 else contextlib.nullcontext()
    with silent:
        trainer = fit(module, metrics="tensors", noise_scale=True, logger=seen, **options)
    fit(plain, **options)
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is af.AdamW
    assert isinstance(module.optimizers(), af.AdamW)
    assert_all_same_bits(module.state_dict(), plain.state_dict())
    assert optimizer.settings["metrics"] == 2
    ours = [(step, row) for step, row in seen.rows if "grad_norm/all" in row]
    assert [step for step, _ in ours] == [step for step, row in seen.rows if "loss" in row]
    assert [step for step, _ in ours] == list(range(1, trainer.global_step, 2))
    for _, row in ours:
        assert row["update_norm/net.0.weight"] > 0
        assert ("noise_scale" in row) == (k > 1)
    last = optimizer.metrics().as_dict()
    assert ours[-1][1]["grad_norm/all"] == last["grad_norm"]


def test_a_resumed_lightning_trainer_logs_the_same(tmp_path: Path) -> None:
    whole, resumed = Seen(), Seen()
    options: dict[str, Any] = {"accumulate_grad_batches": K, "log_every_n_steps": 2}
    measured: dict[str, Any] = {"metrics": "groups", "noise_scale": True}
    first = fit(LoggingAndWeighted(stock), max_epochs=1, **options, **measured)
    assert first.global_step % 2 == 1
    first.save_checkpoint(tmp_path / "epoch.ckpt")
    for seen, path in ((whole, None), (resumed, tmp_path / "epoch.ckpt")):
        fit(LoggingAndWeighted(stock), max_epochs=3, ckpt_path=path, logger=seen, **options, **measured)
    found, expected = ([(step, of_steps(row)) for step, row in seen.rows if "clip" in row] for seen in (resumed, whole))
    assert found
    assert found == expected[-len(found) :]


class Adversaries(lightning.LightningModule):
    """Manual optimization with two optimizers; the second is ours, and has names and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1)

    def configure_optimizers(self) -> Any:
        second = af.SGD(self.second.named_parameters(), lr=0.1, metrics=True)
        return [torch.optim.AdamW(self.first.parameters(), lr=0.1), second], []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch[0])).square().mean())
            optimizer.step()


def test_several_optimizers_are_told_apart() -> None:
    module, seen = Adversaries(), Seen()
    fit(module, metrics="tensors", logger=seen, log_every_n_steps=4)
    assert [step for step, _ in seen.rows] == [3, 7]
    for _, row in seen.rows:
        assert row["optimizer0/grad_norm/first.weight"] > 0
        assert row["optimizer1/grad_norm/weight"] > 0  # as its own optimizer calls it


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_fused_trainer_may_be_pickled_and_not_be_fused_again(name: str) -> None:
    package = pytest.importorskip(name, minversion="2.4")
    trainer = fuse_lightning(type("Own", (package.Trainer,), {})(logger=False, enable_checkpointing=False))
    assert isinstance(trainer.callbacks[0], package.Callback)
    for copied in (pickle.loads(pickle.dumps(trainer.callbacks[0])), copy.deepcopy(trainer.callbacks[0])):
        assert type(copied) is type(trainer.callbacks[0])
    with pytest.raises(RuntimeError, match="once is enough"):
        fuse_lightning(trainer)


def test_optimizers_are_fused_before_a_checkpoint_comes_to_them(tmp_path: Path) -> None:
    """Those of bf16 parameters have masters there, which torch's optimizer would round."""
    whole, first, second = (Stock(stock) for _ in range(3))
    options: dict[str, Any] = {"precision": "bf16-true", "noise_scale": False, "gradient_clip_val": MAX_NORM}
    expected = fit(whole, max_epochs=2, **options)
    fit(first, max_epochs=1, **options).save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = fit(second, max_epochs=2, ckpt_path=tmp_path / "epoch.ckpt", **options)
    assert_all_same_bits(everything(resumed.optimizers[0]), everything(expected.optimizers[0]))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "asked", "message"),
    [
        ({}, {"metrics": "groups"}, "metrics is asked for, .* make it with metrics=True"),
        ({"metrics": True}, {"noise_scale": True}, "noise_scale is asked for, .* make it with noise_scale=True"),
        ({"metrics": True}, {"metrics": "all"}, 'metrics must be "groups", "tensors" or None, got \'all\''),
    ],
)
def test_what_an_optimizer_does_not_measure_is_refused(
    tmp_path: Path, own: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fuse_trainer(make(tmp_path, optimizer_of=ours_with(**own)), **asked)
    with pytest.raises(ValueError, match=message):
        fit(Stock(ours_with(**own)), **asked)


def test_another_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a Trainer of Lightning, got Trainer"):
        fuse_lightning(make(tmp_path, kind=Trainer))
