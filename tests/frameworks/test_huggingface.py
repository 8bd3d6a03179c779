"""Hugging Face's Trainer with `fuse_trainer()` and without it: the same training."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import accumfused as af

transformers = pytest.importorskip("transformers", "5.0")
pytest.importorskip("accelerate")

from trainers import (  # noqa: E402
    EPS,
    STEPS,
    assert_same_result,
    assert_same_training,
    both,
    history,
    language_model,
    make,
    quick_collections,
    text,
)
from transformers import Trainer, TrainerCallback  # noqa: E402

from accumfused.integrations.huggingface import fuse_trainer  # noqa: E402

__all__ = ["quick_collections"]  # a fixture
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": EPS, "weight_decay": 0.1}


class MeanOfEachMicroBatch(torch.nn.Module):
    """A model that knows nothing of the window's count of tokens: Trainer divides its loss by the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = language_model()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(input_ids, attention_mask, labels=labels).loss}


def sum_over_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


# ---- the same numbers ----------------------------------------------------------------------------------------------

LOSSES: dict[str, dict[str, Any]] = {  # Trainer's ways to divide a window's loss
    "by tokens, in the model": {},
    "by tokens, in a loss function": {"compute_loss_func": sum_over_tokens},
    "by tokens, with smoothing": {"label_smoothing_factor": 0.1},
    "by micro-batches": {"model": MeanOfEachMicroBatch},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_training_equals_the_stock_run_remainder_and_padding_included(
    tmp_path: Path, backend: str, options: dict[str, Any]
) -> None:
    def prepare(fused: bool) -> Trainer:
        model = options.get("model", language_model)()
        optimizer = af.AdamW(model.parameters(), backend=backend, **ADAMW) if fused else None
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW)
        return make(tmp_path, **{**options, "model": model, "optimizers": (optimizer, None)})

    ours, stock = fuse_trainer(prepare(True)), prepare(False)
    ours.train()
    stock.train()
    assert_same_training(ours, stock)
    assert any(entry["grad_norm"] > 0.3 for entry in history(stock))  # it clipped


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 1, "max_steps": STEPS},
        {"bf16": True},
        {"max_grad_norm": 0.0},
        {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1},  # ends within an epoch; evaluates after each step
        {"optim": "sgd", "weight_decay": 0.1},
        {"optim": "adafactor", "lr_scheduler_type": "constant"},  # has no fused rule: its own step
        {"logging_steps": 2},
        {"gradient_accumulation_steps": 20, "max_steps": 2},  # longer than the epoch
    ],
    ids=str,
)
def test_an_optimizer_made_by_trainer_is_fused_with_its_groups(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, stock = both(lambda: make(tmp_path, **options))
    assert_same_training(ours, stock, steps=options.get("max_steps", STEPS))
    decays = [group["weight_decay"] for group in ours.optimizer.param_groups]
    assert decays == [group["weight_decay"] for group in stock.optimizer.param_groups]


def test_a_given_optimizer_and_its_scheduler_stay_the_same_objects(tmp_path: Path) -> None:
    def prepare() -> Trainer:
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return make(tmp_path, model, optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))

    ours, stock = prepare(), prepare()
    optimizer, scheduler = ours.optimizer, ours.lr_scheduler
    fuse_trainer(ours).train()
    stock.train()
    assert ours.optimizer.optimizer is optimizer
    assert type(optimizer) is af.AdamW
    assert ours.lr_scheduler is scheduler
    assert_same_training(ours, stock)


