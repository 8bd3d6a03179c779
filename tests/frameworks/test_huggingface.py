"""Hugging Face's Trainer with `fuse_trainer()` and without it: the same training; and what it refuses."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import inside
import processes
import pytest
import torch
from compare import assert_same
from torch import Tensor
from trainers import (
    STEPS,
    Endless,
    MeanOfEachMicroBatch,
    assert_same_training,
    both,
    forget_processes,
    fuse_trainer,
    history,
    language_model,
    make,
    sum_over_tokens,
    trained,
    transformers,
)
from transformers import Trainer, TrainerCallback

import accumfused as af
from accumfused.integrations import huggingface
from accumfused.loop import linears

# ---- the same numbers ----------------------------------------------------------------------------------------------


def failing(at: int, survives: bool = True) -> type[Trainer]:
    """One micro-batch runs out of memory: who survives that goes on with the next, and else Trainer begins again."""

    class Fails(Trainer):
        count, has_failed = -1, False

        def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            if self.count != at:
                return super().training_step(model, *args, **kwargs)
            self.has_failed = True
            if not survives:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return torch.zeros(())

    return Fails


ROWS: dict[str, dict[str, Any]] = {
    "by tokens, in the model": {},
    "by tokens, with smoothing": {"label_smoothing_factor": 0.1},
    "by micro-batches": {"model_of": MeanOfEachMicroBatch},
    "windows longer than the epoch": {"gradient_accumulation_steps": 20, "max_steps": 2},
    "ends within an epoch, evaluates": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1},
    "SGD": {"optim": "sgd", "weight_decay": 0.1},
    "no fused rule": {"optim": "adafactor", "lr_scheduler_type": "constant"},
    "logs every second step": {"logging_steps": 2},
    "a model that Trainer makes": {"model_init": language_model},
    "data without a length": {"train_dataset": Endless(), "max_steps": 5},
    "out of memory, and again": {"kind": failing(5, survives=False), "auto_find_batch_size": True, "max_steps": STEPS},
    "left out within a window": {"kind": failing(5)},
    "left out, a window's last": {"kind": failing(7)},
    "left out, an epoch's last": {"kind": failing(10)},
    "left out, a whole window": {"kind": failing(2), "gradient_accumulation_steps": 1, "max_steps": 4},  # norm 0
}


LINEARS = ("by tokens, in the model", "by micro-batches", "a model that Trainer makes")


@pytest.mark.parametrize(("row", "fuses"), [*((row, False) for row in ROWS), *((row, True) for row in LINEARS)])
def test_training_equals_the_stock_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, fuses: bool) -> None:
    """Args: fuses: linear layers add to the sums themselves."""
    monkeypatch.setattr(linears, "SMALLEST", 1)
    ours, stock = both(lambda: make(tmp_path, **ROWS[row]), linears=fuses)
    assert_same_training(ours, stock, steps=ROWS[row].get("max_steps", STEPS))
    assert getattr(ours, "has_failed", True)
    decays = [[group["weight_decay"] for group in each.optimizer.param_groups] for each in (ours, stock)]
    assert decays[0] == decays[1]
    clips = [entry["grad_norm"] > 0.3 for entry in history(stock) if "grad_norm" in entry]
    assert any(clips) or row == "windows longer than the epoch"
    for again in (False, True):
        if again and row == "a model that Trainer makes":  # and a new optimizer, in each training
            assert_same_training(trained(ours), stock)
        layers = [module for module in ours.model.modules() if isinstance(module, torch.nn.Linear)]
        assert ["forward" in vars(layer) for layer in layers] == [fuses] * 8


def test_linear_layers_of_a_second_optimizer_go_to_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    ours, stock = both(lambda: make(tmp_path, max_steps=2), linears=True)
    for trainer in (ours, stock):
        trainer.optimizer = trainer.lr_scheduler = None
        trained(trainer)
    assert_same_training(ours, stock, steps=2)


def test_an_offloaded_optimizer_trains_to_the_same_bits(tmp_path: Path) -> None:
    found = []
    for offload in (True, False):
        trainer = make(tmp_path, max_steps=2, optimizer_of=lambda params, on=offload: af.AdamW(params, offload=on))
        found.append([param.clone() for param in trained(fuse_trainer(trainer)).model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_gradient_that_is_not_finite_is_skipped_and_logged(tmp_path: Path) -> None:
    def poison(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        calls.append(1)
        return sum_over_tokens(outputs, labels, num_items_in_batch) * (math.nan if len(calls) == 2 else 1.0)

    calls: list[int] = []
    trainer = trained(fuse_trainer(make(tmp_path, compute_loss_func=poison)))
    assert [math.isnan(entry["grad_norm"]) for entry in history(trainer)] == [True] + [False] * (STEPS - 1)
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    assert int(trainer.optimizer.optimizer.skipped_steps) == 1


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
    for name in ("aten::_foreach_norm", "aten::linalg_vector_norm", "aten::_foreach_mul_", "aten::_fused_adamw_"):
        assert stock[name] >= steps > ours[name] == 0, name
    assert stock["aten::add_"] - ours["aten::add_"] >= steps * 3 * parameters  # autograd's sums
    assert ours["aten::item"] < stock["aten::item"]  # where a GPU would be waited for


# ---- processes, whose workers need not import Lightning here ---------------------------------------------------------


def rank_trains(folder: Path) -> list[float]:
    """In a worker: the noise scales of two trainings, which are those of the stock Trainer otherwise."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(torch.distributed.get_rank()))
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    state = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **ranks}  # which a launcher sets
    with mock.patch.dict(os.environ, state):
        forget_processes()
        ours, stock = fuse_trainer(make(folder, **options), noise_scale=True), make(folder, **options)
        found = []
        for _ in range(2):
            trained(ours), trained(stock)
            found += [entry.pop("noise_scale") for entry in history(ours)]
            assert_same_training(ours, stock, steps=2)
    forget_processes()
    assert int(ours.optimizer.optimizer.noise_scale().windows) == 4
    return found


