"""The gradient noise scale: means over windows, from the squares of each micro-batch's gradient and of their sum.

In: gradients before each fold, whose sums of squares the verb `norm` takes. Out: `NoiseEstimate`. McCandlish et al.
2018 (arXiv:1812.06162), appendix A.1; for micro-batches of unequal weights w with the sum W, and N of them:

    G = sum(w g) / W                                       a window's gradient
    signal = (N |G|^2 - sum(w |g|^2) / W) / (N - 1)        its mean is the squared norm of the true gradient
    noise = (sum(w |g|^2) - W |G|^2) / (N - 1)             its mean is the trace of the covariance, of weight 1

Where processes add up their windows, the sums go over the micro-batches of all of them: three numbers of each process
travel with its accumulators. Where gradients are means over processes before they are folded, g is such a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.norm import Measured
from accumfused.core.observer import Observer
from accumfused.core.plan import Plan
from accumfused.core.protocol import Call, Exchange, Number, Outcome, Scaling, moved, on_device
from accumfused.core.rows import Grads
from accumfused.core.window import Phase, Squares, Window
from accumfused.warn import warn


@dataclass(frozen=True)
class NoiseEstimate:
    """The gradient noise scale, as tensors of shape [] (fp64, on the device); to read one waits for the device.

    `float()` gives the noise scale, `str()` a line with all numbers.

    Attributes:
        noise_scale: `noise / signal`: the batch at which noise and gradient are equally large. In the unit of the
            windows' weights (samples or tokens, say); without weights in micro-batches, as they are folded. inf: no
            signal was found.
        signal: the squared norm of the true gradient.
        noise: the trace of the covariance of the gradient of one unit of weight.
        windows: how many windows have entered.
    """

    noise_scale: Tensor
    signal: Tensor
    noise: Tensor
    windows: Tensor

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers by name; waits for the device."""
        numbers = torch.stack([self.noise_scale, self.signal, self.noise, self.windows]).tolist()
        return dict(zip(("noise_scale", "signal", "noise", "windows"), numbers, strict=True))

    def __float__(self) -> float:
        return float(self.noise_scale)

    def __str__(self) -> str:
        return ", ".join(f"{name} {number:.4g}" for name, number in self.as_dict().items())


