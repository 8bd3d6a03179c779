"""The audit of frameworks' own loops: what they do with unequal micro-batches and remainders."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("model_of", "verdict"), [(language_model, "is that of"), (MeanOfEachMicroBatch, "is NOT that of")]
)
def test_a_fused_trainer_watches_its_first_steps_and_logs_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_of: Any, verdict: str
) -> None:
    caplog.set_level(logging.INFO, "accumfused")
    trainer = fuse_trainer(make(tmp_path, model_of=lambda: model_of().eval()), audit=True)
    trainer.train()
    (record,) = caplog.records
    assert record.message.startswith(f"The update {verdict} the large batch.")
    assert "\n4 " in record.message
    assert "\n5 " not in record.message
    assert (record.levelno == logging.WARNING) == ("NOT" in verdict)
    assert attached(trainer.model, trainer.optimizer.optimizer, *trainer.model.parameters())[-1] == 0


def test_an_exception_in_an_audited_training_passes_and_leaves_no_hook(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise KeyError("data")
            return super().training_step(*args, **kwargs)

    caplog.set_level(logging.INFO, "accumfused")
    trainer = fuse_trainer(make(tmp_path, kind=Broken), audit=True)
    with pytest.raises(KeyError, match="data"):
        trainer.train()
    assert sum(attached(trainer.model, trainer.optimizer.optimizer, *trainer.model.parameters())) == 0
    assert caplog.records[-1].message.startswith("The update is that of the large batch.")


class Logging(Stock):
    """Logs in its training step, as most modules do."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggingAndWeighted(Weighted, Logging):
    """Both."""


@pytest.mark.parametrize(
    ("kind", "causes"), [(Logging, ["mean_of_means", "remainder_under_weighted"]), (LoggingAndWeighted, [])]
)
def test_lightning_weighs_micro_batches_alike_and_the_mixin_samples(
    caplog: pytest.LogCaptureFixture, kind: Any, causes: list[str]
) -> None:
    caplog.set_level(logging.INFO, "accumfused")
    module, plain = kind(), kind()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*`self.log\\(\\)`.*")  # of the probe's copy, which is in no training
        trainer = fit(module, audit=True, max_epochs=2, accumulate_grad_batches=K)
    (record,) = (each for each in caplog.records if each.name == "accumfused")
    assert [cause for cause in CAUSES if f"\n{cause} (" in record.message] == causes
    assert record.message.startswith(f"The update is {'NOT ' if causes else ''}that of the large batch.")
    assert (record.levelno == logging.WARNING) == bool(causes)
    assert "net.0.weight" in record.message
    assert "not looked at" not in record.message  # the probe's copy has met no warning
    assert "\n4 " in record.message
    assert "\n5 " not in record.message
    fit(plain, max_epochs=2, accumulate_grad_batches=K)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert "training_step" not in vars(module)
    assert sum(attached(module, *trainer.optimizers, *module.parameters())) == 0


def test_an_exception_in_an_audited_lightning_training_passes_and_leaves_no_hook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Weighted):
        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            if batch_idx == K:
                raise KeyError("data")

    caplog.set_level(logging.INFO, "accumfused")
    module = Broken()
    module.training_step = own = module.training_step  # as a compiled module has one
    with pytest.raises(KeyError, match="data"):
        fit(module, audit=True, accumulate_grad_batches=K)
    assert vars(module)["training_step"] is own
    assert sum(attached(module, *module.parameters())) == 0
    assert caplog.records[-1].message.startswith("The update is that of the large batch.")


def test_manual_optimization_is_not_audited() -> None:
    module = Stock()
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match=r"put `with accumfused\.audit\.watch\(model, optimizer\)` around your loop"):
        fit(module, audit=True)
