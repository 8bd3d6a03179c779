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
from lightning_loops import Logging, LoggingAndWeighted, Stock, Weighted, fit
from regression import Batch, K
from torch.nn import functional as F
from trainers import (
    LENGTH,
    VOCABULARY,
    Accelerator,
    MeanOfEachMicroBatch,
    forget_processes,
    fuse_trainer,
    language_model,
    make,
    sum_over_tokens,
    transformers,
)

import accumfused as af
from accumfused.auditing.hints import CAUSES

HEADLINES = {
    "equal": "The update is that of the large batch.",
    "scaled": "The update has the direction of the large batch, its length times ",
    "different": "The update is NOT that of the large batch: ",
}


@pytest.mark.parametrize(("names", "options"), [
    ([], {}), ([], {"compute_loss_func": sum_over_tokens}), (["mean_of_means"], {"model_of": MeanOfEachMicroBatch}),
])  # fmt: skip
def test_a_trainer_is_sound_if_the_model_takes_the_count_of_tokens(
    tmp_path: Path, names: list[str], options: Any
) -> None:
    trainer = make(tmp_path, num_train_epochs=1, **options)
    optimizer = trainer.create_optimizer()
    with af.audit.watch(trainer.model, optimizer, gradient_accumulation_steps=4) as report:
        trainer.train()
    assert report.names == names
    assert [step.micro_batches for step in report.steps] == [4, 4, 3]


# ---- verdicts on frameworks' loops -----------------------------------------------------------------------------------


def gpt2() -> Any:
    """With dropout, and labels that transformers counts before it shifts them."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=1.0, max_position_embeddings=LENGTH, **sizes,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


class Preferences(transformers.Trainer):  # type: ignore[misc]
    """As DPO does: one forward pass over chosen and rejected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # its loss is a mean over pairs

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])
        logits = model(input_ids=ids).logits[:, :-1].log_softmax(2)
        chosen, rejected = logits.gather(2, ids[:, 1:, None])[..., 0].sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Grouped(transformers.Trainer):  # type: ignore[misc]
    """As GRPO does: Trainer leaves the division to it, and its labels are taken out of the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        loss = model(**inputs).logits.log_softmax(2).mul(labels[..., None] % 2).mean()
        return loss / self.current_gradient_accumulation_steps


class DividesAgain(transformers.Trainer):  # type: ignore[misc]
    """And keeps a list of its losses, which the audit's own calls leave alone."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps
        vars(self).setdefault("metrics", []).append(float(loss.detach()))
        return loss


class Padded(transformers.Trainer):  # type: ignore[misc]
    """Its batches have different widths."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        width = int(inputs["attention_mask"].sum(1).max())
        return super().compute_loss(model, {name: each[:, :width] for name, each in inputs.items()}, *args, **kwargs)


@pytest.mark.parametrize(("verdict", "options"), [
    ("equal", {"model_of": gpt2}), ("equal", {"bf16": True}), ("equal", {"kind": Padded}),
    ("equal", {"model_of": gpt2, "gradient_accumulation_steps": 1}),
    ("equal", {"kind": Preferences}), ("equal", {"kind": Grouped}),
    ("scaled", {"kind": DividesAgain}), ("different", {"model_of": mixture}),
], ids=[str(i) for i in range(8)])  # fmt: skip
def test_a_trainers_verdict_is_that_of_its_loss_over_the_whole_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verdict: str, options: Any
) -> None:
    caplog.set_level(logging.INFO, "accumfused")
    trainer, plain = (
        fuse_trainer(make(tmp_path, max_steps=2, max_grad_norm=0.0, **options), audit=audit) for audit in (True, False)
    )
    for each in (trainer, plain):
        torch.manual_seed(7)
        each.train()
    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))
    assert getattr(trainer, "metrics", None) == getattr(plain, "metrics", None)
    (record,) = (each for each in caplog.records if each.name == "accumfused")
    assert record.message.startswith(f"audit of the first 2 steps: {HEADLINES[verdict]}"), record.message
    assert "could not be computed at once" not in record.message


def accelerated(weight: float = 1.0, sizes: tuple[int, ...] = (4, 4, 4, 4)) -> Any:
    forget_processes()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    data = [(torch.randn(size, 6), torch.randint(3, (size,))) for size in (sizes * K)[: 2 * K]]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(weight * F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return report


@pytest.mark.parametrize(("verdict", "arguments"), [("equal", ()), ("scaled", (1 / K,)), ("different", (1.0, (4, 3)))])
def test_a_loop_of_accelerate_has_its_verdict_and_its_remedy(verdict: str, arguments: Any) -> None:
    report = accelerated(*arguments)
    assert report.verdict == verdict, str(report)
    if verdict == "scaled":
        assert "accelerator.backward() divides" in str(report)


# ---- the first steps of a training -----------------------------------------------------------------------------------


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
    count = 1 if causes is None else 4
    assert record.message.startswith(
        f"audit of the first {count} steps: {HEADLINES['different' if causes else 'equal']}"
    )
    assert record.levelno == logging.WARNING  # Python shows no line below it, unless somebody asks
    assert [cause for cause in CAUSES if f"\n{cause} (" in record.message] == (causes or [])
    assert "could not be computed at once" not in record.message
    if causes:  # the remedy is in the framework's words
        assert ("num_items_in_batch" if train is trainer_trains else "FusedAccumulation mixin") in record.message
    assert ("\n4 " in record.message) == bool(causes)
    assert "\n5 " not in record.message
    assert train is trainer_trains or not causes or "net.0.weight" in record.message  # as the module names it


def test_manual_optimization_is_not_audited() -> None:
    module = Stock()
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match=r"put `with accumfused\.audit\.watch\(model, optimizer\)` around your loop"):
        fit(module, audit=True)
