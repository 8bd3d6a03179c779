"""A window's numbers: its weights, and by what each micro-batch is multiplied. docs/internals/arithmetic.md explains.

The k-th micro-batch enters as `sum <- sum + fp32(w_k / unit) * grad`. The unit is the first weight that is not 0 (1
without weights), and the step divides by the sum of these factors. So equal weights make autograd's own sum, and a
window of one micro-batch has its gradients unchanged. A gradient that has its weight already, from its loss, lacks a
factor of 1 and not of w. Where processes add up their windows, or gradients are means over processes, the unit is 1.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.protocol import Number, on_device

LARGEST_RATIO = 2.0**40  # of a host weight to the first: squares of sums stay in fp32's range


@dataclass
class MicroBatch:
    """The micro-batch in progress: it is counted once, and one fold or several bring its gradients.

    Args:
        factor: of its gradients; None leaves them out.
        before: the window's total weight before this micro-batch, where the device alone knows it: see `Fold`.
    """

    factor: Number | None
    before: Tensor | None = None
    indices: frozenset[int] = field(default_factory=frozenset)  # rows that got a gradient in it; only with `before`


@dataclass(frozen=True)
class WindowWeights:
    """The numbers of the micro-batches so far. A tensor among them is fp64, of shape [], and is not read."""

    is_weighted: bool | None = None  # None: no micro-batch yet
    count: int = 0  # micro-batches
    unit: Number = 1.0
    total: Number = 0.0
    factors: Number = 0.0  # the sum of the factors, as rounded: the divisor of sums of this process alone
    dropped: Tensor | None = None  # whether a micro-batch was left out as not finite: bool, shape []; None: none is

    def check(self, weight: Number | None, plan: Plan, *, in_loss: bool) -> None:
        """Refuses a weight among micro-batches without one, the reverse, and one that is far larger than the first.

        Raises:
            ValueError: that.
        """
        if self.is_weighted is not None and self.is_weighted != (weight is not None):
            raise ValueError(
                "weights for some micro-batches of a window only; this one began "
                f"{'with' if self.is_weighted else 'without'} weights: give one to every micro-batch, or to none"
            )
        # (A unit that the device knows is that of weights that the device knows.)
        if weight is None or isinstance(self.total, Tensor) or self.total == 0 or not plan.exchange.is_alone:
            return
        multiplier = 1.0 if in_loss else weight
        if not isinstance(multiplier, Tensor) and multiplier > LARGEST_RATIO * self.unit:
            raise ValueError(
                f"the weight {multiplier} is more than 2^40 times {self.unit}, that of the window's first micro-batch "
                "(in a loss it counts as 1), and squares of the sum could leave fp32's range; give all weights in one "
                "unit, as numbers of tokens are"
            )

    def check_total(self, weight: Number | None = 0.0) -> None:
        """Refuses to end a window whose weights, this one included, are all zero.

        Raises:
            ValueError: they are.
        """
        if self.is_weighted is False or weight is None:
            return
        if not isinstance(self.total, Tensor) and not isinstance(weight, Tensor) and self.total + weight == 0:
            raise ValueError(
                "the weights of this window are all zero, so it has no mean; call zero_grad() in place of the step"
            )

    def in_unit_one(self, plan: Plan) -> tuple[WindowWeights, Number] | None:
        """Converts a window that began without other processes to the unit 1, that of windows that are added up.

        Returns:
            The numbers, and the factor for the window's sums. None: they have this unit.
        """
        if not self.is_weighted or (not isinstance(self.unit, Tensor) and self.unit == 1.0):
            return None
        return replace(self, unit=1.0, factors=self.factors * _rounded(self.unit, plan.dtype)), self.unit

    def entered(
        self, weight: Number | None, plan: Plan, *, in_loss: bool, is_finite: Tensor | None
    ) -> tuple[WindowWeights, MicroBatch]:
        """Returns the numbers with one more micro-batch, and its factor.

        A tensor is not read: a bad weight makes the divisor NaN. All tensors are new, because a launch may still read
        the old ones, and copies of the window share them.

        Args:
            is_finite: whether the micro-batch's norm is, so that it stays: bool, shape []; None: it stays.
        """
        dropped = self.dropped
        if is_finite is not None:
            dropped = ~is_finite if dropped is None else dropped | ~is_finite
        exchange = plan.exchange
        counted = replace(self, is_weighted=weight is not None, count=self.count + 1, dropped=dropped)
        if weight is None:
            if is_finite is None:
                return counted, MicroBatch(1.0)
            weight, in_loss = 1.0, False
        if isinstance(weight, Tensor):
            weight = on_device(weight, plan.device, torch.float64)
            weight = torch.where((weight >= 0) & weight.isfinite(), weight, torch.nan)
        elif weight == 0 and not exchange.has_means:  # else other processes' weights may differ
            return counted, MicroBatch(None)
        if is_finite is not None:
            weight = weight_if(is_finite, weight)
        multiplier: Number = 1.0 if in_loss else weight  # that the gradients lack
        before, unit = None, self.unit
        if exchange.has_means:
            factor: Number = 1.0 if is_finite is None else is_finite.double()
        elif exchange.adds_up:
            factor = _nothing_of_zero(weight, multiplier)
        elif isinstance(self.total, Tensor):
            before = self.total
            unit = _either(torch.eq(before, 0), multiplier, unit)
            factor = _nothing_of_zero(weight, multiplier / unit)
        elif self.total == 0:  # whatever the device holds: if it is 0, the next micro-batch overwrites
            unit, factor = multiplier, 1.0
        else:
            factor = _nothing_of_zero(weight, multiplier / unit)
        added = _rounded(factor, plan.dtype) * (weight if in_loss else 1.0)
        factors = self.factors + added
        if before is not None:
            factors = _either(before == 0, added, factors)
        return replace(counted, unit=unit, total=self.total + weight, factors=factors), MicroBatch(factor, before)

    @property
    def divisor(self) -> Number:
        """By what the sums of this process alone are to be divided; NaN if they hold nothing."""
        if not self.is_weighted:
            return _either(~(self.total > 0), math.nan, 1.0) if isinstance(self.total, Tensor) else 1.0
        if not isinstance(self.total, Tensor):
            return self.factors
        return _either(~(self.total > 0), math.nan, self.factors)

    def on(self, device: torch.device) -> WindowWeights:
        """Moves the tensors among the numbers to a device: those of a resumed window lie on the host."""
        unit, total, factors = (
            on_device(number, device, torch.float64) if isinstance(number, Tensor) else number
            for number in (self.unit, self.total, self.factors)
        )
        dropped = None if self.dropped is None else self.dropped.to(device)
        return replace(self, unit=unit, total=total, factors=factors, dropped=dropped)

    def saved(self, total: Number, device: torch.device) -> Tensor:
        """Returns the numbers for `resumed`: fp64 [4], unit, total, sum of the factors, count.

        The unit is negative if the device knows the weights, the count for a plain sum, the sum of the factors if a
        micro-batch was dropped.

        Args:
            total: the sum of the weights, or the mean of the processes' sums, which is then that of the factors, too.
        """
        factors = self.factors if total is self.total else total
        unit = -self.unit if isinstance(self.total, Tensor) else self.unit
        count = self.count if self.is_weighted else -self.count
        saved = torch.empty(4, dtype=torch.float64, device=device)
        for place, number in zip(saved.unbind(), (unit, total, factors, count), strict=True):
            place.fill_(number)  # not assigned: to assign a number would wait for a GPU
        if self.dropped is not None:
            saved[2].copy_(torch.where(self.dropped.to(device), -saved[2], saved[2]))
        return saved

    @classmethod
    def resumed(cls, numbers: Sequence[float]) -> WindowWeights:
        """Makes the weights of a checkpoint's numbers."""
        unit, saved_total, factors, count = numbers
        total: Number = saved_total
        if not math.isfinite(saved_total) or (saved_total == 0 and math.copysign(1.0, unit) < 0):
            total = torch.tensor(saved_total, dtype=torch.float64, device="cpu")  # skips the step, and does not raise
        dropped = torch.tensor(True, device="cpu") if math.copysign(1.0, factors) < 0 else None
        return cls(count > 0, abs(int(count)), abs(unit), total, abs(factors), dropped)


