"""An audit of a training's first steps, whose report is a warning: it is shown once, whatever it says."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accumfused.auditing.calls import audit
from accumfused.auditing.report import AuditReport

_STEPS = 4


class LossOf(Module):
    """A framework's function that computes a loss, as a module: an audit hooks it, and calls it again on a copy.

    Args:
        inner: the model.
        loss_of: takes this object, and what the framework gives it.
    """

    def __init__(self, inner: Any, loss_of: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.loss_of = inner, loss_of
        self.arguments: tuple[Any, ...] = ()  # what else the loop's own call takes
        self.is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = LossOf(copy.deepcopy(self.inner, memo), self.loss_of)
        module.arguments, module.is_copy = self.arguments, True
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss_of(self, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yields parameters under the names that the model itself gives them."""
        yield from self.inner.named_parameters(*args, **kwargs)


class FirstSteps:
    """Watches from `begin` until so many calls of `step`, or `end`; then shows the report, and lets go of the loop."""

    def __init__(self) -> None:
        self._block: Any = None  # while steps are watched
        self._report = AuditReport()
        self._left = 0

    def begin(self, model: Module, optimizer: Optimizer, micro_batches: int) -> None:
        """Begins to watch, in all processes at once; a block that is still open ends.

        Args:
            micro_batches: those of a window in each process.
        """
        self.end()
        group = dist.group.WORLD if _processes() > 1 else None
        self._block = audit.watch(model, optimizer, gradient_accumulation_steps=micro_batches, process_group=group)
        self._report, self._left = self._block.__enter__(), _STEPS

    def step(self) -> None:
        """Counts a step."""
        self._left -= 1
        if self._left == 0:
            self.end()

    def end(self) -> None:
        """Shows the report, in one process: in one line if all is well."""
        block, self._block = self._block, None
        if block is None:
            return
        block.__exit__(*sys.exc_info())  # an exception that ends the training has cut a window short
        if _processes() == 1 or dist.get_rank() == 0:
            text = self._report.headline if self._report.matches and not self._report.notes else str(self._report)
            logging.getLogger("accumfused").warning("audit of the first %d steps: %s", len(self._report.steps), text)


def losses_of_trainer(trainer: Any) -> LossOf:
    """Wraps a Hugging Face Trainer's `compute_loss` as a module. A copy of it leaves the Trainer's own books alone."""
    compute = trainer.compute_loss

    def loss_of(module: LossOf, inputs: Any, count: Any) -> Tensor:
        if not module.is_copy:
            return compute(*module.arguments, inputs, num_items_in_batch=count)  # type: ignore[no-any-return]
        apart = copy.copy(trainer)
        for name, value in vars(trainer).items():
            if isinstance(value, dict | list) and name != "_memory_tracker":
                vars(apart)[name] = copy.deepcopy(value)
        return type(trainer).compute_loss(apart, module.inner, inputs, num_items_in_batch=count)  # type: ignore[no-any-return]

    module = LossOf(trainer.model, loss_of)

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **others: Any
    ) -> Any:
        if return_outputs or not model.training:
            return compute(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **others
            )
        module.arguments = (model,)
        return module(inputs, num_items_in_batch)

    trainer.compute_loss = compute_loss
    return module


def steps_of_lightning(inner: Any) -> LossOf:
    """Wraps a LightningModule's `training_step` as a module: Lightning calls no `forward`. A copy logs nothing."""

    def loss_of(module: LossOf, batch: Any) -> Any:
        args, kwargs = module.arguments
        if module.is_copy:
            module.inner.log = module.inner.log_dict = lambda *_, **__: None
        return type(module.inner).training_step(module.inner, batch, *args, **kwargs)

    module = LossOf(inner, loss_of)

    def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        module.arguments = args, kwargs
        return module(batch)

    inner.training_step = training_step
    return module


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
