"""The gradient noise scale: means over windows of what the folds and the norm have summed anyway.

In: a window's sums of squares, of each micro-batch's own gradient and of their sum. Out: `NoiseEstimate`. McCandlish et
al. 2018 (arXiv:1812.06162), appendix A.1; for micro-batches of unequal weights w with the sum W, and N of them:

    G = sum(w g) / W                                       a window's gradient
    signal = (N |G|^2 - sum(w |g|^2) / W) / (N - 1)        its mean is the squared norm of the true gradient
    noise = (sum(w |g|^2) - W |G|^2) / (N - 1)             its mean is the trace of the covariance, of weight 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.protocol import Backend, Number, Scaling
from accumfused.core.rows import Grads
from accumfused.core.window import Phase, Window


@dataclass(frozen=True)
class NoiseEstimate:
    """The gradient noise scale, as tensors of shape [] (fp64, on the device); to read one waits for the device.

    Attributes:
        noise_scale: `noise / signal`: the batch at which noise and gradient are equally large. In the unit of the
            windows' weights (samples or tokens, say); without weights in micro-batches. inf: no signal was found.
        signal: the squared norm of the true gradient.
        noise: the trace of the covariance of the gradient of one unit of weight.
        windows: how many windows have entered.
    """

    noise_scale: Tensor
    signal: Tensor
    noise: Tensor
    windows: Tensor


class Noise:
    """Means of signal and noise over windows, on the device; nothing waits for it.

    Args:
        decay: of the exponential means, for each window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._means: Tensor | None = None  # fp64, [signal, noise, the weights of both, windows]
        self._sample: tuple[Tensor, Tensor] | None = None  # signal and noise of the window whose step is to come

    def check(self, plan: Plan) -> None:
        """Refuses gradients that are not those of one process's micro-batches.

        Raises:
            RuntimeError: parameters are shards.
        """
        if plan.is_spread:
            raise RuntimeError("parameters are DTensors, whose gradients are of all processes; leave noise_scale= out")

    def see(self, backend: Backend, plan: Plan, window: Window, grads: Grads, scaling: Scaling) -> None:
        """Takes a sample from a window that is complete, and whose norm is taken.

        Args:
            grads: the window's sums, as kernels read them.
            scaling: has the divisors of the step, those of an open window's weights among them.
        """
        self._sample = None
        sums, weights = window.sums, window.weights
        if window.phase is Phase.IDLE or sums.squares is None or weights.count < 2:
            return
        if window.phase is Phase.CLOSED:
            stale = sums.stale(grads)
            if stale is not None:
                backend.norm(plan, stale, sums.partials, Scaling(plan.device))
        bounds = torch.arange(3, device=plan.device) * plan.chunks
        own, whole = backend.segment_norms(plan, torch.cat([sums.squares, sums.partials]), bounds).unbind()
        divisor: Number = scaling.normalization
        if scaling.device_normalization is not None:
            divisor = divisor * scaling.device_normalization
        total = weights.total if weights.is_weighted else weights.parts
        own = own * total / (divisor * divisor)
        if window.phase is Phase.CLOSED and weights.is_weighted:
            own = own / (total * total)
        whole, rest = whole / (divisor * divisor), weights.parts - 1
        self._sample = (weights.parts * whole - own) / rest, (own - whole) * total * weights.unit / rest

    def take(self, skipped: Tensor) -> None:
        """Adds the sample to the means, unless the step was skipped or the sample is not finite."""
        if self._sample is None:
            return
        sample, self._sample = torch.stack(self._sample), None
        self._means = sample.new_zeros(4) if self._means is None else self._means.to(sample.device)
        known, rest = self._means, 1.0 - self._decay
        means = torch.cat([sample, torch.ones_like(sample[:1])])
        made = torch.cat([known[:3] * self._decay + means * rest, known[3:] + 1.0])
        is_good = sample.isfinite().all() & ~skipped.to(sample.device)
        known.copy_(torch.where(is_good, made, known))

    def estimate(self) -> NoiseEstimate:
        """The means so far.

        Raises:
            RuntimeError: no window of two or more micro-batches has been stepped.
        """
        if self._means is None:
            raise RuntimeError(
                "no window of two or more micro-batches was stepped yet, so there is no noise scale; call it after "
                "accumulate(), accumulate(), step(). (A window that was resumed from a checkpoint does not count)"
            )
        signal, noise = (self._means[:2] / self._means[2]).unbind()
        ratio = torch.where(signal > 0, noise / signal, torch.inf)
        return NoiseEstimate(ratio, signal, noise, self._means[3].clone())
