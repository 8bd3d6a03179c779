"""The weights of a window's micro-batches: their sum, and the factors that the kernels multiply by.

A fold is `accumulator <- factor of the accumulator * accumulator + factor of the micro-batch * grad`. The window adopts
the first micro-batch's gradients as they are: their accumulators wait for its weight (FIRST) until the next fold. Later
gradients get their weight at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accumfused.core.protocol import Exchange, Number, on_device, stacked

READY, FIRST, CURRENT, CLOSED = range(4)  # places of factors: 1, the first weight, this one's, 1 / closing scale
_EXPONENT = 0x7FF << 52  # the exponent's bits of an fp64 number


class Weights:
    """The weights of one window. Device tensors are not read: a bad one makes the norm non-finite."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Args: device: where the kernels run; None: no window is open."""
        self.device = device or torch.device("cpu")
        self.factors: list[Number] = [1.0] * 4  # by place; they travel in launches, a tensor is on the device
        self.is_weighted: bool | None = None  # None: no micro-batch yet
        self.total: Number = 0.0
        self.unit: Number = 1.0  # a power of two that divides the weights, so that squares stay in fp32's range
        self.count = 0  # folded micro-batches
        self.divisor: Number | None = None  # agreed by all processes; None: the total

    def add(self, weight: Number | None, exchange: Exchange, *, in_loss: bool) -> int | None:
        """Counts a micro-batch; its gradients have its weight in them already if that was `in_loss`.

        Returns:
            The place of its factor; None: it is left out.
        """
        self.is_weighted = weight is not None
        if weight is None:
            self.count += 1
            return READY
        if isinstance(weight, Tensor):
            weight = on_device(weight, self.device, torch.float64)
            weight = torch.where(weight >= 0, weight, torch.nan)  # so that the step is skipped
        is_first = not isinstance(self.total, Tensor) and self.total == 0
        if is_first and not in_loss and exchange.is_alone:
            self.unit = _power_of_two(weight)
        is_own = not (in_loss and exchange.has_means)  # other processes' weights may differ
        is_empty = not isinstance(weight, Tensor) and weight == 0
        if not is_empty:
            weight = weight / self.unit
            self.total = self.total + weight
        elif is_own:
            return None
        self.count += 1
        if not in_loss:
            return self._place(weight)
        if is_own and isinstance(weight, Tensor):
            return self._place((weight != 0).double() / self.unit)  # a masked mean of nothing is NaN, also times 0
        if isinstance(self.unit, Tensor) or self.unit != 1.0:
            return self._place(1.0 / self.unit)
        return READY

    def check(self, weight: Number | None) -> None:
        """Refuses to close a window whose weights, this one included, are all zero.

        Raises:
            ValueError: all are zero, and no other process has told its own.
        """
        if self.is_weighted is False or weight is None or self.divisor is not None:
            return
        if not isinstance(self.total, Tensor) and not isinstance(weight, Tensor) and self.total + weight == 0:
            raise ValueError(
                "the weights of this window are all zero, so it has no mean; call zero_grad() in place of the step"
            )

    @property
    def closing_scale(self) -> Number:
        """The factor of the sums when the window closes."""
        if self.divisor is not None:
            return 1.0 / self.divisor
        return 1.0 / self.total if self.is_weighted else 1.0

    def follow(self, device: torch.device) -> None:
        """Goes on with kernels of another device, which read a total that is a tensor there."""
        self.device = device
        if isinstance(self.total, Tensor):
            self.total = on_device(self.total, device, torch.float64)

    def close_in_parts(self) -> None:
        """Protects divided sums from the division of the others: the factor CLOSED is 1 over the scale."""
        self.factors[CLOSED] = self.total if self.is_weighted else 1.0

    def saved(self, places: list[int], total: Number) -> list[Tensor]:
        """The numbers of each accumulator for `restored`: fp64 [4], see saving/checkpoint.py.

        Args:
            places: the places of their factors.
            total: the sum of the weights.
        """
        unit = (-self.unit if isinstance(self.total, Tensor) else self.unit) if self.is_weighted else 0.0
        total, unit = (on_device(n, self.device, torch.float64) if isinstance(n, Tensor) else n for n in (total, unit))
        rows = {p: stacked([self.factors[p], total, self.count, unit], self.device) for p in set(places)}
        return [rows[place] for place in places]

    @classmethod
    def restored(cls, saved: list[float], first: float) -> Weights:
        """Restores weights: `saved` holds one accumulator's numbers, `first` the factor that others wait for."""
        _, total, count, unit = saved
        weights = cls(torch.device("cpu"))
        weights.factors[FIRST] = first
        is_read = unit >= 0 and math.isfinite(total)  # else the step skips it, and we do not raise
        weights.total = total if is_read else torch.tensor(total, dtype=torch.float64, device="cpu")
        weights.count, weights.is_weighted, weights.unit = int(count), unit != 0, abs(unit) or 1.0
        return weights

    def _place(self, factor: Number) -> int:
        place = FIRST if self.count == 1 else CURRENT
        self.factors[place] = factor
        return place


def _power_of_two(weight: Number) -> Number:
    """The power of two at or below a weight (1 for 0, inf and NaN): to divide by it keeps the mantissa."""
    if not isinstance(weight, Tensor):
        return math.ldexp(1.0, math.frexp(weight)[1] - 1) if weight > 0 else 1.0
    is_usual = (weight >= torch.finfo(weight.dtype).smallest_normal) & weight.isfinite()
    usual = torch.where(is_usual, weight, torch.ones_like(weight))
    return (usual.view(torch.int64) & _EXPONENT).view(torch.float64)
