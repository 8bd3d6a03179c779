"""Clip policies on the device: from sums of squares of tensors or groups to a coefficient for each row, or for all.

A few elementwise fp64 operations of torch, each of them IEEE's, so that all backends have the same bits. Nothing waits
for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused.clip import Clip, PerTensor, RunningMean, ZScore, group_limits
from accumfused.core import graphs
from accumfused.core.norm import clipped, divisor_of, norms, take_norm
from accumfused.core.plan import Plan
from accumfused.core.protocol import Call, Divisors, Outcome, Owner, Scaling, Segments, moved
from accumfused.core.rows import Grads
from accumfused.formats.numeric import LEAST_DIVISOR, ieee
from accumfused.rules.on_tensors import square_root
from accumfused.settings import Settings, refuse_settings_of_groups


@dataclass
class Policies:
    """The policies of one step, checked."""

    clip: Clip | None
    limits: list[float] | None  # per group
    skip_above: float | RunningMean | None

    def check(self, divisors: Divisors) -> None:
        """Refuses a tiny divisor where tensors or groups have a norm each.

        Squares of small gradients vanish in fp32, and such a divisor would make them large: the norm of a tensor of
        zeros could be any number. One norm over all gradients is rarely as small.
        """
        if not self.has_several:
            return
        divisor = 1.0
        for number in (divisors.normalizer, divisors.grad_scale):
            divisor *= 1.0 if number is None or isinstance(number, Tensor) else number
        if divisor < LEAST_DIVISOR:
            raise ValueError(
                f"the gradients are to be divided by {divisor}, which is below 2^-50: fp32 loses norms of tensors or "
                "groups there, those of zeros too; multiply the loss instead, or clip by one norm (max_grad_norm)"
            )

    @property
    def has_several(self) -> bool:
        """Whether tensors or groups have a norm each."""
        return self.limits is not None or isinstance(self.clip, PerTensor)

    @property
    def of_history(self) -> tuple[ZScore | None, RunningMean | None]:
        """The policies that keep a history."""
        return (
            self.clip if isinstance(self.clip, ZScore) else None,
            self.skip_above if isinstance(self.skip_above, RunningMean) else None,
        )


class Clipping:
    """Applies an optimizer's policies, and keeps their history."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # fp64 [2, 3]: of ZScore's norms and of RunningMean's their number, mean, and variance. None: none was seen.
        self.history: Tensor | None = None
        self._segments: WeakKeyDictionary[Plan, tuple[bool, Segments]] = WeakKeyDictionary()

    @property
    def of_history(self) -> tuple[ZScore | None, RunningMean | None]:
        """The policies that keep a history, in the order of its rows."""
        return Policies(self.settings.clip, None, self.settings.skip_above).of_history

    def resume(self, history: Tensor | None) -> None:
        """Goes on from a checkpoint's history, if a policy keeps one."""
        self.history = history if any(self.of_history) else None

    def policies(self, param_groups: Sequence[Mapping[str, Any]]) -> Policies | None:
        """Returns the policies of a step, or None: one coefficient from one norm.

        Raises:
            ValueError, TypeError: limits of groups that are wrong, or missing.
        """
        clip, skip_above = self.settings.clip, self.settings.skip_above
        limits = group_limits(clip, self.settings.max_grad_norm, param_groups)
        return None if clip is None and limits is None and skip_above is None else Policies(clip, limits, skip_above)

    def policies_of_step(self, owner: Owner, divisors: Divisors) -> Policies | None:
        """Returns `policies`, and refuses divisors too small for several norms. None within a ClipGroup: it has one."""
        refuse_settings_of_groups(owner.rules, owner.param_groups, owner.defaults)
        policies = None if divisors.is_shared else self.policies(owner.param_groups)
        if policies is not None:
            policies.check(divisors)
        return policies

    def take_norm(
        self, policies: Policies, plan: Plan, unmeasured: Grads | None, partials: Tensor, scaling: Scaling
    ) -> Outcome:
        """Takes the norm, and clips by these policies; `unmeasured`: gradients whose squares `partials` lacks."""
        plain = replace(scaling, skips=None)
        if policies.clip is not None or policies.limits is not None:
            plain.max_grad_norm = None
        outcome = take_norm(plan, unmeasured, partials, plain)
        on_gpu = scaling.device.type != "cpu"  # which has no other float mode
        with contextlib.nullcontext() if on_gpu else ieee():
            norm, skipped = outcome.norm.double(), outcome.skipped
            limit, history = torch.full_like(norm, torch.inf), self._history(policies, norm.device)
            if isinstance(policies.clip, ZScore):
                limit = _limit(policies.clip, history[0], norm)
                outcome.values[0].copy_(divisor_of(scaling)[1] * clipped(norm, limit, scaling.dtype))
            elif policies.has_several:
                coefficients = self._coefficients(policies, plan, partials, scaling)
                if scaling.skips_nonfinite:
                    skipped = skipped | ~coefficients.isfinite().all()
                outcome.coefficients = coefficients
            if policies.skip_above is not None:
                outcome.is_above = _is_above(policies.skip_above, history, norm) & ~skipped
                skipped = skipped | outcome.is_above
            outcome.values[2].copy_(skipped)
            histories = list(history)
            both = zip(history, policies.of_history, (torch.minimum(norm, limit), norm), strict=False)
            for index, (last, policy, sample) in enumerate(both):
                if policy is not None:  # a norm of 0 tells nothing about the next
                    counts = ~skipped & sample.isfinite() & (sample > 0)
                    histories[index] = torch.where(counts, _with(last, sample, policy.decay, policy.warmup), last)
            outcome.history = torch.stack(histories) if histories else None
            if scaling.skips is not None:
                scaling.skips.add_(skipped)
        return outcome

    def keeping(self, history: Tensor) -> Call[Any]:
        """Makes the call that keeps the history of an outcome; the tensor stays, for CUDA graphs."""
        assert self.history is not None
        return partial(self.history.copy_, history)

    def _coefficients(self, policies: Policies, plan: Plan, partials: Tensor, scaling: Scaling) -> Tensor:
        """Computes each row's coefficient, from the norm of its tensor or group: [rows]."""
        segments = self._segments_of(plan, per_group=policies.limits is not None)
        divisor, inverse = divisor_of(scaling)
        norm = norms(plan.exchange.segment_norms(plan, partials, segments), divisor, inverse, scaling.dtype)
        if policies.limits is not None:
            limits = [torch.full_like(inverse, limit) for limit in policies.limits]  # numbers travel in launches
            limit = torch.stack(limits)
        else:
            assert isinstance(policies.clip, PerTensor)
            limit = torch.full_like(norm, policies.clip.max_norm)
        coefficients = (inverse * clipped(norm, limit, scaling.dtype)).to(scaling.dtype)
        return coefficients if segments.of_rows is None else coefficients[segments.of_rows]

    def _segments_of(self, plan: Plan, *, per_group: bool) -> Segments:
        entry = self._segments.get(plan)
        if entry is None or entry[0] != per_group:
            graphs.refuse_new_tensors({plan.device})
            entry = self._segments[plan] = per_group, Segments.of(plan, per_group=per_group)
        return entry[1]

    def _history(self, policies: Policies, device: torch.device) -> Sequence[Tensor]:
        """Returns the history, a tensor for each of `of_history`; empty if no policy keeps one."""
        if not any(policies.of_history):
            return ()
        if self.history is None:
            graphs.refuse_new_tensors({device})
            self.history = torch.zeros(2, 3, dtype=torch.float64, device=device)
        elif self.history.device != device:
            self.history = moved(self.history, device)
        return self.history.unbind()


