"""An audit of a training's first steps, whose report goes to the log."""

from __future__ import annotations

import logging
import sys
from typing import Any

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

    def begin(self, model: Module, optimizer: Optimizer, micro_batches: int | None) -> None:
        """Begins to watch; a block that is still open ends.

        Args:
            micro_batches: those of a window; None: as in most.
        """
        self.end()
        self._block = audit.watch(model, optimizer, gradient_accumulation_steps=micro_batches)
        self._report, self._left = self._block.__enter__(), _STEPS

    def step(self) -> None:
        """Counts a step."""
        self._left -= 1
        if self._left == 0:
            self.end()

    def end(self) -> None:
        """Logs the report: as a warning if it names a cause, else as information."""
        block, self._block = self._block, None
        if block is None or self._report is None:
            return
        block.__exit__(*sys.exc_info())  # an exception that ends the training has cut a window short
        level = logging.WARNING if self._report.causes else logging.INFO
        logging.getLogger("accumfused").log(level, "%s", self._report)
