"""Windows that grow with the gradient noise scale."""

from __future__ import annotations

import math

from torch import Tensor

from accumfused.arguments import checked_positive, checked_whole
from accumfused.loop.batch_size import LrRule, scale_lr
from accumfused.optimizer import FusedOptimizer, check_fused


class NoiseScale:
    """The number of micro-batches in each window, from the noise scale so far: `af.windows(loader, NoiseScale(...))`.

    It grows and never shrinks, by at most a factor of two at a time. To look at the noise scale waits for the device.

    Args:
        optimizer: made with `noise_scale=True`.
        micro_batch: the weight of a micro-batch of one process, in the unit of the windows' weights; 1 for windows
            without weights. Processes with a `process_group` have as many in each window, and all grow alike.
        start: micro-batches in the first windows, >= 2.
        most: the largest number of micro-batches.
        every: windows between two looks.
        share: the batch as a multiple of the noise scale. With 1, training needs about twice the fewest updates and
            twice the fewest samples.
        rule: changes every group's learning rate as `scale_lr` does when the windows grow: "linear" or "sqrt". None:
            it stays, or a scheduler changes it.

    Attributes:
        steps: the present number of micro-batches; a resumed run gives it as `start`.

    Raises:
        TypeError: the optimizer is of another package.
        ValueError: the optimizer does not measure the noise scale; numbers that do not fit.

    Example:
        >>> optimizer = af.AdamW(model.parameters(), lr=3e-4, noise_scale=True)
        >>> growing = af.schedule.NoiseScale(optimizer, micro_batch=8, most=64, rule="sqrt")
        >>> for (x, y), last in af.windows(loader, growing):
        ...     loss_fn(model(x), y).backward()
        ...     optimizer.accumulate(len(y))
        ...     if last:
        ...         optimizer.step()
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        micro_batch: float = 1.0,
        *,
        start: int = 2,
        most: int = 1024,
        every: int = 10,
        share: float = 1.0,
        rule: LrRule | None = None,
    ) -> None:
        check_fused(optimizer, "NoiseScale")
        if not optimizer._engine.settings.noise_scale:
            raise ValueError("the optimizer does not measure the noise scale; make it with noise_scale=True")
        if checked_whole(start, "start") < 2 or checked_whole(most, "most") < start:
            raise ValueError(f"start must be >= 2 (one micro-batch tells no noise) and <= most, got {start} and {most}")
        self.steps = start
        self._optimizer, self._most, self._rule = optimizer, most, rule
        self._every, self._windows = checked_whole(every, "every"), 0  # windows since the last look
        self._micro_batches_per_unit = checked_positive(share, "share") / checked_positive(micro_batch, "micro_batch")
        if rule is not None:
            scale_lr(1.0, 1, 1, rule)

    def __call__(self, update: int) -> int:
        """Returns the number of micro-batches in the window to come."""
        self._windows += 1
        if self._windows > self._every:
            self._windows = 1
            self._grow(float(self._optimizer.noise_scale()))
        return self.steps

    def _grow(self, noise_scale: float) -> None:
        bound = min(self._most, 2 * self.steps)
        group = self._optimizer._engine.settings.process_group
        size = noise_scale * self._micro_batches_per_unit / (1 if group is None else group.size())
        steps = max(self.steps, min(bound, math.ceil(size)) if math.isfinite(size) else bound)
        if steps == self.steps:
            return
        for group in self._optimizer.param_groups if self._rule is not None else ():
            factor = scale_lr(1.0, self.steps, steps, self._rule or "linear")
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
        self.steps = steps
