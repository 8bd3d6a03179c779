"""From sums of squares to norms, and to the coefficients by which steps multiply their gradients.

Norms are those of one plan, of processes that share a norm, or of several plans together. The kernel with which a
backend ends a norm (csrc/norm.h) is here in PyTorch. Callers of `finish_norm`, and of the functions that it calls, keep
subnormals: see `formats.numeric.ieee`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.protocol import Number, Outcome, Scaling, moved
from accumfused.core.rows import Grads
from accumfused.core.window import Window
from accumfused.formats.numeric import LEAST_DIVISOR, LEAST_SUM, ieee
from accumfused.rules.on_tensors import square_root


def take_norm(plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
    """Takes the norm as `Backend.norm` does, over all processes that share it."""
    exchange = plan.exchange
    if partials is None or not exchange.shares_norm(plan):
        return plan.backend.norm(plan, grads, partials, scaling)
    plan.backend.norm(plan, grads, partials, Scaling(plan.device))
    scaling = replace(scaling, found_inf=exchange.found_inf(scaling.found_inf))
    with ieee():
        return finish_norm(exchange.sums_of_squares(plan, [partials])[0], scaling)


def finish_norm(sum_of_squares: Tensor | None, scaling: Scaling) -> Outcome:
    """Computes the outcome from the sum of squares, as `Backend.norm` does.

    Args:
        sum_of_squares: the sum over all gradients, fp64, shape []; None: the outcome has no norm.
        scaling: the other inputs of the coefficient.
    """
    device, dtype = scaling.device, scaling.dtype
    outcome = Outcome(torch.empty(3, dtype=dtype, device=device), normed=sum_of_squares is not None)
    divisor, inverse = divisor_of(scaling)
    norm = torch.zeros_like(divisor)
    if sum_of_squares is not None:
        norm = norms(sum_of_squares, divisor, inverse, dtype)
    clip = torch.ones_like(norm)
    if scaling.max_grad_norm is not None:
        clip = clipped(norm, torch.full_like(norm, scaling.max_grad_norm), dtype)
    coefficient = (inverse * clip).to(dtype)
    skipped = torch.zeros_like(norm, dtype=torch.bool)
    if scaling.skips_nonfinite:
        skipped = ~(norm.to(dtype).isfinite() & coefficient.isfinite())
    if scaling.found_inf is not None:
        skipped = skipped | (scaling.found_inf != 0)
    if scaling.skips is not None:
        scaling.skips.add_(skipped)
    outcome.values.copy_(torch.stack([coefficient, norm.to(dtype), skipped.to(dtype)]))
    return outcome


def divisor_of(scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Returns the gradients' divisor and its inverse, which is NaN if the divisor is bad: fp64, shape []."""
    divisor = torch.full((), scaling.normalization, dtype=torch.float64, device=scaling.device)
    if scaling.device_normalization is not None:
        divisor = divisor * scaling.device_normalization
    return divisor, torch.where((divisor > 0) & divisor.isfinite(), 1.0 / divisor, torch.nan)


def norms(squares: Tensor, divisor: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes norms of gradients, rounded to `dtype` and divided, from their sums of squares: fp64, of any shape."""
    is_lost = (squares < LEAST_SUM) & (divisor < LEAST_DIVISOR)
    return torch.where(is_lost, torch.nan, square_root(squares.to(dtype)).double() * inverse)


def clipped(norm: Tensor, limit: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the factors that bring norms, rounded to `dtype`, below their limits: fp64; a NaN stays a NaN."""
    return (limit / (norm.to(dtype).double() + 1e-6)).clamp(max=1.0)


@dataclass
class Measured:
    """The gradients of one step with their coefficient, ready to be applied."""

    plan: Plan
    taken: Window  # an open one, or one that borrows p.grad; its sums are the gradients
    matched: Grads  # these as the kernels read them
    outcome: Outcome
    scaling: Scaling
    divisor: Number  # the window's, which is in `scaling`, too
    partials: Tensor | None  # the chunks' sums of squares; None: it took no norm
    is_made: bool = False
    failures: list[Exception] = field(default_factory=list)  # of what follows the step, once it is made

    def count(self) -> None:
        """Counts the step's skip, where `Backend.norm` has not."""
        self.scaling.skips = self.plan.skips.count.add_(self.outcome.skipped)

    def uncount(self) -> None:
        """Takes back the skip of a step that fails."""
        if self.scaling.skips is not None and not self.is_made:
            self.scaling.skips.sub_(self.outcome.skipped.long())


def share(parts: Sequence[Measured], scaling: Scaling) -> None:
    """Gives several plans one norm, and coefficients that clip all of them by it.

    If their windows have one divisor, the chunks' sums of squares of all plans are added up in the order of one plan,
    so the bits are those of one optimizer with all parameters. Else each plan's sum is divided first.

    Args:
        parts: measured without a coefficient; each gets its outcome.
        scaling: what they have in common, on the first one's device and in the widest dtype: every divisor but their
            windows', and the limit.
    """
    # The backend of an fp64 plan reads the sums of others, too.
    device, leading = scaling.device, max((part.plan for part in parts), key=lambda plan: plan.dtype.itemsize)
    divisors = [part.divisor for part in parts]
    partials = [part.partials for part in parts if part.partials is not None]
    is_common = not any(isinstance(divisor, Tensor) or divisor != divisors[0] for divisor in divisors)
    with ieee():
        if is_common and not any(part.plan.exchange.shares_norm(part.plan) for part in parts):
            scaling.normalize(divisors[0])
            chunk_sums = torch.cat([moved(sums, device) for sums in partials])
            bounds = torch.arange(2, device=device) * len(chunk_sums)
            common = finish_norm(leading.backend.segment_norms(leading, chunk_sums, bounds)[0], scaling)
            coefficients = [common.coefficient] * len(parts)
        else:
            both = zip([part.plan for part in parts], partials, strict=True)
            sums = [moved(plan.exchange.sums_of_squares(plan, [chunks])[0], device) for plan, chunks in both]
            divisors = [moved(divisor, device) if isinstance(divisor, Tensor) else divisor for divisor in divisors]
            squares = [total / (divisor * divisor) for total, divisor in zip(sums, divisors, strict=True)]
            common = finish_norm(torch.stack(squares).sum(), scaling)
            coefficients = [(common.coefficient.double() / divisor).to(scaling.dtype) for divisor in divisors]
    for part, coefficient in zip(parts, coefficients, strict=True):
        values = torch.stack([coefficient, common.norm, common.values[2]])
        part.outcome = replace(part.outcome, values=moved(values, part.plan.device).to(part.plan.dtype), normed=True)
