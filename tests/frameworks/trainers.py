"""A Trainer that trains in a tenth of a second, and what two trainings must have in common."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import accumfused as af
from accumfused.integrations.huggingface import fuse_trainer

VOCABULARY, LENGTH, SAMPLES = 61, 12, 22  # 22 samples: micro-batches of 2, windows of 4, a remainder of 3
STEPS = 6  # updates of the two epochs
EPS = 0.1  # AdamW's; with a small one it hardly sees by how much a gradient was scaled


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Every training collects garbage, which takes longer than the training where all of transformers is alive."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def text() -> list[dict[str, Tensor]]:
    """Sequences of 3 to 12 tokens; what follows is padding, which the loss leaves out (-100)."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(SAMPLES):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (), generator=generator)
        samples.append({"input_ids": ids, "attention_mask": real.long(), "labels": ids.where(real, -100)})
    return samples


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def make(folder: Path, model: torch.nn.Module | None = None, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """A Trainer; options that TrainingArguments does not know are the Trainer's."""
    given = {name: options.pop(name) for name in ("optimizers", "compute_loss_func", "model_init") if name in options}
    data = options.pop("train_dataset", None) or text()
    defaults = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
        "learning_rate": 1e-2, "adam_epsilon": EPS, "max_grad_norm": 0.3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    if "model_init" not in given:
        given["model"] = language_model() if model is None else model
    return kind(args=arguments, train_dataset=data, eval_dataset=data[:4] if isinstance(data, list) else None, **given)


def history(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_same_training(ours: Trainer, stock: Trainer, steps: int = STEPS) -> None:
    assert ours.state.global_step == stock.state.global_step == steps
    assert len(history(ours)) == len(history(stock))
    for mine, theirs in zip(history(ours), history(stock), strict=True):
        exact = ("step", "epoch", "learning_rate")
        assert {name: mine[name] for name in exact} == {name: theirs[name] for name in exact}
        assert mine.keys() == theirs.keys()
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        if "grad_norm" in theirs and math.isfinite(theirs["grad_norm"]):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for (name, mine), theirs in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert_close(mine, theirs, "model", name)


def assert_same_result(one: Trainer, other: Trainer) -> None:
    """Bit for bit."""
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert_same_bits(mine, theirs[1], name)
    states = [trainer.optimizer.state_dict()["state"] for trainer in (one, other)]
    for index in states[0]:
        for name, value in states[0][index].items():
            assert_same_bits(value, states[1][index][name], f"{name} {index}")


def both(prepare: Callable[[], Trainer]) -> tuple[Trainer, Trainer]:
    """Ours and the stock one, trained."""
    ours, stock = fuse_trainer(prepare()), prepare()
    for trainer in (ours, stock):
        trainer.train()
    assert isinstance(ours.optimizer.optimizer, af.FusedOptimizer)
    return ours, stock
