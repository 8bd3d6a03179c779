"""One global norm over several optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accumfused.core.engine import Divisors, Fingerprint, Measured, Taken
from accumfused.core.protocol import Outcome
from accumfused.core.window import Phase
from accumfused.formats.numeric import square_root
from accumfused.optimizer import FusedOptimizer
from accumfused.settings import check_max_grad_norm


def clip_together(optimizers: Sequence[FusedOptimizer], max_grad_norm: float) -> ClipTogether:
    """Clips the gradients of several optimizers by the norm over all of them, as one `clip_grad_norm_` would.

    The training loop stays as it is: each optimizer steps, after the last backward(). The first to step takes the norm
    for all, and a non-finite gradient of one makes all of them skip. `grad_norm` of each is the common norm.

    Args:
        optimizers: two or more of this package (`accumfused.fuse` makes them of others), each without a `max_grad_norm`
            of its own; changed: they are bound to each other, in copies too.
        max_grad_norm: > 0; inf takes the norm, and does not clip.

    Returns:
        The group; `max_grad_norm` may be set on it between steps.

    Raises:
        TypeError: an optimizer of another package; a `max_grad_norm` that is no number.
        ValueError: one that is not > 0; fewer than two optimizers; one listed twice, with a `max_grad_norm` of its own,
            or clipped together already; a parameter in two of them.

    Example:
        >>> muon, adamw = af.fuse(torch.optim.Muon(matrices)), af.AdamW(others)
        >>> af.clip_together([muon, adamw], max_grad_norm=1.0)
    """
    return ClipTogether(optimizers, max_grad_norm)


class ClipTogether:
    """What `clip_together` returns.

    The first member to step measures all of them, and leaves for each what it will step with (`Runtime.taken`). Until
    then their gradients must stay as they are; those of a member that does not step live on until the next time.
    """

    def __init__(self, optimizers: Sequence[FusedOptimizer], max_grad_norm: float) -> None:
        self.optimizers = list(optimizers)
        self.max_grad_norm = max_grad_norm
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
        self.refuse_shared([])
        for optimizer in self.optimizers:
            optimizer._together = self

    def refuse_shared(self, new: Sequence[Tensor]) -> None:
        """Refuses parameters (those that are to be added, too) of more than one optimizer."""
        params = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        params += map(id, new)
        if len(set(params)) != len(params):
            raise ValueError("a parameter is in two of the optimizers, and would count twice in the norm")

    @property
    def max_grad_norm(self) -> float:
        """What the common norm is clipped to; may be set between steps."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        check_max_grad_norm(value, "inf is off")
        self._max_grad_norm = value

    def measure(self, optimizer: FusedOptimizer, divisors: Divisors) -> Measured | None:
        """The gradients of a member that steps, with the coefficient that all members share."""
        runtime = optimizer._runtime
        if runtime.taken is None:
            self._measure_all(divisors)
        else:
            self._check_taken(divisors)
        taken, runtime.taken = runtime.taken, None
        if taken is None:
            raise RuntimeError("this is a shallow copy of an optimizer that is clipped together with others; step that")
        measured: Measured | None = taken.measured
        if measured is not None:
            current = optimizer._plan()  # since then a group may have come, or a parameter may lie elsewhere
            added = len(current.params) - len(measured.grads)
            grads = current.match([*measured.grads, *[None] * added])
            if current.lacks_state(grads):
                current = optimizer._with_states(current, grads)
            measured.plan, measured.matched = current, grads
            measured.complete &= not added
            if optimizer._counts_skips(divisors):
                assert runtime.skips is not None
                runtime.skips.count.add_(measured.outcome.skipped)
        return measured

    def forget(self, optimizer: FusedOptimizer) -> None:
        """The gradients of a member are gone, and where no other waits with its own, so is the norm."""
        optimizer._runtime.taken = None
        waiting = [member._runtime for member in self.optimizers if member._runtime.taken is not None]
        if all(runtime.taken.measured is None for runtime in waiting if runtime.taken is not None):
            for runtime in waiting:
                runtime.taken = None

    def follow_writes(self) -> None:
        """A member's step has written gradients: those of others may be views of the same buffer, and count it too."""
        for member in self.optimizers:
            if member._runtime.taken is not None:
                member._runtime.taken.fingerprint = _fingerprint(member)

    def _check_taken(self, divisors: Divisors) -> None:
        """Refuses to go on with a norm that is not that of the gradients of now."""
        for member in self.optimizers:
            taken = member._runtime.taken
            if taken is None:
                continue
            before = taken.divisors
            scaled_alike = (before.grad_scale is None) == (divisors.grad_scale is None)
            if not scaled_alike or not _same(before.normalizer, divisors.normalizer):
                raise RuntimeError(
                    "optimizers that are clipped together must all be stepped with the same normalizer, and all or "
                    "none of them unscaled by scaler.unscale_(); call zero_grad() on each to begin again"
                )
            if taken.fingerprint != _fingerprint(member):
                raise RuntimeError(
                    "gradients changed since the norm over all optimizers was taken, by the first of them to step; "
                    "step all of them after the last backward(), and call zero_grad() on each to begin again"
                )

    def _measure_all(self, divisors: Divisors) -> None:
        """Takes the norm over all members, for each of them to step with."""
        for member in self.optimizers:
            member._runtime.taken = None
        for member in self.optimizers:  # before any of them converts its states
            if member._runtime.release is not None:
                member._runtime.release.end_before_step()
            member._refuse_live(member._plan().gradients()[1])
            member._let_go()
        parts: list[Measured | None] = []
        for member in self.optimizers:
            try:
                parts.append(member._measure(divisors))
            finally:
                member._let_go()
        both = list(zip(self.optimizers, parts, strict=True))
        self._share([(member, part) for member, part in both if part is not None], divisors)
        for member, part in both:
            member._runtime.taken = Taken(part, divisors, _fingerprint(member))

    def _share(self, found: list[tuple[FusedOptimizer, Measured]], divisors: Divisors) -> None:
        """Puts the common norm, and one skip for all, into each member's outcome."""
        if not found:
            return
        device = found[0][1].plan.device
        own = torch.stack([_to(measured.outcome.values, device) for _, measured in found])
        coefficients, norms, skips = own.double().unbind(1)
        norm = square_root((norms * norms).sum().float()).double()
        clip = (torch.full_like(norm, self._max_grad_norm) / (norm + 1e-6)).clamp(max=1.0)
        skipped = skips.amax()
        if divisors.for_scaler or any(member._settings.nonfinite != "propagate" for member in self.optimizers):
            skipped = torch.maximum(skipped, (~norm.isfinite()).double())  # a sum may overflow where no part does
        rows = torch.stack([coefficients * clip, norm.expand_as(norms), skipped.expand_as(norms)], 1).float()
        for (_, measured), row in zip(found, rows, strict=True):
            measured.outcome = Outcome(_to(row, measured.plan.device))
            measured.matched = []  # copies of gradients in another layout need not live until its step


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Towards a GPU nothing waits; what comes to the CPU must be there."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _same(one: float | Tensor | None, other: float | Tensor | None) -> bool:
    """A tensor is not read."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr()
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _fingerprint(optimizer: FusedOptimizer) -> Fingerprint:
    """Which gradients a step would look at, and how often they were written: autograd adds to them in place."""
    window, grads = optimizer._runtime.window, optimizer._plan().gradients()[0]
    begun: Fingerprint = []
    optimizer._let_go()
    if window.phase is Phase.OPEN:
        grads = [*window.accumulators, *grads]
        begun = [(-1, window.micro_batches, 0)]  # also of a window without gradients
    return begun + [(row, id(grad), grad._version) for row, grad in enumerate(grads) if grad is not None]
