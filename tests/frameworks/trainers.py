"""Trainers that train a language model or the small regression in a tenth of a second; and Accelerate's loops."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from regression import MAX_NORM, Case, Trained, fused, loss_of, network, stock
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import accumfused as af

transformers = pytest.importorskip("transformers", "5.0")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import GradientAccumulationPlugin  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from accumfused.integrations.huggingface import fuse_trainer  # noqa: E402

VOCABULARY, LENGTH, SAMPLES = 61, 12, 22  # 22 samples: micro-batches of 2, windows of 4, a remainder of 3
STEPS = 6  # updates of the two epochs
EPS = 0.1  # AdamW's; with a small one it hardly sees by how much a gradient was scaled
OF_TRAINER = ("optimizers", "compute_loss_func", "model_init", "data_collator")  # the others are of TrainingArguments
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
    GradientState._reset_state()  # noqa: SLF001  # not the package's


def trained(trainer: Trainer) -> Trainer:
    trainer.train()
    return trainer


def both(prepare: Callable[[], Trainer], **options: Any) -> tuple[Trainer, Trainer]:
    """Ours and the stock one, trained. Args: options: of fuse_trainer."""
    ours, stock = trained(fuse_trainer(prepare(), **options)), trained(prepare())
    assert isinstance(ours.optimizer.optimizer, af.FusedOptimizer)
    return ours, stock


# ---- the small regression --------------------------------------------------------------------------------------------


def bring_scaler(accelerator: Any, optimizer: Callable[[], Any]) -> None:
    """As Accelerate makes one on a GPU. 2^127 overflows at first, and again when it has grown."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(optimizer())


class Regression(nn.Module):
    """A model that returns its loss, which Trainer divides by the micro-batches of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.net(x).to(x.dtype)
        return {"out": out} if labels is None else {"loss": nn.functional.mse_loss(out, labels)}


def mean_over_samples(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs["out"], labels, reduction="sum") / num_items_in_batch


class InOrder(Trainer):
    """Takes batches in the order of the data."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Scaled(InOrder):
    """Not with Trainer's default, adamw_torch_fused: a scaler calls it for skipped steps too, so Accelerate counts them
    as taken and the learning rate goes on.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        bring_scaler(self.accelerator, lambda: self.optimizer.optimizer)


def by_trainer(case: Case) -> Trained:
    """The mean over samples, if it is one epoch; `fused`: Trainer's argument is a stock optimizer.

    Optimizer and scheduler stay the same objects.
    """
    length = {"max_steps": 11} if case.by_epoch is False else {"num_train_epochs": 4 if case.by_epoch else 1}
    weighted = {"compute_loss_func": mean_over_samples}
    trainer = make(
        Path(tempfile.gettempdir()), Regression, Scaled if case.precision == "16-mixed" else InOrder,
        stock if case.optimizer_of is fused else case.optimizer_of, data_collator=lambda rows: rows[0],
        train_dataset=[{"x": x, "labels": y} for x, y in case.data], per_device_train_batch_size=1,
        gradient_accumulation_steps=case.k, max_grad_norm=0.0 if case.clip == "never" else MAX_NORM,
        bf16=case.precision == "bf16-mixed", **length, **(weighted if case.by_epoch is None else {}),
    )  # fmt: skip
    optimizer, decay = trainer.optimizer, 1.0 if case.by_epoch is None else 0.9
    trainer.lr_scheduler = scheduler = LambdaLR(optimizer, lambda update: decay**update)
    trained(trainer if case.make is stock else fuse_trainer(trainer))
    assert (trainer.optimizer.optimizer, trainer.lr_scheduler) == (optimizer, scheduler)
    assert type(optimizer) is (torch.optim.AdamW if case.make is stock else af.AdamW)
    norms, rates = (
        [entry.get(name, math.nan) for entry in history(trainer)] for name in ("grad_norm", "learning_rate")
    )
    result = Trained(trainer.model.net, optimizer, trainer.state.global_step)
    return replace(result, scaler=trainer.accelerator.scaler, norms=[finite(norm) for norm in norms], rates=rates)


# ---- Accelerate ------------------------------------------------------------------------------------------------------


class Accelerated:
    """One prepared training."""

    def __init__(self, case: Case, accelerator: Any = None) -> None:
        self.accelerator, self.net = accelerator or Accelerator(cpu=True), network()
        self.optimizer: Any = case.optimizer_of(self.net.parameters())
        loader, scheduler = DataLoader(case.data, batch_size=None), LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.model, self.wrapped, self.loader, self.scheduler = self.accelerator.prepare(
            self.net, self.optimizer, loader, scheduler
        )


def accelerated(folds: bool, case: Case) -> Trained:
    """The loop of Accelerate's manual. Args: folds: and one line more."""
    plugin = GradientAccumulationPlugin(num_steps=case.k, sync_with_dataloader=case.by_epoch)
    mixed = "bf16" if case.precision == "bf16-mixed" else "no"
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, mixed_precision=mixed)
    if case.precision == "16-mixed":
        bring_scaler(accelerator, lambda: run.optimizer)
    run = Accelerated(case, accelerator)
    result = Trained(run.net, run.optimizer, scaler=accelerator.scaler)
    for batch in (batch for _ in range(4) for batch in run.loader):
        with accelerator.accumulate(run.model):
            with accelerator.autocast():
                loss = loss_of(run.model, batch)
            accelerator.backward(loss)
            updates, norm = accelerator.sync_gradients, math.nan
            if folds:
                needs_grads = accelerator.scaler is not None or case.clip in ("norm", "value")
                run.optimizer.accumulate(last=updates and needs_grads)
            if updates and case.clip == "norm":
                norm = float(accelerator.clip_grad_norm_(run.model.parameters(), MAX_NORM))
            elif updates and case.clip == "value":
                accelerator.clip_grad_value_(run.model.parameters(), 0.05)
            run.wrapped.step()
            if updates and case.clip == "in the step":
                norm = math.inf if accelerator.optimizer_step_was_skipped else float(run.optimizer.grad_norm)
            run.scheduler.step()
            run.wrapped.zero_grad()
            if updates:
                result.updates += 1
                result.norms.append(finite(norm))
                result.rates.append(run.scheduler.get_last_lr()[0])
    return result


def weighted_by_accelerate(in_loss: bool, case: Case) -> Trained:
    run = Accelerated(case)  # without gradient_accumulation_steps: Accelerate would divide by it too
    for batch, last in af.windows(run.loader, case.k):
        loss = loss_of(run.model, batch)
        if in_loss:
            run.optimizer.backward(loss, weight=len(batch[0]))
        else:
            run.accelerator.backward(loss)
            run.optimizer.accumulate(weight=len(batch[0]))
        if last:
            run.wrapped.step()
    return Trained(run.net, run.optimizer)
