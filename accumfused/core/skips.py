"""The count of skipped steps, on the device, and a warning if most steps are skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core.graphs import is_capturing
from accumfused.warn import warn


class Skips:
    """Counts skipped steps. It never waits for the device: each look reads a copy begun some steps before."""

    WATCH_EVERY = 32  # steps between two looks
    COPIED = 24  # of these, the steps after which the copy is begun

    def __init__(self, count: Tensor) -> None:
        self.count = count  # int64, shape []: skipped steps so far
        self.steps = 0
        self._copy: Tensor | None = None  # of `count`, on the host
        self._arrived: torch.cuda.Event | None = None  # recorded after the copy
        self._last: int | None = None  # at the last look

    def stepped(self, *, or_above: bool) -> None:
        """Counts a step, and looks now and then.

        Args:
            or_above: a norm above `skip_above` skips, too.
        """
        self.steps += 1
        place = self.steps % self.WATCH_EVERY
        if place == self.COPIED and not is_capturing(self.count.device):
            self._begin_copy()
        elif place == 0 and self._copy is not None:
            self._look(or_above=or_above)

    def _begin_copy(self) -> None:
        copy, arrived = torch.empty_like(self.count, device="cpu", pin_memory=self.count.is_cuda), None
        copy.copy_(self.count, non_blocking=True)
        if self.count.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self.count.device))
        self._copy, self._arrived = copy, arrived  # a copy that failed tells nothing

    def _look(self, *, or_above: bool) -> None:
        """Warns if a third of the steps since the last look were skipped; half of the first ones.

        At first a loss scale may still be falling.
        """
        if self._copy is None or (self._arrived is not None and not self._arrived.query()):  # type: ignore[no-untyped-call]
            return  # the device has not made the copy yet
        last, self._last = self._last, int(self._copy)
        steps, share = (self.COPIED, 2) if last is None else (self.WATCH_EVERY, 3)
        skipped = self._last - (last or 0)
        if skipped * share <= steps:
            return
        above, remedy = " or norms above skip_above", "; if optimizer.grad_norm is finite, raise skip_above"
        if not or_above:
            above = remedy = ""
        warn(
            f"{skipped} of {steps} steps were skipped because of non-finite gradients{above}; lower the learning rate "
            f"or the loss scale, or look for NaN in the loss{remedy}"
        )