def _limit(clip: ZScore, history: Tensor, norm: Tensor) -> Tensor:
    """Computes the limit of a norm that lies too far above the mean; infinity for others."""
    count, mean, variance = history.unbind()
    deviation = square_root(variance.float()).double()
    z = (norm - mean) / (deviation + 1e-6)
    limit = mean + torch.full_like(z, clip.threshold * clip.threshold) / z * deviation
    return torch.where((count >= clip.warmup) & (z > clip.threshold), limit, torch.inf)


def _is_above(limit: float | RunningMean, history: Sequence[Tensor], norm: Tensor) -> Tensor:
    if not isinstance(limit, RunningMean):
        return norm > limit
    count, mean, _ = history[1].unbind()
    return (count >= limit.warmup) & (norm > mean * limit.times)


def _with(history: Tensor, norm: Tensor, decay: float, warmup: int) -> Tensor:
    """Adds a norm to number, mean and variance: those of all norms up to the end of the warm-up, exponential then."""
    count, mean, variance = history.unbind()
    is_warm = count < warmup
    share = torch.where(is_warm, torch.ones_like(count) / (count + 1.0), 1.0 - decay)
    new_mean = mean + (norm - mean) * share
    away = norm - torch.where(is_warm, mean, new_mean)
    return torch.stack([count + 1.0, new_mean, variance + (away * (norm - new_mean) - variance) * share])
