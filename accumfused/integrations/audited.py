"""An audit of a training's first steps, whose report goes to the log."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from accumfused.auditing.calls import audit
from accumfused.auditing.report import AuditReport

_STEPS = 4


class FirstSteps:
    """Watches from `begin` until so many calls of `step`, or `end`; then logs the report, and lets go of the loop."""

    def __init__(self) -> None:
        self._block: Any = None  # while steps are watched
        self._report: AuditReport | None = None
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
        """Logs the report, in one process: as a warning if it names a cause, else as information."""
        block, self._block = self._block, None
        if block is None or self._report is None:
            return
        block.__exit__(*sys.exc_info())  # an exception that ends the training has cut a window short
        if _processes() == 1 or dist.get_rank() == 0:
            level = logging.WARNING if self._report.causes else logging.INFO
            logging.getLogger("accumfused").log(level, "%s", self._report)


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