def weight_if(is_finite: Tensor, weight: Number | None) -> Tensor:
    """Returns the weight of a micro-batch (None: 1), or 0 if it is dropped: fp64, shape []."""
    number = 1.0 if weight is None else weight
    if not isinstance(number, Tensor):
        number = torch.full_like(is_finite, number, dtype=torch.float64)
    number = on_device(number, is_finite.device, torch.float64)
    return torch.where(is_finite, number, torch.zeros_like(number))


def _rounded(factor: Number, dtype: torch.dtype) -> Number:
    """Rounds the factor to the kernels' dtype, once, as they multiply by it."""
    if dtype == torch.float64:
        return factor
    return factor.float().double() if isinstance(factor, Tensor) else ctypes.c_float(factor).value


def _nothing_of_zero(weight: Number, factor: Number) -> Number:
    """Makes the factor 0 for a weight of 0 on the device: a masked mean of nothing is NaN, also times 0 in the loss."""
    return _either(weight == 0, 0.0, factor) if isinstance(weight, Tensor) else factor


def _either(condition: Tensor, one: Number, other: Number) -> Tensor:
    """Chooses one of two numbers on the device, in fp64."""
    other = other if isinstance(other, Tensor) else torch.full_like(condition, other, dtype=torch.float64)
    return torch.where(condition, one, other)
