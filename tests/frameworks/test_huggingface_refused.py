"""What `fuse_trainer()` refuses: before anything is changed, and with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accumfused as af

transformers = pytest.importorskip("transformers", "5.0")
pytest.importorskip("accelerate")

from accelerate.utils import DistributedType  # noqa: E402
from trainers import language_model, make, quick_collections  # noqa: E402
from transformers import Trainer  # noqa: E402

from accumfused.integrations import huggingface  # noqa: E402
from accumfused.integrations.huggingface import fuse_trainer  # noqa: E402

__all__ = ["quick_collections"]  # a fixture


def refuses(trainer: Any, error: type[Exception], message: str) -> None:
    """Raises, and the trainer is what it was."""
    optimizer = getattr(trainer, "optimizer", None)
    before = (dict(vars(trainer)), type(optimizer))
    callbacks = list(trainer.callback_handler.callbacks) if isinstance(trainer, Trainer) else []
    with pytest.raises(error, match=message):
        fuse_trainer(trainer)
    assert (dict(vars(trainer)), type(optimizer)) == before
    if callbacks:
        assert trainer.callback_handler.callbacks == callbacks


def test_what_is_not_a_trainer() -> None:
    refuses(language_model(), TypeError, "takes a transformers.Trainer, got LlamaForCausalLM")


def test_an_old_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    seen = huggingface.transformers  # a lazy module, which may have been replaced by another since
    monkeypatch.setattr(seen, "__version__", "4.57.6")
    refuses(trainer, ImportError, r"needs transformers 5\.0 or newer, and 4\.57\.6 is installed")
    monkeypatch.setattr(seen, "__version__", "5.0.0.dev0")
    fuse_trainer(trainer)


def test_a_trainer_that_is_fused_already(tmp_path: Path) -> None:
    refuses(fuse_trainer(make(tmp_path)), RuntimeError, "was called on this trainer before")


def test_a_trainer_that_has_trained_without(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    refuses(trainer, RuntimeError, r"not fused; call fuse_trainer\(\) before train\(\)")


def test_parameters_in_64_bits(tmp_path: Path) -> None:
    refuses(make(tmp_path, language_model().double()), TypeError, r"a parameter is torch\.float64; supported are")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    trainer = make(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", DistributedType[kind])
    refuses(trainer, ValueError, f"distributed type {kind}.*use one process or DDP")


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_inside_backward(tmp_path: Path, optim: str) -> None:
    refuses(make(tmp_path, optim=optim), ValueError, "updates the parameters inside backward")


def with_optimizer(folder: Path, make_optimizer: Any, **options: Any) -> Trainer:
    model = language_model()
    return make(folder, model, optimizers=(make_optimizer(model), None), **options)


def test_an_optimizer_that_cannot_be_fused(tmp_path: Path) -> None:
    trainer = with_optimizer(tmp_path, lambda model: torch.optim.LBFGS(model.parameters()))
    refuses(trainer, TypeError, "LBFGS evaluates a closure within its step")


def test_an_optimizer_that_lacks_parameters(tmp_path: Path) -> None:
    trainer = with_optimizer(tmp_path, lambda model: af.AdamW(model.lm_head.parameters()))
    refuses(trainer, ValueError, r"trainable parameters are not in the optimizer, 'model\.embed_tokens\.weight'")
    trainer.model.model.requires_grad_(False)
    fuse_trainer(trainer)


@pytest.mark.parametrize("theirs", [0.3, 0.0])
def test_two_max_grad_norms(tmp_path: Path, theirs: float) -> None:
    def optimizer(model: torch.nn.Module) -> af.AdamW:
        return af.AdamW(model.parameters(), max_grad_norm=0.5)

    trainer = with_optimizer(tmp_path, optimizer, max_grad_norm=theirs)
    refuses(trainer, ValueError, f"max_grad_norm is 0.5, Trainer's is {theirs}")
    fuse_trainer(with_optimizer(tmp_path, optimizer, max_grad_norm=0.5))


def test_an_optimizer_that_is_put_in_behind_trainers_back(tmp_path: Path) -> None:
    class Replaces(Trainer):
        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            self.optimizer = self.accelerator.prepare(torch.optim.SGD(self.model.parameters(), lr=0.1))
            return super().create_scheduler(*args, **kwargs)

    trainer = fuse_trainer(make(tmp_path, kind=Replaces))
    with pytest.raises(RuntimeError, match="override that method to make your own"):
        trainer.train()


def test_another_norm_than_the_2_norm(tmp_path: Path) -> None:
    class Clips(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0, norm_type=1)

    with pytest.raises(ValueError, match="accumfused clips the 2-norm, got norm_type=1"):
        fuse_trainer(make(tmp_path, kind=Clips)).train()
