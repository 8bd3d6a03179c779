"""The audit of frameworks' own loops: what they do with unequal micro-batches and remainders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from inside import attached
from lightning_loops import Stock, Weighted, fit, lightning
from regression import K
from trainers import MeanOfEachMicroBatch, fuse_trainer, language_model, make, sum_over_tokens, transformers

import accumfused as af


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


class Watching(lightning.Callback):
    """Watches a training from its beginning to its end."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.block = af.audit.watch(module.net, module.optimizers().optimizer, gradient_accumulation_steps=K)
        self.report = self.block.__enter__()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.block.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("module", "names"),
    [(Stock, ["mean_of_means", "remainder_under_weighted"]), (Weighted, [])],
)
def test_lightning_weighs_micro_batches_alike_and_the_mixin_samples(module: Any, names: list[str]) -> None:
    watching = Watching()
    fit(module(), callbacks=[watching], accumulate_grad_batches=K)
    assert watching.report.names == names