class Noise(Observer):
    """Means of signal and noise over windows, on the device; nothing waits for it.

    Args:
        decay: of the exponential means, for each window.
    """

    def __init__(self, decay: float) -> None:
        self.means: Tensor | None = None  # fp64 [signal, noise, the weight of both, windows]; see saving/history.py
        self._decay = decay
        self._sample: tuple[Tensor, Tensor] | None = None  # signal and noise of the window whose step is to come
        self._empty_steps = 0  # before the first sample

    def check(self, exchange: Exchange, weight: Number | None) -> None:
        """Refuses gradients that are means over processes, with a weight: each process knows its own weight only.

        Raises:
            RuntimeError: weights of such gradients.
        """
        if weight is not None and exchange.has_means:
            raise RuntimeError(
                "the noise scale needs the weight of a micro-batch, and its gradients are means over processes, each "
                "with a weight of its own; leave the weights out (micro-batches of one size), or noise_scale="
            )

    def before_fold(self, plan: Plan, grads: Grads, window: Window, weight: Number | None, in_loss: bool) -> None:
        """Takes the squares of a micro-batch's gradients."""
        squares, count = _squares(plan, window), window.weights.count
        if squares is None or (not isinstance(weight, Tensor) and weight == 0):
            window.squares = None if squares is None else replace(squares, micro_batches=count)
            return
        partials = torch.zeros_like(squares.sums)
        plan.backend.norm(plan, grads, partials, Scaling(plan.device))
        share: Number = 1.0 if weight is None else weight
        if isinstance(share, Tensor):
            share = on_device(share, plan.device, torch.float64)
        parts = squares.parts
        if squares.micro_batches < count:  # else these are more of its gradients
            parts = parts + (share != 0)
        if in_loss and weight is not None:  # the gradient's square has the weight in it twice
            share = 1.0 / share
        if isinstance(share, Tensor):  # of weight 0, the gradients are those of nothing: NaN
            partials = torch.where(share.isfinite() & (share != 0), share * partials, 0.0)
        else:
            partials *= share
        window.squares = Squares(squares.sums + partials, count, parts)

    def numbers(self, plan: Plan, window: Window) -> Sequence[Tensor]:
        numbers, squares = torch.full((3,), torch.nan, dtype=torch.float64, device=plan.device), _squares(plan, window)
        if squares is not None and squares.micro_batches == window.weights.count:
            total = Exchange().sums_of_squares(plan, [squares.sums])[0]
            numbers = _numbers(total, squares, window)
        window.squares = replace(squares or Squares(numbers), added_up=numbers)
        return [numbers]

    def closed(self, plan: Plan, window: Window) -> None:
        """Measures accumulators whose norm is unknown."""
        unmeasured = window.unmeasured(plan, window.sums) if _has_noise(plan, window) else None
        if unmeasured is not None:
            plan.backend.norm(plan, plan.reader.match(unmeasured), window.partials, Scaling(plan.device))
            window.is_measured = [True] * len(unmeasured)

    def before_step(self, measured: Measured, window: Window, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes a sample from a window that is complete, and whose sums are measured."""
        plan, exchange = measured.plan, measured.plan.exchange
        scaling, self._sample = measured.scaling, None  # it has the divisors of an open window's weights, too
        if window.phase is Phase.IDLE or not _has_noise(plan, window):
            if self.means is None:
                self._watch_empty_steps()
            return
        if window.phase is Phase.CLOSED:
            self.closed(plan, window)  # an error may have kept it
        window_squares = window.squares
        assert window_squares is not None
        if window_squares.added_up is not None:
            numbers, whole = window_squares.added_up, exchange.sums_of_squares(plan, [window.partials])[0]
        else:
            squares, whole = exchange.sums_of_squares(plan, [window_squares.sums, window.partials]).unbind()
            numbers = _numbers(squares, window_squares, window)
        squares, parts, total = numbers.unbind()
        divisor: Number = scaling.normalization
        if scaling.device_normalization is not None:
            divisor = divisor * scaling.device_normalization
        whole, rest = whole / (divisor * divisor), parts - 1
        # The micro-batches' own gradients are not in the unit of the sums, nor divided where these are.
        mean = window.agreed.divisor if window.agreed is not None else total if window.weights.is_weighted else 1.0
        divisor = divisor * mean / (window.divisor() if window.is_open else 1.0)
        squares = squares * total / (divisor * divisor)
        self._sample = (parts * whole - squares) / rest, (squares - whole) * total / rest
        if self.means is None or self.means.device != whole.device:
            graphs.refuse_new_tensors({whole.device})  # `with_step` makes them

    def _watch_empty_steps(self) -> None:
        """Warns at the second step of a loop that has nothing to measure. (One may be a remainder, or resumed.)"""
        if self._empty_steps == 1:
            warn(
                "noise_scale= measures nothing in this loop, whose steps take one micro-batch each; call accumulate() "
                "for two or more before each step, or let several processes add up theirs (process_group=), or leave "
                "noise_scale= out"
            )
        self._empty_steps += 1

    def with_step(self, outcome: Outcome) -> Sequence[Call[Any]]:
        """Adds the sample to the means, unless the step is skipped or the sample is not finite."""
        if self._sample is None:
            return []
        sample, self._sample = torch.stack(self._sample), None
        means = sample.new_zeros(4) if self.means is None else moved(self.means, sample.device)
        rest = 1.0 - self._decay
        terms = torch.cat([sample, torch.ones_like(sample[:1])])
        updated = torch.cat([means[:3] * self._decay + terms * rest, means[3:] + 1.0])
        is_good = sample.isfinite().all() & ~outcome.skipped.to(sample.device)
        return [partial(means.copy_, torch.where(is_good, updated, means)), partial(setattr, self, "means", means)]

    def estimate(self) -> NoiseEstimate:
        """Makes an estimate from the means so far.

        Raises:
            RuntimeError: no window of two or more micro-batches has been stepped.
        """
        if self.means is None:
            raise RuntimeError(
                "no window of two or more micro-batches was stepped yet, so there is no noise scale; call it after "
                "accumulate(), accumulate(), step(). (A window that was resumed from a checkpoint does not count)"
            )
        signal, noise = (self.means[:2] / self.means[2]).unbind()
        ratio = torch.where(signal > 0, noise / signal, torch.inf)
        return NoiseEstimate(ratio, signal, noise, self.means[3].clone())


def _squares(plan: Plan, window: Window) -> Squares | None:
    """Returns the squares of the window so far; None: it was resumed, or its chunks have changed."""
    squares = window.squares
    if squares is None:
        zeros = torch.zeros(plan.chunks, dtype=plan.dtype, device=plan.device)
        return Squares(zeros) if window.weights.count <= 1 else None
    return squares if (squares.sums.device, len(squares.sums)) == (plan.device, plan.chunks) else None


def _has_noise(plan: Plan, window: Window) -> bool:
    """Tells whether the squares are those of all the window's micro-batches, and these more than one."""
    if window.squares is not None and window.squares.added_up is not None:
        return True
    squares = _squares(plan, window)
    if squares is None or squares.micro_batches != window.weights.count:
        return False
    return isinstance(squares.parts, Tensor) or squares.parts > 1


def _numbers(sum_of_squares: Tensor, squares: Squares, window: Window) -> Tensor:
    """Makes fp64 [3], which processes add up: a window's weighted sum of squares, its micro-batches, and its weight."""
    numbers = sum_of_squares.new_zeros(3)
    total = window.weights.total if window.weights.is_weighted else squares.parts
    for place, number in zip(numbers.unbind(), (sum_of_squares, squares.parts, total), strict=True):
        place.add_(number)  # not assigned: to assign a number would wait for a GPU
    return numbers
