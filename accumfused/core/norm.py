"""How a norm ends, in PyTorch: sums of squares become norms, and these the coefficients of a step; see csrc/norm.h.

The callers keep subnormals: see `formats.numeric.ieee`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core.protocol import Outcome, Scaling
from accumfused.formats.numeric import LEAST_DIVISOR, LEAST_SUM
from accumfused.rules.on_tensors import square_root


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
    """The gradients' divisor and its inverse, which is NaN if the divisor is bad: fp64, shape []."""
    divisor = torch.full((), scaling.normalization, dtype=torch.float64, device=scaling.device)
    if scaling.device_normalization is not None:
        divisor = divisor * scaling.device_normalization
    return divisor, torch.where((divisor > 0) & divisor.isfinite(), 1.0 / divisor, torch.nan)


def norms(squares: Tensor, divisor: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """The norms of gradients, rounded to `dtype` and divided, from their sums of squares: fp64, of any shape."""
    is_lost = (squares < LEAST_SUM) & (divisor < LEAST_DIVISOR)
    return torch.where(is_lost, torch.nan, square_root(squares.to(dtype)).double() * inverse)


def clipped(norm: Tensor, limit: Tensor, dtype: torch.dtype) -> Tensor:
    """The factors that bring norms, rounded to `dtype`, below their limits: fp64; a NaN stays a NaN."""
    return (limit / (norm.to(dtype).double() + 1e-6)).clamp(max=1.0)
