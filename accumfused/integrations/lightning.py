"""Windows in Lightning's automatic optimization: exact means of unequal micro-batches, the Trainer's clip in the step.

A mixin overrides three public hooks. It imports neither `lightning` nor `pytorch_lightning`, so it works with both.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from accumfused.batch_norm import check_model
from accumfused.optimizer import FusedOptimizer

OLDEST = 2  # major version; older optimizer_step() and backward() take other arguments


class FusedAccumulation:
    """A base before `LightningModule` in a class whose `configure_optimizers` returns a fused optimizer.

    - `optimizer.accumulate()` sums the micro-batches of `Trainer(accumulate_grad_batches=)`. With weights the update is
      the exact mean, also in an epoch's shorter last window. Without weights it is Lightning's own, which divides every
      micro-batch by `accumulate_grad_batches`, whatever the window's length.
    - `Trainer(gradient_clip_val=)` becomes `optimizer.max_grad_norm`, and needs no pass over the gradients of its own.
    - The last backward closes the window, so a scaler, clipping by value and the hooks before the step find its sum in
      `p.grad`. Between micro-batches `p.grad` is None; a checkpoint has the window's sums.
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
        if weight is not None:
            loss = loss * self.trainer.accumulate_grad_batches  # the sum of weights divides instead
        if weight is not None and optimizer.engine.release is not None:
            optimizer.backward(loss, weight, last=self._ends_window)  # gradients are taken before accumulate(weight)
            return
        super().backward(loss, *args, **kwargs)  # type: ignore[misc]
        optimizer.accumulate(weight, last=self._ends_window)
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


def _check_bases(cls: type) -> None:
    """Refuses bases under which Lightning would never call these hooks, or with other arguments."""
    for position, base in enumerate(cls.__mro__):
        package = base.__module__.partition(".")[0]
        if base.__name__ != "LightningModule" or package not in ("lightning", "pytorch_lightning"):
            continue
        if position < cls.__mro__.index(FusedAccumulation):
            raise TypeError(
                f"LightningModule comes before FusedAccumulation, whose methods are then not called; "
                f"write class {cls.__name__}(FusedAccumulation, LightningModule)"
            )
        version = sys.modules[package].__version__
        if int(version.partition(".")[0]) < OLDEST:
            raise ImportError(f"FusedAccumulation needs {package} {OLDEST}.0 or newer, got {version}")