def test_processes_log_the_noise_scale_of_all_and_train_the_same(tmp_path: Path) -> None:
    assert len(processes.agreed(2, rank_trains, tmp_path)) == 4


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
    whole = trained(fuse_trainer(make(tmp_path / "whole")))
    first = fuse_trainer(make(tmp_path, save_strategy="no" if stop else "steps", save_steps=2))
    if stop:
        first.add_callback(Stop(stop))  # 3 a window: 8 is in the third
    first.train()
    for resumed in (fuse_trainer(make(tmp_path)), first):  # with what is left of its first training
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == STEPS
        assert_same(resumed.optimizer.optimizer, whole.optimizer.optimizer)
        assert history(resumed)[-1] == history(whole)[-1]


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_may_change_sides(tmp_path: Path, ours_first: bool) -> None:
    first, second = make(tmp_path, save_strategy="steps", save_steps=2), make(tmp_path)
    fuse_trainer(first if ours_first else second)
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_training(second, first)


# ---- what is refused, and that nothing is changed then ---------------------------------------------------------------


def clips_to_a_half(params: Any) -> af.AdamW:
    return af.AdamW(params, max_grad_norm=0.5)


def clips_tensors(params: Any) -> af.AdamW:
    return af.AdamW(params, clip=af.PerTensor(0.5))


def drops(params: Any) -> af.AdamW:
    return af.AdamW(params, nonfinite="drop")


def some_of(params: Any) -> af.AdamW:
    return af.AdamW([*params][-1:])


class Replaces(Trainer):
    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = self.accelerator.prepare(torch.optim.SGD(self.model.parameters(), lr=0.1))
        return super().create_scheduler(*args, **kwargs)


