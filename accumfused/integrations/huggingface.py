"""accumfused under Hugging Face's Trainer: `fuse_trainer(Trainer(...))`, and all else as it was.

Trainer makes its optimizer when training begins, sums the micro-batches in `p.grad`, and clips by two more passes over
it. Here the optimizer is fused as soon as it is there, every micro-batch is folded right after its backward (the last
one too, for which Trainer has no callback), and `step()` clips. Trainer divides the losses itself, by the tokens or by
the micro-batches of the window, so the window is a plain sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from accumfused.batch_norm import check_model
from accumfused.loop.fusing import fuse
from accumfused.loop.grad_scaler import GradScaler
from accumfused.optimizer import FusedOptimizer, check_parameters

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from packaging.version import Version
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing}; {__name__} needs what the extra [huggingface] installs: pip install '.[huggingface]' where "
        "accumfused's pyproject.toml is",
        name=missing.name,
    ) from missing

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

OLDEST_TRANSFORMERS = "5.0"
_ONE_COPY_OF_THE_MODEL = ("NO", "MULTI_CPU", "MULTI_GPU")  # Accelerate's names: one process, or DDP


def fuse_trainer(trainer: AnyTrainer) -> AnyTrainer:
    """Makes a Trainer accumulate, clip and step with accumfused; call it before `train()`.

    The optimizer is the one that was given to Trainer, or that Trainer will make: one of torch's is fused in place, one
    of accumfused's keeps its settings. `args.max_grad_norm` is what `step()` clips to; the norm before clipping is
    logged as `grad_norm`, also with `max_grad_norm=0`. Losses, steps, learning rates and checkpoints are Trainer's.

    BatchNorm in training mode draws a warning where a window has several micro-batches (`accumfused.check_model`).

    In the callbacks `on_pre_optimizer_step` and `on_substep_end`, `p.grad` is None: the sums are in the optimizer. With
    several processes (DDP) the micro-batches are summed in `p.grad` as ever, and only clip and step are fused.

    Args:
        trainer: changed: `create_optimizer`, and when training begins `accelerator.backward` and
            `accelerator.clip_grad_norm_`, are replaced on this object; a callback is added.

    Returns:
        The trainer.

    Raises:
        ImportError: transformers is too old.
        TypeError: not a Trainer; parameters that are not fp32, fp16 or bf16; an optimizer that cannot be fused.
        ValueError: DeepSpeed, FSDP or other sharding; an optimizer that steps inside backward, that lacks trainable
            parameters, or whose own max_grad_norm is not the Trainer's.
        RuntimeError: this trainer is fused already, or has trained with an optimizer that is not.
    """
    if Version(transformers.__version__).release < Version(OLDEST_TRANSFORMERS).release:
        raise ImportError(
            f"fuse_trainer() needs transformers {OLDEST_TRANSFORMERS} or newer, and {transformers.__version__} is "
            f"installed; pip install 'transformers>={OLDEST_TRANSFORMERS}'"
        )
    if not isinstance(trainer, Trainer):
        raise TypeError(f"fuse_trainer() takes a transformers.Trainer, got {type(trainer).__name__}")
    if any(isinstance(callback, _FusedTail) for callback in trainer.callback_handler.callbacks):
        raise RuntimeError("fuse_trainer() was called on this trainer before; once is enough")
    _check_parallelism(trainer)
    check_parameters(list(trainer.model.parameters()))
    tail = _FusedTail(trainer)
    if trainer.optimizer is not None:
        tail.adopt()

    create = trainer.create_optimizer

    @functools.wraps(create)
    def create_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trainer calls it whenever training begins, and makes a new optimizer only where there is none."""
        optimizer: torch.optim.Optimizer = create(*args, **kwargs)
        tail.adopt()
        # A training that was interrupted within a window has left it open, and model.zero_grad() does not see it.
        tail.optimizer.zero_grad()
        return optimizer

    trainer.create_optimizer = create_optimizer
    trainer.add_callback(tail)
    return trainer


