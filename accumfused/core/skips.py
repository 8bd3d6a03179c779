"""The count of skipped steps, on the device, and a warning if most steps are skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core.graphs import is_capturing
from accumfused.warn import warn


class Skips:
    """Counts skipped steps. It never waits for the device: each look reads a copy begun some steps before."""

    WATCH_EVERY = 32  # steps between two looks

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = 0
        self._copy: Tensor | None = None  # of `count`, on the host
        self._arrived: torch.cuda.Event | None = None  # recorded behind the copy
        self._known = 0

    def look(self, *, or_above: bool) -> None:
        """Warns if most of the last steps were skipped; call it every WATCH_EVERY steps.

        Args:
            or_above: a norm above `skip_above` skips, too.
        """
        if is_capturing(self.count.device):
            return
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return  # the device has not made the last copy yet
        known = 0 if self._copy is None else int(self._copy)
        skipped, self._known = known - self._known, known
        self._copy = torch.empty_like(self.count, device="cpu", pin_memory=self.count.is_cuda)
        self._copy.copy_(self.count, non_blocking=True)
        if self.count.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(self.count.device))
        if skipped > self.WATCH_EVERY // 2:
            above = " or norms above skip_above" if or_above else ""
            warn(
                f"{skipped} of {self.WATCH_EVERY} steps were skipped because of non-finite gradients{above}; "
                "lower the learning rate or the loss scale, or look for NaN in the loss"
            )