def test_a_model_that_trainer_makes_itself_and_a_second_training(tmp_path: Path) -> None:
    def prepare() -> Trainer:
        return make(tmp_path, model_init=language_model)

    ours, stock = both(prepare)
    assert_same_training(ours, stock)
    ours.train()  # makes a new model and a new optimizer
    assert_same_training(ours, stock)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_batch_norm_is_warned_of_once_where_windows_have_several_micro_batches(
    tmp_path: Path, micro_batches: int
) -> None:
    model = MeanOfEachMicroBatch()
    model.add_module("norm", torch.nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fuse_trainer(make(tmp_path, model, gradient_accumulation_steps=micro_batches)).train()
    found = [str(each.message) for each in seen if each.category is af.BatchNormWarning]
    assert ["norm (BatchNorm1d)" in text for text in found] == [True] * (micro_batches > 1)


class Endless(IterableDataset):
    """Eleven micro-batches without a length: Trainer leaves the last three to the next epoch's first window."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(text())


def test_what_is_left_of_data_without_a_length_goes_where_stock_leaves_it(tmp_path: Path) -> None:
    ours, stock = both(lambda: make(tmp_path, train_dataset=Endless(), max_steps=5))
    assert_same_training(ours, stock, steps=5)


# ---- scalers, overflows and micro-batches that do not arrive ---------------------------------------------------------


class Scaled(Trainer):
    """Accelerate makes a scaler on GPUs only, so this one brings its own."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # 2^127 overflows twice, and again when it has grown.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        self.accelerator.scaler = scaler
        self.accelerator.unscale_gradients = lambda: scaler.unscale_(self.optimizer.optimizer)


def test_a_scaler_skips_and_backs_off_as_in_the_stock_run(tmp_path: Path) -> None:
    # Not with Trainer's default, adamw_torch_fused: a scaler calls it for skipped steps too, so Accelerate counts them
    # as taken and the learning rate goes on.
    ours, stock = both(lambda: make(tmp_path, kind=Scaled, num_train_epochs=4, optim="adamw_torch"))
    assert_same_training(ours, stock, steps=12)
    skipped = [not math.isfinite(entry["grad_norm"]) for entry in history(ours)]
    assert skipped == [not math.isfinite(entry["grad_norm"]) for entry in history(stock)]
    assert 3 <= sum(skipped) <= 8
    assert ours.accelerator.scaler.get_scale() == stock.accelerator.scaler.get_scale()


class Fails(Trainer):
    """One micro-batch runs out of memory; who survives that goes on with the next."""

    fails_at, survives = 5, False
    count = -1

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        if self.count != self.fails_at:
            return super().training_step(model, *args, **kwargs)
        if not self.survives:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(())


def test_a_training_that_starts_again_after_running_out_of_memory_forgets_the_open_window(tmp_path: Path) -> None:
    def prepare() -> Trainer:
        return make(tmp_path, kind=Fails, auto_find_batch_size=True, max_steps=STEPS)

    ours, stock = both(prepare)
    assert ours.count > 2 * STEPS
    assert_same_training(ours, stock)


@pytest.mark.parametrize("fails_at", [5, 7, 10], ids=["within a window", "a window's last", "the epoch's last"])
def test_a_micro_batch_that_is_left_out(tmp_path: Path, fails_at: int) -> None:
    kind = type("Survives", (Fails,), {"survives": True, "fails_at": fails_at})
    assert_same_training(*both(lambda: make(tmp_path, kind=kind)))


def test_a_gradient_that_is_not_finite_is_skipped_and_logged(tmp_path: Path) -> None:
    def poison(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        calls.append(1)
        return sum_over_tokens(outputs, labels, num_items_in_batch) * (math.nan if len(calls) == 2 else 1.0)

    calls: list[int] = []
    trainer = fuse_trainer(make(tmp_path, compute_loss_func=poison))
    trainer.train()
    assert [math.isnan(entry["grad_norm"]) for entry in history(trainer)] == [True] + [False] * (STEPS - 1)
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    assert int(trainer.optimizer.optimizer.skipped_steps) == 1


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Stop(TrainerCallback):
    """Ends the training and asks for a checkpoint, after so many micro-batches that are not a window's last."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        control.should_training_stop = control.should_save = self.left == 0


@pytest.mark.parametrize("stop", [None, 8], ids=["saved after a step", "stopped within a window"])
def test_resuming_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path, stop: int | None) -> None:
    whole = fuse_trainer(make(tmp_path / "whole"))
    whole.train()
    first = fuse_trainer(make(tmp_path, save_strategy="no" if stop else "steps", save_steps=2))
    if stop:
        first.add_callback(Stop(stop))  # 3 a window: 8 is in the third
    first.train()
    resumed = fuse_trainer(make(tmp_path))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == STEPS
    assert_same_result(resumed, whole)
    assert history(resumed)[-1] == history(whole)[-1]
    first.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # with what is left of its first training
    assert_same_result(first, whole)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_may_change_sides(tmp_path: Path, ours_first: bool) -> None:
    first, second = make(tmp_path, save_strategy="steps", save_steps=2), make(tmp_path)
    fuse_trainer(first if ours_first else second)
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_training(second, first)


# ---- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [0.3, 0.0])
def test_no_pass_is_left_for_the_norm_the_clipping_and_autograds_sum(tmp_path: Path, max_grad_norm: float) -> None:
    counts, steps = [], 2
    for prepare in (fuse_trainer, lambda trainer: trainer):
        trainer = prepare(make(tmp_path, max_grad_norm=max_grad_norm, max_steps=steps))
        with torch.profiler.profile() as profile:
            trainer.train()
        counts.append(Counter(event.name for event in profile.events()))
    ours, stock = counts
    if max_grad_norm == 0.0 and not stock["aten::_foreach_norm"]:
        pytest.skip(f"Trainer {transformers.__version__} takes no norm without clipping")
    parameters = len(list(language_model().parameters()))
    removed = {
        "aten::_foreach_norm": steps,
        "aten::linalg_vector_norm": steps * (parameters + 1),
        "aten::_foreach_mul_": steps,
        "aten::_fused_adamw_": steps * 2,  # groups
        "aten::add_": steps * 3 * parameters,  # autograd's sums
    }
    for name, least in removed.items():
        assert stock[name] - ours[name] >= least, name
    assert not any(ours[name] for name in list(removed)[:4])
    assert ours["aten::item"] < stock["aten::item"]  # where a GPU would be waited for


def test_importing_accumfused_imports_neither_transformers_nor_accelerate() -> None:
    code = "import sys, accumfused, accumfused.integrations; print({'transformers', 'accelerate'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