class _FusedTail(TrainerCallback):
    """What stands in for the parts of Trainer and of its Accelerator between the loss and the step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.optimizer: Any = None  # a FusedOptimizer, as soon as the trainer has made or been given one
        self._norm: Tensor | None = None  # what Trainer holds as the norm of the step to come
        self._checked_model = False

    def adopt(self) -> None:
        """Fuses the trainer's optimizer, if it is not known yet."""
        optimizer = _unwrapped(self._trainer.optimizer)
        if optimizer is self.optimizer:
            return
        _check_optimizer(self._trainer, optimizer)
        self.optimizer = optimizer if isinstance(optimizer, FusedOptimizer) else fuse(optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The accelerator is final now (a hyperparameter search makes one per trial), and the optimizer prepared."""
        prepared, accelerator = self._trainer.optimizer, self._trainer.accelerator
        if _unwrapped(prepared) is not self.optimizer:
            raise RuntimeError(
                "the trainer's optimizer was replaced without create_optimizer(); override that method to make your own"
            )
        # A checkpoint is of the last step, and a run that resumes from it does the whole window again: saving within
        # a window, as Trainer does when it is told to end, loses nothing.
        prepared.state_dict = functools.partial(torch.optim.Optimizer.state_dict, self.optimizer)
        if accelerator.clip_grad_norm_ != self.clip_grad_norm_:
            accelerator.clip_grad_norm_ = self.clip_grad_norm_
            accelerator.backward = functools.partial(self.backward, accelerator.backward)

    def backward(self, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        """The accelerator's backward, and the fold."""
        backward(loss, **kwargs)
        accelerator = self._trainer.accelerator
        if accelerator.num_processes > 1:
            return  # DDP averages what is in p.grad
        # A stock scaler looks for infinities in p.grad before it calls step(): it needs a closed window.
        closes = accelerator.scaler is not None and not isinstance(accelerator.scaler, GradScaler)
        self.optimizer.accumulate(last=closes and accelerator.sync_gradients)
        if not accelerator.sync_gradients and not self._checked_model:
            self._checked_model = True
            check_model(self._trainer.model)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Leaves the clipping to the step. Returns the norm, which has its value after that: Trainer logs it then.

        Args:
            max_norm: inf where Trainer wants no clipping (`max_grad_norm=0`), but a norm.
        """
        if norm_type != 2:
            raise ValueError(f"accumfused clips the 2-norm, got norm_type={norm_type}")
        if max_norm != self.optimizer.max_grad_norm:
            self.optimizer.max_grad_norm = float(max_norm)
        self._norm = torch.full((), math.inf, dtype=torch.float32, device=self._trainer.accelerator.device)
        return self._norm

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fills in the norm; without a wait for the device."""
        # After an overflow a scaler does not call step(), and inf is right.
        if self._norm is None or self._trainer.accelerator.optimizer_step_was_skipped:
            return
        norm = self.optimizer.grad_norm
        if norm is None:
            self._norm.zero_()  # there was no gradient at all
        else:
            self._norm.copy_(norm)


def _unwrapped(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _check_parallelism(trainer: Trainer) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind not in _ONE_COPY_OF_THE_MODEL or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"fuse_trainer() cannot work with sharded parameters or a foreign engine (distributed type {kind}), which "
            "accumulate and clip by themselves; use one process or DDP"
        )
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if trainer.optimizer is None and ("lomo" in optim or "layerwise" in optim):
        raise ValueError(
            f"optim={optim!r} updates the parameters inside backward: there is no step to fuse; choose another, "
            "adamw_torch for instance"
        )


def _check_optimizer(trainer: Trainer, optimizer: Any) -> None:
    fused = isinstance(optimizer, FusedOptimizer)
    if trainer.optimizer is not optimizer and not fused:
        raise RuntimeError(
            "the trainer has trained with an optimizer that is not fused; call fuse_trainer() before train()"
        )
    if fused and optimizer.max_grad_norm not in (None, math.inf, trainer.args.max_grad_norm):
        raise ValueError(
            f"the optimizer's max_grad_norm is {optimizer.max_grad_norm}, Trainer's is {trainer.args.max_grad_norm}, "
            "which would replace it: leave the optimizer's out, or make them equal"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # fuse() says what is wrong
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are not in the optimizer, {missing[0]!r} for one, but Trainer's "
            "gradient norm counts them: add them, or freeze them with requires_grad_(False)"
        )
