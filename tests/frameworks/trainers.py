"""A Trainer that trains in a tenth of a second: model, losses and data; and what two trainings must have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor
from torch.utils.data import IterableDataset

import accumfused as af

transformers = pytest.importorskip("transformers", "5.0")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from accumfused.integrations.huggingface import fuse_trainer  # noqa: E402

VOCABULARY, LENGTH, SAMPLES = 61, 12, 22  # 22 samples: micro-batches of 2, windows of 4, a remainder of 3
STEPS = 6  # updates of the two epochs
EPS = 0.1  # AdamW's; with a small one it hardly sees by how much a gradient was scaled
OF_TRAINER = ("optimizers", "compute_loss_func", "model_init")  # the others are of TrainingArguments
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
    "learning_rate": 1e-2, "adam_epsilon": EPS, "max_grad_norm": 0.3, "logging_steps": 1,
    "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
}  # fmt: skip


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


class Endless(IterableDataset):
    """Eleven micro-batches without a length: Trainer leaves the last three to the next epoch's first window."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(text())


def make(
    folder: Path,
    model_of: Callable[[], torch.nn.Module] = language_model,
    kind: type[Trainer] = Trainer,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer. Args: optimizer_of: of these parameters, in place of Trainer's own."""
    given = {name: options.pop(name) for name in OF_TRAINER if name in options}
    data = options.pop("train_dataset", None) or text()
    if "model_init" not in given:
        given["model"] = model_of()
    if optimizer_of is not None:
        given["optimizers"] = (optimizer_of(given["model"].parameters()), None)
    arguments = TrainingArguments(output_dir=str(folder), **{**DEFAULTS, **options})
    return kind(args=arguments, train_dataset=data, eval_dataset=data[:4] if isinstance(data, list) else None, **given)


def history(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def finite(norm: float) -> float:
    """The norm, or inf: which of a window's gradients overflows first is no matter."""
    return norm if math.isfinite(norm) else math.inf


def assert_same_training(ours: Trainer, stock: Trainer, steps: int = STEPS) -> None:
    assert ours.state.global_step == stock.state.global_step == steps
    for mine, theirs in zip(history(ours), history(stock), strict=True):
        exact = ("step", "epoch", "learning_rate")
        assert {name: mine[name] for name in exact} == {name: theirs[name] for name in exact}
        assert mine.keys() == theirs.keys()
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        if "grad_norm" in theirs:
            assert [finite(mine["grad_norm"])] == pytest.approx([finite(theirs["grad_norm"])], rel=1e-5)
    for (name, mine), theirs in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert_close(mine, theirs, "model", name)


def forget_processes() -> None:
    """All Accelerators of a process share what they have found of others."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  # not the package's


def trained(trainer: Trainer) -> Trainer:
    trainer.train()
    return trainer


def both(prepare: Callable[[], Trainer], **options: Any) -> tuple[Trainer, Trainer]:
    """Ours and the stock one, trained. Args: options: of fuse_trainer."""
    ours, stock = trained(fuse_trainer(prepare(), **options)), trained(prepare())
    assert isinstance(ours.optimizer.optimizer, af.FusedOptimizer)
    return ours, stock