class ClipsAnotherNorm(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0, norm_type=1)
        return super().training_step(*args, **kwargs)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no Trainer": (lambda _: language_model(), TypeError, "takes a transformers.Trainer, got LlamaForCausalLM"),
    "fused already": (lambda at: fuse_trainer(make(at)), RuntimeError, "was called on this trainer before"),
    "has trained": (
        lambda at: trained(make(at, max_steps=1)), RuntimeError, r"not fused; call fuse_trainer\(\) before train\(\)",
    ),
    "8 bits": (
        lambda at: make(at, lambda: language_model().to(torch.float8_e4m3fn)), TypeError, "float8_e4m3fn; supported are"
    ),
    "LOMO": (lambda at: make(at, optim="lomo"), ValueError, "updates the parameters inside backward"),
    "layerwise": (lambda at: make(at, optim="galore_adamw_layerwise"), ValueError, "the parameters inside backward"),
    "LBFGS": (lambda at: make(at, optimizer_of=torch.optim.LBFGS), TypeError, "evaluates a closure within its step"),
    "lacks parameters": (
        lambda at: make(at, optimizer_of=some_of), ValueError, r"not in the optimizer, 'model\.embed_tokens\.weight'"
    ),
    "another clip": (lambda at: make(at, optimizer_of=clips_to_a_half), ValueError, "norm is 0.5, Trainer's is 0.3"),
    "another policy": (lambda at: make(at, optimizer_of=clips_tensors), ValueError, "give Trainer max_grad_norm=0"),
    "drops overflows of fp16": (
        lambda at: make(at, optimizer_of=drops, fp16=True), ValueError, r"take accumfused\.GradScaler"
    ),
    "no clip": (
        lambda at: make(at, optimizer_of=clips_to_a_half, max_grad_norm=0.0), ValueError, "norm is 0.5, Trainer's is 0"
    ),
}  # fmt: skip


def refuses(trainer: Any, error: type[Exception], message: str, **options: Any) -> None:
    def seen() -> Any:
        handler = getattr(trainer, "callback_handler", None)
        return dict(vars(trainer)), type(getattr(trainer, "optimizer", None)), handler and list(handler.callbacks)

    before = seen()
    with pytest.raises(error, match=message):
        fuse_trainer(trainer, **options)
    assert seen() == before


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_and_leaves_the_trainer_as_it_was(tmp_path: Path, name: str) -> None:
    make_trainer, error, message = REFUSED[name]
    refuses(make_trainer(tmp_path), error, message)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_other_engines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    trainer = make(tmp_path)
    kinds = type(trainer.accelerator.distributed_type)
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", kinds[kind])
    refuses(trainer, ValueError, f"distributed type {kind}.*use one process or DDP")
    monkeypatch.undo()
    monkeypatch.setattr(type(trainer.args), "n_gpu", 2)
    refuses(trainer, ValueError, r"linears=True\) needs one process with one device", linears=True)


def test_an_old_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = huggingface.transformers  # a lazy module, which may have been replaced by another since
    monkeypatch.setattr(seen, "__version__", "4.57.6")
    refuses(make(tmp_path), ImportError, r"needs transformers 5\.0 or newer, and 4\.57\.6 is installed")
    monkeypatch.setattr(seen, "__version__", "5.0.0.dev0")
    fuse_trainer(make(tmp_path))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Replaces, RuntimeError, "override that method to make your own"),
        (ClipsAnotherNorm, ValueError, "accumfused clips the 2-norm, got norm_type=1"),
    ],
)
def test_what_shows_in_the_training_only_is_refused_then(tmp_path: Path, kind: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fuse_trainer(make(tmp_path, kind=kind)).train()


def test_frozen_parameters_and_an_equal_clip_are_no_reason_to_refuse(tmp_path: Path) -> None:
    trainer = make(tmp_path, optimizer_of=some_of)
    trainer.model.model.requires_grad_(False)
    fuse_trainer(trainer)
    fuse_trainer(make(tmp_path, optimizer_of=clips_to_a_half, max_grad_norm=0.5))


def test_a_policy_of_the_optimizer_stays_where_trainer_clips_nothing(tmp_path: Path) -> None:
    trainer = fuse_trainer(make(tmp_path, optimizer_of=clips_tensors, max_grad_norm=0.0, max_steps=2))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.max_grad_norm is None
    assert inside.outcome(optimizer).coefficients is not None
