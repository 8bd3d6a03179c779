"""accumfused under Hugging Face's Trainer: call `fuse_trainer(Trainer(...))` and change nothing else.

Trainer makes its optimizer when training begins, sums the micro-batches in `p.grad`, and clips by two more passes over
it. This module fuses the optimizer once it exists, and folds every micro-batch right after its backward. (Trainer has
no callback there for the last one.) `step()` clips. Trainer itself divides the losses by the tokens or by the
micro-batches of the window, so the window is a plain sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from accumfused.accepted import check_parameters
from accumfused.batch_norm import check_model
from accumfused.integrations.audited import FirstSteps, losses_of_trainer
from accumfused.integrations.logged import Logged, check_logged, check_measured, check_scaler, readings
from accumfused.loop.ddp import attach_ddp
from accumfused.loop.fusing import fuse
from accumfused.loop.grad_scaler import GradScaler
from accumfused.loop.linears import FusedLinears, fuse_linears
from accumfused.optimizer import FusedOptimizer

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


def fuse_trainer(
    trainer: AnyTrainer,
    *,
    linears: bool = False,
    audit: bool = False,
    metrics: Logged | None = None,
    noise_scale: bool = False,
) -> AnyTrainer:
    """Makes a Trainer accumulate, clip and step with accumfused; call it before `train()`.

    The optimizer is Trainer's argument, or Trainer makes it later. A torch optimizer is fused in place; one of
    accumfused keeps its settings. `step()` clips to `args.max_grad_norm`. Trainer logs the norm before clipping as
    `grad_norm`, also with `max_grad_norm=0`. Losses, steps, learning rates and checkpoints stay Trainer's.

    BatchNorm in training mode causes a warning if a window has several micro-batches (`accumfused.check_model`).

    In the callbacks `on_pre_optimizer_step` and `on_substep_end`, `p.grad` is None: the optimizer holds the sums. With
    several processes (DDP), `p.grad` sums the micro-batches as before, and only clip and step are fused; unless the
    noise scale is measured, which needs each process's own gradients: see `accumfused.attach_ddp`.

    Args:
        trainer: the trainer. This call replaces its `create_optimizer` and `log`, and adds a callback, which replaces
            `accelerator.backward` and `accelerator.clip_grad_norm_` when training begins.
        linears: whether linear layers add their weights' gradients to the optimizer's sums within backward, see
            `accumfused.fuse_linears`. It needs one process with one device.
        audit: whether the first four steps of each training are watched, see `accumfused.audit`. The report is
            a warning in the log "accumfused", one line if each update is the large batch's.
            DDP is compared with the batches of all processes.
        metrics: measures the steps that Trainer logs, and logs `optimizer.metrics()` there: "groups" as
            `grad_norm/all`, `grad_norm/group0`..., "tensors" also as `grad_norm/layer.weight`. An optimizer of
            accumfused measures what it was made to; its groups are logged with None, too.
        noise_scale: measures the gradient noise scale, and logs it as `noise_scale`. It needs windows of several
            micro-batches, or several processes.

    Returns:
        The trainer.

    Raises:
        ImportError: transformers is too old.
        TypeError: `trainer` is no Trainer; a parameter is not fp32, fp16, bf16 or fp64; the optimizer cannot be fused.
        ValueError: DeepSpeed, FSDP or other sharding; the optimizer steps inside backward, lacks trainable parameters,
            clips by another max_grad_norm or policy than the Trainer, has nonfinite="drop" with fp16 (whose scaler is
            torch's), or does not measure `metrics` or `noise_scale`;
            `linears` with several processes or devices.
        RuntimeError: the trainer is fused already, or has trained with an optimizer that is not fused.
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
    if linears and (trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1):
        raise ValueError("fuse_trainer(linears=True) needs one process with one device; leave linears out")
    check_logged(metrics)
    check_parameters(list(trainer.model.parameters()))
    tail = _FusedTail(trainer, linears, metrics, noise_scale)
    if trainer.optimizer is not None:
        tail.adopt()

    create = trainer.create_optimizer

    @functools.wraps(create)
    def create_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trainer calls this whenever training begins, and makes a new optimizer only if it has none."""
        optimizer: torch.optim.Optimizer = create(*args, **kwargs)
        tail.adopt()
        # A training that ended inside a window has left it open, and model.zero_grad() does not see it.
        tail.optimizer.zero_grad()
        return optimizer

    log = trainer.log

    @functools.wraps(log)
    def log_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        log({**logs, **tail.readings()} if "loss" in logs else logs, *args, **kwargs)

    trainer.create_optimizer, trainer.log = create_optimizer, log_metrics
    trainer.add_callback(tail)
    if audit:
        audited = _AuditedSteps(trainer, tail)
        trainer.train = functools.partial(audited.train, trainer.train)
        trainer.add_callback(audited)
    return trainer


class _FusedTail(TrainerCallback):
    """Replaces the methods of Trainer and of its Accelerator between the loss and the step."""

    def __init__(self, trainer: Trainer, linears: bool, metrics: Logged | None, noise_scale: bool) -> None:
        self._trainer = trainer
        self._fuses_linears = linears
        self._logged = metrics
        self._noise_scale = noise_scale
        self._linears: FusedLinears | None = None
        self.optimizer: Any = None  # a FusedOptimizer, once the trainer has one
        self._norm: Tensor | None = None  # Trainer holds it as the norm of the step to come
        self._checked_model = False
        self._attached_pair: tuple[Any, Any] | None = None  # a DDP, and the optimizer that adds up its gradients
        self._has_gradients = False  # since the last step

    def adopt(self) -> None:
        """Fuses the trainer's optimizer, if it is a new one."""
        optimizer = _unwrapped(self._trainer.optimizer)
        if optimizer is self.optimizer:
            return
        _check_optimizer(self._trainer, optimizer)
        if isinstance(optimizer, FusedOptimizer):
            check_measured(optimizer, metrics=self._logged is not None, noise_scale=self._noise_scale)
        if self._linears is not None:
            self.optimizer.zero_grad()  # a training that ended inside a window has left it open
            self._linears.remove()
        if not isinstance(optimizer, FusedOptimizer):
            metrics = self._logged is not None and _logging_steps(self._trainer.args)
            fuse(optimizer, metrics=metrics, noise_scale=self._noise_scale)
        self.optimizer = optimizer
        if self._fuses_linears:
            self._linears = fuse_linears(self._trainer.model, self.optimizer)

    def _adds_up(self) -> bool:
        """Whether the optimizer adds up the gradients of several processes, and DDP does not."""
        return self._trainer.accelerator.num_processes > 1 and bool(self.optimizer.settings["noise_scale"])

    def readings(self) -> dict[str, float]:
        """Reads what Trainer's log gets of the optimizer."""
        return {} if self.optimizer is None else readings(self.optimizer, self._trainer.model, self._logged)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hooks the accelerator: only now it is final (a search makes one per trial) and has prepared the optimizer."""
        prepared, accelerator = self._trainer.optimizer, self._trainer.accelerator
        if _unwrapped(prepared) is not self.optimizer:
            raise RuntimeError(
                "the trainer's optimizer was replaced without create_optimizer(); override that method to make your own"
            )
        check_scaler(self.optimizer, accelerator.scaler)
        # A resumed run repeats the whole window, so nothing is lost if Trainer saves inside one.
        prepared.state_dict = functools.partial(FusedOptimizer.state_dict, self.optimizer, window=False)
        pair = self._trainer.model_wrapped, self.optimizer
        if self._adds_up() and pair != self._attached_pair:
            attach_ddp(*pair)
            self._attached_pair = pair
        self._has_gradients = False
        if accelerator.clip_grad_norm_ != self.clip_grad_norm_:
            accelerator.clip_grad_norm_ = self.clip_grad_norm_
            accelerator.backward = functools.partial(self.backward, accelerator.backward)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts steps as Trainer does, also after a resume, so that the logged ones are measured."""
        is_logged = args.logging_first_step and state.global_step == 0
        self.optimizer.set_metrics_step(-1 if is_logged else state.global_step)

    def backward(self, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        """Runs the accelerator's backward, then folds."""
        backward(loss, **kwargs)
        accelerator = self._trainer.accelerator
        self._has_gradients = True
        if accelerator.num_processes > 1 and not self._adds_up():
            return  # DDP averages p.grad
        # A stock scaler looks for infinities in p.grad before it calls step(): it needs a closed window.
        closes = accelerator.scaler is not None and not isinstance(accelerator.scaler, GradScaler)
        self.optimizer.accumulate(last=closes and accelerator.sync_gradients)
        if not accelerator.sync_gradients and not self._checked_model:
            self._checked_model = True
            check_model(self._trainer.model)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Leaves the clipping to the step; returns the norm's tensor, which the step fills before Trainer logs it.

        Args:
            max_norm: the limit; inf if Trainer wants only the norm (`max_grad_norm=0`).
        """
        if norm_type != 2:
            raise ValueError(f"accumfused clips the 2-norm, got norm_type={norm_type}")
        if max_norm != self.optimizer.max_grad_norm and self.optimizer.settings["clip"] is None:
            self.optimizer.max_grad_norm = float(max_norm)
        self._norm = torch.full((), math.inf, dtype=torch.float32, device=self._trainer.accelerator.device)
        return self._norm

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fills in the norm, without a wait for the device."""
        has_gradients, self._has_gradients = self._has_gradients, False
        # After an overflow a scaler does not call step(), and inf is right.
        if self._norm is None or self._trainer.accelerator.optimizer_step_was_skipped:
            return
        norm = self.optimizer.grad_norm  # NaN where there was no gradient, of which torch's norm is 0
        self._norm.copy_(norm if has_gradients else norm.nan_to_num(posinf=math.inf))


class _AuditedSteps(TrainerCallback):
    """Watches the first steps of each training."""

    def __init__(self, trainer: Trainer, tail: _FusedTail) -> None:
        self._trainer, self._tail = trainer, tail
        self._steps = FirstSteps()
        self._compute_loss: Any = None  # one of the object itself

    def train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Trainer's own, and ends the audit, also after an exception."""
        try:
            return train(*args, **kwargs)
        finally:
            self._end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the audit; again where Trainer begins again, with smaller batches after memory ran out."""
        self._end()
        self._trainer.model.train()  # as Trainer has it from the first micro-batch on
        self._compute_loss = vars(self._trainer).get("compute_loss")
        self._steps.begin(losses_of_trainer(self._trainer), self._tail.optimizer, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the steps."""
        self._steps.step()

    def _end(self) -> None:
        self._steps.end()
        vars(self._trainer).pop("compute_loss", None)
        if self._compute_loss is not None:
            self._trainer.compute_loss = self._compute_loss


def _logging_steps(args: Any) -> bool | int:
    """Counts the steps from one that is logged to the next; True: their number is not known, or not constant."""
    return int(args.logging_steps) if args.logging_strategy == "steps" and args.logging_steps >= 1 else True


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
    if fused and optimizer.settings["clip"] is not None and trainer.args.max_grad_norm > 0:
        raise ValueError(
            f"the optimizer has clip={optimizer.settings['clip']}, and Trainer max_grad_norm="
            f"{trainer.args.max_grad_norm}; give Trainer max_grad_norm=0"
        )
    if fused:
        check_scaler(optimizer, trainer.accelerator.scaler, is_float16=trainer.args.fp16)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # fuse() names the error
    param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in param_ids]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are not in the optimizer, {missing[0]!r} for one, but Trainer's "
            "gradient norm counts them: add them, or freeze them with requires_grad_(False)"
        )
