"""The audit of frameworks' own loops: what they do with unequal micro-batches and remainders."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import attached
from lightning_loops import Stock, Weighted, fit
from regression import Batch, K
from torch import Tensor
from trainers import MeanOfEachMicroBatch, fuse_trainer, language_model, make, sum_over_tokens, transformers

import accumfused as af
from accumfused.auditing.causes import CAUSES


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("names", "options"),
    [
        ([], {}),
        ([], {"bf16": True}),
        ([], {"compute_loss_func": sum_over_tokens}),
        (["mean_of_means"], {"model_of": MeanOfEachMicroBatch}),
    ],
)
def test_a_trainer_is_sound_if_the_model_takes_the_count_of_tokens(
    tmp_path: Path, is_fused: bool, names: list[str], options: Any
) -> None:
    trainer = make(tmp_path, **options)
    if is_fused:
        fuse_trainer(trainer)
    optimizer = trainer.create_optimizer()
    with af.audit.watch(trainer.model, optimizer, gradient_accumulation_steps=4) as report:
        trainer.train()
    assert report.names == names
    assert [step.micro_batches for step in report.steps] == [4, 4, 3] * 2


# ---- the first steps of a training -----------------------------------------------------------------------------------


class Logging(Stock):
    """Logs in its training step, as most modules do."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggingAndWeighted(Weighted, Logging):
    """Both."""


class BrokenTrainer(transformers.Trainer):  # type: ignore[misc]
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1:
            raise KeyError("data")
        return super().training_step(*args, **kwargs)


class Broken(Weighted):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == K:
            raise KeyError("data")


def trainer_trains(folder: Path, hooked: list[Any], model_of: Any = language_model, **options: Any) -> None:
    trainer = fuse_trainer(make(folder, model_of=lambda: model_of().eval(), **options), audit=True)
    hooked += [trainer.create_optimizer(), trainer.model, *trainer.model.parameters()]
    trainer.train()


def lightning_trains(folder: Path, hooked: list[Any], kind: Any) -> None:
    module, plain = kind(), kind()
    if kind is Broken:
        module.training_step = module.training_step  # as a compiled module has one
    own = vars(module).get("training_step")
    hooked += [module, *module.parameters()]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*`self.log\\(\\)`.*")  # of the probe's copy, which is in no training
            hooked += fit(module, audit=True, max_epochs=2, accumulate_grad_batches=K).optimizers
    finally:
        assert vars(module).get("training_step") is own
    fit(plain, max_epochs=2, accumulate_grad_batches=K)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))


@pytest.mark.parametrize(("train", "given", "causes"), [
    (trainer_trains, {}, []), (trainer_trains, {"model_of": MeanOfEachMicroBatch}, ["mean_of_means"]),
    (lightning_trains, {"kind": LoggingAndWeighted}, []),
    (lightning_trains, {"kind": Logging}, ["mean_of_means", "remainder_under_weighted"]),
    (trainer_trains, {"kind": BrokenTrainer}, None), (lightning_trains, {"kind": Broken}, None),
])  # fmt: skip
def test_the_first_steps_are_watched_and_reported_also_where_an_exception_ends_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Any, given: Any, causes: list[str] | None
) -> None:
    caplog.set_level(logging.INFO, "accumfused")
    hooked = list[Any]()
    with pytest.raises(KeyError, match="data") if causes is None else contextlib.nullcontext():
        train(tmp_path, hooked, **given)
    assert sum(attached(*hooked)) == 0
    (record,) = (each for each in caplog.records if each.name == "accumfused")
    assert record.message.startswith(f"The update is {'NOT ' if causes else ''}that of the large batch.")
    assert (record.levelno == logging.WARNING) == bool(causes)
    assert [cause for cause in CAUSES if f"\n{cause} (" in record.message] == (causes or [])
    assert "not looked at" not in record.message  # the probe's copy has met no warning
    assert ("\n4 " in record.message) == (causes is not None)
    assert "\n5 " not in record.message
    assert train is trainer_trains or "net.0.weight" in record.message


def test_manual_optimization_is_not_audited() -> None:
    module = Stock()
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match=r"put `with accumfused\.audit\.watch\(model, optimizer\)` around your loop"):
        fit(module, audit=True)
