"""accumfused under Lightning: a Trainer whose optimizers are fused, measured, audited; and a mixin for exact windows.

`fuse_trainer` adds a callback. The mixin overrides three public hooks, and moves the Trainer's clip into the step. Both
import neither `lightning` nor `pytorch_lightning`, so they work with both.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar, cast

from torch import Tensor

from accumfused.batch_norm import check_model
from accumfused.integrations.audited import FirstSteps, steps_of_lightning
from accumfused.integrations.logged import Logged, check_logged, check_measured, check_scaler, readings
from accumfused.loop.fusing import fuse
from accumfused.optimizer import FusedOptimizer
from accumfused.warn import say_once

OLDEST = 2  # major version; older optimizer_step() and backward() take other arguments
PACKAGES = ("lightning", "pytorch_lightning")

AnyTrainer = TypeVar("AnyTrainer")


def fuse_trainer(
    trainer: AnyTrainer, *, audit: bool = False, metrics: Logged | None = None, noise_scale: bool = False
) -> AnyTrainer:
    """Makes a Lightning Trainer step with accumfused, and log what its optimizers measure; call it before `fit()`.

    torch's optimizers of `configure_optimizers` are fused in place; those of accumfused keep their settings. Windows
    stay Lightning's own: `FusedAccumulation` makes them exact. Numbers go to the Trainer's loggers when Lightning logs,
    every `log_every_n_steps`; with several optimizers their names begin with `optimizer0/`, `optimizer1/`...

    Args:
        trainer: the trainer, of `lightning` or `pytorch_lightning`. It gets a callback.
        audit: whether the first four steps of each training are watched, see `accumfused.audit`. The report is
            a warning in the log "accumfused", one line if each update is the large batch's. DDP is compared with the
            batches of all processes. It needs automatic optimization, where `training_step` is a micro-batch.
        metrics: measures the steps that Lightning logs, and logs `optimizer.metrics()` there: "groups" as
            `grad_norm/all`, `grad_norm/group0`..., "tensors" also as `grad_norm/layer.weight`. An optimizer of
            accumfused measures what it was made to; its groups are logged with None, too.
        noise_scale: measures the gradient noise scale, and logs it as `noise_scale`. It needs windows that the
            optimizer accumulates: `FusedAccumulation`, or manual optimization.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is no Trainer of Lightning; in `fit()`: the optimizer cannot be fused.
        RuntimeError: the trainer is fused already; in `fit()`: `audit` in manual optimization.
        ValueError: `metrics` is another word; in `fit()`: an optimizer of accumfused does not measure what is asked, or
            has nonfinite="drop" with "16-mixed", whose scaler is torch's.
    """
    package = next((_package(base) for base in type(trainer).__mro__ if base.__name__ == "Trainer"), "")
    if package not in PACKAGES:
        raise TypeError(f"fuse_trainer() takes a Trainer of Lightning, got {type(trainer).__name__}")
    callbacks = cast(Any, trainer).callbacks
    if any(isinstance(callback, _FusedSteps) for callback in callbacks):
        raise RuntimeError("fuse_trainer() was called on this trainer before; once is enough")
    check_logged(metrics)
    callbacks.insert(0, _callback(package, audit, metrics, noise_scale))
    return trainer


class _FusedSteps:
    """A callback, once a package's `Callback` is its other base: fuses, audits and logs."""

    def __init__(self, package: str, audit: bool, metrics: Logged | None, noise_scale: bool) -> None:
        self._arguments = package, audit, metrics, noise_scale
        self._audited = _AuditedSteps() if audit else None
        self._logged = metrics
        self._noise_scale = noise_scale
        self._steps = 0

    def __reduce__(self) -> Any:
        """Serves launchers that pickle the trainer, because the class has no name in this module."""
        return _callback, self._arguments

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Fuses: the optimizers are made, and not restored from a checkpoint yet."""
        if self._audited is not None and not pl_module.automatic_optimization:
            raise RuntimeError(
                "fuse_trainer(audit=True) takes a training_step for a micro-batch, and in manual optimization it is "
                "what you make of it; put `with accumfused.audit.watch(model, optimizer)` around your loop"
            )
        stock = [optimizer for optimizer in trainer.optimizers if not isinstance(optimizer, FusedOptimizer)]
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, FusedOptimizer):
                check_measured(optimizer, metrics=self._logged is not None, noise_scale=self._noise_scale)
                check_scaler(optimizer, getattr(trainer.precision_plugin, "scaler", None))
        for optimizer in stock:
            metrics = self._logged is not None and max(1, trainer.log_every_n_steps)
            fuse(optimizer, metrics=metrics, noise_scale=self._noise_scale)
        if stock:
            trainer.optimizers = trainer.optimizers  # Lightning's wrappers are of the optimizers' classes

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the audit."""
        self._steps = trainer.global_step
        if self._logged is not None and not trainer.loggers:
            say_once("fuse_trainer(metrics=) measures steps, and the Trainer has no logger, so nothing shows them")
        if self._audited is not None:
            self._audited.attach(pl_module, trainer.optimizers[0], trainer.accumulate_grad_batches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Counts steps as Lightning does, also after a resume, so that the logged ones are measured."""
        _switch(trainer, "train")
        for optimizer in trainer.optimizers if pl_module.automatic_optimization else ():
            optimizer.set_metrics_step(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Logs, and counts the steps of the audit."""
        stepped, self._steps = trainer.global_step > self._steps, trainer.global_step
        if stepped and self._audited is not None:
            self._audited.step()
        # As Lightning decides it for its own logs and callbacks; nothing public tells.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        is_due = trainer.log_every_n_steps and ((step + 1) % trainer.log_every_n_steps == 0 or trainer.should_stop)
        if not is_due or (pl_module.automatic_optimization and not stepped):
            return
        if not trainer.loggers or not trainer.is_global_zero:
            return
        numbers: dict[str, float] = {}
        for index, optimizer in enumerate(trainer.optimizers):
            prefix = f"optimizer{index}/" if len(trainer.optimizers) > 1 else ""
            of_one = readings(optimizer, pl_module, self._logged)
            numbers |= {f"{prefix}{name}": value for name, value in of_one.items()}
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts the weights to evaluate into a Schedule-Free optimizer's parameters; the next batch trains again."""
        _switch(trainer, "eval")

    on_train_epoch_end = on_validation_start  # before a checkpoint, which Lightning saves last

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the audit."""
        _switch(trainer, "eval")
        if self._audited is not None:
            self._audited.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the audit, too."""
        if self._audited is not None:
            self._audited.end()


def _switch(trainer: Any, mode: str) -> None:
    """Calls train() or eval() of the optimizers that have them, which are Schedule-Free ones."""
    for optimizer in trainer.optimizers:
        getattr(optimizer, mode, lambda: None)()


@functools.cache
def _class_of(package: str) -> Any:
    return type("FusedSteps", (_FusedSteps, sys.modules[package].Callback), {})


def _callback(package: str, *arguments: Any) -> Any:
    return _class_of(package)(package, *arguments)


class _AuditedSteps(FirstSteps):
    """Watches `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self._module: Any = None  # its training_step goes through a hook
        self._training_step: Any = None  # what stood there: a compiled one

    def attach(self, pl_module: Any, optimizer: FusedOptimizer, micro_batches: int) -> None:
        """Begins to watch."""
        training_step = vars(pl_module).get("training_step")
        self.begin(steps_of_lightning(pl_module), optimizer, micro_batches)
        self._module, self._training_step = pl_module, training_step

    def end(self) -> None:
        super().end()
        module, self._module = self._module, None
        if module is not None:
            del module.training_step
            vars(module).update({} if self._training_step is None else {"training_step": self._training_step})


class FusedAccumulation:
    """A base before `LightningModule` in a class whose `configure_optimizers` returns a fused optimizer.

    - `optimizer.accumulate()` sums the micro-batches of `Trainer(accumulate_grad_batches=)`. With weights the update is
      the exact mean, also in an epoch's shorter last window. Without weights it is Lightning's own, which divides every
      micro-batch by `accumulate_grad_batches`, whatever the window's length.
    - `Trainer(gradient_clip_val=)` becomes `optimizer.max_grad_norm`, and needs no pass over the gradients of its own.
    - Where a scaler, clipping by value or a hook reads gradients before the step, the last backward closes the window:
      they find its mean in `p.grad`. Else `p.grad` is None; a checkpoint has the window's sums.
    - `configure_optimizers` may call `accumfused.release_gradients` and `accumfused.fuse_linears(self, optimizer)`.
    - BatchNorm in training mode causes a warning if windows have several micro-batches (`accumfused.check_model`).

    Manual optimization stays as it is: your code calls the optimizer.

    Attributes:
        micro_batch_weight: a number or a one-element tensor, for instance the number of tokens in the loss's mean. Set
            it in every `training_step`: the next backward pass takes it. None: a plain sum.

    Raises:
        TypeError: the bases stand in the wrong order, or the optimizer is not a fused one.
        ImportError: Lightning is older than 2.0.
        RuntimeError: several processes.
        ValueError: only some micro-batches of a window have weights.

    Example:

            class Model(FusedAccumulation, lightning.LightningModule):
                def training_step(self, batch, batch_idx):
                    x, y = batch
                    self.micro_batch_weight = len(y)
                    return F.cross_entropy(self.net(x), y)

                def configure_optimizers(self):
                    return af.AdamW(self.parameters(), lr=3e-4)
    """

    micro_batch_weight: float | Tensor | None = None
    _ends_window = False  # the backward pass to come is the window's last
    _checked_model = False

    # Lightning's attributes.
    trainer: Any
    automatic_optimization: bool
    optimizers: Any

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_bases(cls)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Notes that the window ends: Lightning calls this for its last micro-batch; the closure runs the backward."""
        self._ends_window = True
        try:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]
        finally:
            self._ends_window = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward and accumulates; the loss comes scaled, and divided by `accumulate_grad_batches`."""
        if not self.automatic_optimization:
            super().backward(loss, *args, **kwargs)  # type: ignore[misc]
            return
        optimizer = self._fused_optimizer()
        weight, self.micro_batch_weight = self.micro_batch_weight, None
        last = self._ends_window and self._reads_gradients()
        if weight is not None:
            loss = loss * self.trainer.accumulate_grad_batches  # the sum of weights divides instead
        if weight is not None and optimizer.accumulates_in_backward:
            optimizer.backward(loss, weight, last=last)  # gradients are taken before accumulate(weight)
            return
        super().backward(loss, *args, **kwargs)  # type: ignore[misc]
        optimizer.accumulate(weight, last=last)
        if not self._ends_window and not self._checked_model:
            self._checked_model = True
            check_model(self)  # type: ignore[arg-type]  # its other base is a module

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Leaves clipping by norm to the step; Lightning clips by value here."""
        if gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(  # type: ignore[misc]
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        elif gradient_clip_val is not None and gradient_clip_val > 0:
            optimizer.max_grad_norm = gradient_clip_val

    def _reads_gradients(self) -> bool:
        """Whether anything reads `p.grad` between the last backward and the step."""
        trainer = self.trainer
        if getattr(trainer.precision_plugin, "scaler", None) is not None or trainer.gradient_clip_algorithm == "value":
            return True
        names = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
        return any(
            getattr(type(owner), name, None) not in _defaults(name)
            for owner in (self, *trainer.callbacks)
            for name in names
        )

    def _fused_optimizer(self) -> FusedOptimizer:
        if self.trainer.world_size > 1:
            raise RuntimeError(
                f"FusedAccumulation works in one process, got {self.trainer.world_size}: a window does not know of the "
                "others' gradients. Remove it from the module's bases; configure_optimizers may stay as it is"
            )
        optimizer = self.optimizers(use_pl_optimizer=False)
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                f"FusedAccumulation needs a fused optimizer, got {type(optimizer).__name__}; "
                "return accumfused.AdamW(...) or accumfused.fuse(optimizer) from configure_optimizers"
            )
        return optimizer


@functools.cache
def _defaults(name: str) -> tuple[Any, ...]:
    """Lists the functions of this name that read no gradients: the mixin's, Lightning's, and None for a missing one."""
    bases = [vars(sys.modules[package]) for package in PACKAGES if package in sys.modules]
    owners = [FusedAccumulation, *(base[kind] for base in bases for kind in ("LightningModule", "Callback"))]
    return (None, *(getattr(owner, name, None) for owner in owners))


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _check_bases(cls: type) -> None:
    """Refuses bases under which Lightning would never call these hooks, or with other arguments."""
    for position, base in enumerate(cls.__mro__):
        package = _package(base)
        if base.__name__ != "LightningModule" or package not in PACKAGES:
            continue
        if position < cls.__mro__.index(FusedAccumulation):
            raise TypeError(
                f"LightningModule comes before FusedAccumulation, whose methods are then not called; "
                f"write class {cls.__name__}(FusedAccumulation, LightningModule)"
            )
        version = sys.modules[package].__version__
        if int(version.partition(".")[0]) < OLDEST:
            raise ImportError(f"FusedAccumulation needs {package} {OLDEST}.0 or newer, got {version}")
