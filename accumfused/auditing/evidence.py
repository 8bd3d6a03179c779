"""What an audit has seen: micro-batches, and the windows that steps have made of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor

from accumfused.auditing.fit import TensorDifference
from accumfused.auditing.losses import Term

LOST = 0.01  # of the largest weight: micro-batches below did not reach the step
CLOSE = 0.02  # relative: two numbers that are the same but for rounding, in 16 bits, too


@dataclass
class MicroBatch:
    """One backward pass, or several from the same forward pass."""

    size: int = 0  # samples: the length of the first tensor that the model took; 0: unknown
    parts: int = 1  # losses of as many forward passes that were added up before backward
    rank: int = 0
    term: Term | None = None  # of its loss; None: the loss was not seen
    is_random: bool = False  # forward drew random numbers
    has_batch_norm: bool = False  # in training mode
    causes: set[str] = field(default_factory=set)  # that its loss shows
    has_arrived: bool = False  # a gradient of it is in p.grad
    is_used: bool = False  # a step has taken it
    grads: dict[int, Tensor] = field(default_factory=dict)  # on the host, by parameter, until the step

    @property
    def count(self) -> float:
        """Samples or tokens that its loss counts."""
        return self.term.count if self.term is not None else float(self.size or 1)

    @property
    def coefficient(self) -> float:
        """The number in front of each of the loss's terms."""
        return self.term.coefficient if self.term is not None else 1.0 / self.count

    @property
    def is_known(self) -> bool:
        """Whether count and coefficient come from the loss's graph."""
        return self.term is not None and self.term.is_known


@dataclass
class Window:
    """The micro-batches between two steps of an optimizer.

    Args:
        shares: for each micro-batch the weight of its terms in the step, times the terms of all: 1 is right.
        stale: the weight of the gradient that was there before the window.
        residual: the relative part of the step's gradient that no micro-batch explains.
        flags: causes seen as they happened.
        world: processes whose micro-batches these are.
        is_partial: other processes may have brought gradients that are not here.
        fits: the comparison with the large batch: all tensors, then each.
    """

    micro_batches: list[MicroBatch]
    shares: list[float]
    stale: float
    residual: float
    flags: set[str]
    world: int = 1
    is_partial: bool = False
    fits: list[TensorDifference] = field(default_factory=list)

    def scale(self, expected: int) -> float | None:
        """Which of `scales` the step's gradient has; None: none of them."""
        return next((scale for scale in self.scales(expected) if is_close(self.ratio, scale)), None)

    def arrived(self, expected: int) -> int:
        """Micro-batches of each process; several may share one backward pass."""
        parts = sum(each.parts for each in self.micro_batches) // self.world
        return parts if parts == expected else len(self.micro_batches) // self.world

    @property
    def lost(self) -> list[bool]:
        """Flags micro-batches that neither this step nor another optimizer's has taken."""
        largest = max(abs(share * each.count) for share, each in self._pairs)
        weak = [abs(share * each.count) < LOST * largest for share, each in self._pairs]
        return [
            is_weak and each.count > 0 and not each.is_used
            for is_weak, each in zip(weak, self.micro_batches, strict=True)
        ]

    @property
    def kept(self) -> list[tuple[float, MicroBatch]]:
        """Shares and micro-batches that the step has taken."""
        largest = max(abs(share * each.count) for share, each in self._pairs)
        return [pair for pair in self._pairs if abs(pair[0] * pair[1].count) >= LOST * largest]

    @property
    def ratio(self) -> float:
        """The size of the step's gradient beside the mean over all terms: 1, K if nobody has divided, 1 / K..."""
        everything = sum(each.count for each in self.micro_batches)
        return sum(share * each.count for share, each in self._pairs) / everything if everything else 1.0

    @property
    def _pairs(self) -> list[tuple[float, MicroBatch]]:
        return list(zip(self.shares, self.micro_batches, strict=True))

    def scales(self, expected: int) -> list[float]:
        """The ratios that the loss itself explains: numbers in front of it, and sums in place of means."""
        arrived = self.arrived(expected)
        term = next((each.term for each in self.micro_batches if each.term is not None), None)
        if term is None:
            return [1.0]
        parts = {1.0, 1.0 / expected, float(expected), 1.0 / arrived, float(arrived)}
        own = [
            abs(factor)
            for factor in term.factors
            if factor not in term.scales and not any(is_close(abs(factor), part) for part in parts)
        ]
        found = [math.prod(some) for n in range(len(own[:6]) + 1) for some in itertools.combinations(own[:6], n)]
        if not term.is_known:
            found += [float(arrived), float(expected)]  # it may be a sum
        if not term.is_mean:
            terms = sum(each.count for each in self.micro_batches)
            found += [terms, terms / (sum(each.size for each in self.micro_batches) or 1.0)]
        return found


def is_close(one: float, other: float) -> bool:
    """Whether two numbers are the same up to rounding."""
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))
