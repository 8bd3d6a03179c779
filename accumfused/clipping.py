"""One global norm over several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused.backends.base import Outcome, on_device
from accumfused.numeric import square_root
from accumfused.optimizer import FusedOptimizer
from accumfused.plan import Grads
from accumfused.settings import Settings
from accumfused.tail import Divisors, Measured

Fingerprint = list[tuple[int, int, int]]


def clip_together(optimizers: Sequence[FusedOptimizer], max_grad_norm: float) -> ClipTogether:
    """Clips the gradients of several optimizers by the norm over all of them, as one `clip_grad_norm_` would.

    The training loop stays as it is: each optimizer steps, after the last backward(). The first to step takes the norm
    for all, and a non-finite gradient of one makes all of them skip. `grad_norm` of each is the common norm.

    Args:
        optimizers: two or more of this package (`accumfused.fuse` makes them of others), each without a `max_grad_norm`
            of its own; changed: they are bound to each other, in copies too.
        max_grad_norm: as in `accumfused.Adam`.

    Returns:
        The group; `max_grad_norm` may be set on it between steps.

    Raises:
        TypeError: an optimizer of another package, or a wrong `max_grad_norm`.
        ValueError: fewer than two; one listed twice, with a `max_grad_norm` of its own, or clipped together already; a
            parameter in two of them.

    Example:
        >>> muon, adamw = af.fuse(torch.optim.Muon(matrices)), af.AdamW(others)
        >>> af.clip_together([muon, adamw], max_grad_norm=1.0)
    """
    return ClipTogether(optimizers, max_grad_norm)


class ClipTogether:
    """What `clip_together` returns."""

    def __init__(self, optimizers: Sequence[FusedOptimizer], max_grad_norm: float) -> None:
        self.optimizers = list(optimizers)
        self.max_grad_norm = max_grad_norm
        self._measured: dict[FusedOptimizer, tuple[Measured | None, Fingerprint]] = {}  # by the step of another one
        self._divisors: Divisors | None = None
        for optimizer in self.optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise TypeError(
                    f"clip_together takes optimizers of this package, got {type(optimizer).__name__}; "
                    "convert it with accumfused.fuse()"
                )
            if optimizer.max_grad_norm is not None:
                raise ValueError("one of the optimizers has a max_grad_norm of its own; give it to clip_together alone")
            if optimizer._together is not None:
                raise ValueError("one of the optimizers is clipped together with others already")
        if len(set(self.optimizers)) != len(self.optimizers) or len(self.optimizers) < 2:
            raise ValueError(f"clip_together takes two or more different optimizers, got {len(self.optimizers)}")
        params = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(set(params)) != len(params):
            raise ValueError("a parameter is in two of the optimizers, and would count twice in the norm")
        for optimizer in self.optimizers:
            optimizer._together = self

    @property
    def max_grad_norm(self) -> float:
        """What the common norm is clipped to; may be set between steps."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value is None:
            raise TypeError("max_grad_norm must be a number, got None; use inf for no clipping")
        Settings(max_grad_norm=value)  # checks it
        self._max_grad_norm = value

    def measure(self, optimizer: FusedOptimizer, divisors: Divisors) -> Measured | None:
        """The gradients of a member that steps, with the coefficient that all members share."""
        if optimizer not in self._measured:
            self._measure_all(divisors)
            return self._measured.pop(optimizer)[0]
        before = self._divisors
        assert before is not None
        if (before.grad_scale is None) != (divisors.grad_scale is None) or not _same(
            before.normalizer, divisors.normalizer
        ):
            raise RuntimeError(
                "optimizers that are clipped together must all be stepped with the same normalizer, and all or none of "
                "them unscaled by scaler.unscale_(); call zero_grad() on each to begin again"
            )
        known, fingerprint = self._measured[optimizer]
        current = optimizer._plan()
        if fingerprint != _fingerprint(optimizer._runtime.window.accumulators or current.gradients()[0]):
            raise RuntimeError(
                "gradients changed since the norm over all optimizers was taken, by the first of them to step; step "
                "all of them after the last backward(), and call zero_grad() on each to begin again"
            )
        if known is not None:
            known.plan, known.matched = current, current.match(known.grads)
        del self._measured[optimizer]
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_measured": {}, "_divisors": None}  # a copy's gradients are its own

    def forget(self, optimizer: FusedOptimizer) -> None:
        """The gradients of a member are gone."""
        self._measured.pop(optimizer, None)

    def _measure_all(self, divisors: Divisors) -> None:
        """Takes the norm over all members, for each of them to step with."""
        self._measured, self._divisors = {}, divisors
        for member in self.optimizers:
            try:
                measured = member._measure(divisors)
            finally:
                member._let_go()
            self._measured[member] = measured, _fingerprint([] if measured is None else measured.grads)
        found = [(member, measured) for member, (measured, _) in self._measured.items() if measured is not None]
        if not found:
            return
        device = found[0][1].plan.device
        norms = torch.stack([on_device(measured.outcome.norm, device, torch.float64) for _, measured in found])
        norm = square_root((norms * norms).sum().float())
        limit = torch.full_like(norm, self._max_grad_norm, dtype=torch.float64)
        clip = (limit / (norm.double() + 1e-6)).clamp(max=1.0)
        skipped = torch.stack(
            [on_device(measured.outcome.values[2], device, torch.float32) for _, measured in found]
        ).amax()
        for member, measured in found:
            own = measured.outcome.values
            values = (own[0].double() * on_device(clip, own.device, torch.float64)).float()
            shared = [on_device(value, own.device, torch.float32) for value in (norm, skipped)]
            measured.outcome = Outcome(torch.stack([values, *shared]))
            assert member._runtime.skips is not None
            member._runtime.skips.count.add_(measured.outcome.skipped)


def _same(one: float | Tensor | None, other: float | Tensor | None) -> bool:
    """A tensor is not read."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _fingerprint(grads: Grads) -> Fingerprint:
    """Which tensors these are, and how often they were written: autograd adds to a gradient in place."""
    return [(row, id(grad), grad._version) for row, grad in enumerate(grads) if grad is not None]
