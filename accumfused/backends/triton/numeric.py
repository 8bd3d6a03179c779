"""The arithmetic that every backend shares, in Triton: see csrc/numeric.h and accumfused/formats/numeric.py.

This file imports Triton, so the package imports it only where the Triton kernels run. Triton's own `sqrt` and `/` of
fp32 are approximate: `sqrt_rn` and `div_rn` are IEEE. In Triton 3.6 `-x` is `0 - x`, which loses the sign of a zero:
write `x * -1.0`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.formats import numeric

CHUNK = tl.constexpr(numeric.CHUNK)
LANES = tl.constexpr(numeric.LANES)
SMALLEST_NORMAL = tl.constexpr(numeric.SMALLEST_NORMAL)
LEAST_SUM = tl.constexpr(numeric.LEAST_SUM)
LEAST_DIVISOR = tl.constexpr(numeric.LEAST_DIVISOR)


@triton.jit
def flush_subnormal(value):
    """Replaces numbers below the smallest normal fp32 number by 0."""
    return tl.where(tl.abs(value) < SMALLEST_NORMAL, 0.0, value)


@triton.jit
def is_finite(value):
    return value - value == 0


@triton.jit
def whole_steps(count):
    """Returns a step count as a whole number, clamped to the range that fp32 counts exactly."""
    return tl.where(count > 0, tl.where(count < 16777216.0, count, 16777216.0), 0.0).to(tl.int32)


@triton.jit
def power(base, exponent):
    """Computes `base ** exponent` in fp64 by squaring, for one non-negative whole number."""
    result = tl.full([], 1.0, tl.float64)
    while exponent > 0:
        result = tl.where(exponent & 1 == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def real_power(base, exponent):
    """Takes `power` for the exponent's whole part, at most 2^24, and roots for the digits after the point."""
    size = tl.abs(exponent)
    whole = tl.where(size < 16777216.0, size, 16777216.0).to(tl.int32)
    result = power(base, whole)
    rest = size - whole.to(tl.float64)
    for _ in range(53):
        base = tl.sqrt(base)
        rest = rest + rest
        result = tl.where(rest >= 1, result * base, result)
        rest = tl.where(rest >= 1, rest - 1, rest)
    result = tl.where(exponent < 0, 1.0 / result, result)
    return tl.where(exponent != exponent, exponent, result)


@triton.jit
def tree(lanes):
    """Adds up 1024 lanes by halving, 1024 -> 512 -> ... -> 1: it adds pairs, so Triton cannot reorder the sum."""
    for level in tl.static_range(1, 10):
        lanes = tl.sum(tl.reshape(lanes, (2, LANES >> level)), axis=0)
    return tl.sum(lanes, axis=0)


@triton.jit
def sum_partials(partials, chunks):
    """Adds up all chunks' sums in fp64, as in csrc/norm.h."""
    lane = tl.arange(0, LANES)
    lanes = tl.zeros([LANES], tl.float64)
    for first in range(0, chunks, LANES):
        # .cg bypasses the first cache, which does not see the writes of other programs: on AMD's RDNA, too. There the
        # wave that takes the last program's ticket empties its own first cache. By Triton 3.8's code others of the
        # program keep theirs; 3.9's barrier empties all.
        lanes += tl.load(partials + first + lane, mask=first + lane < chunks, other=0.0, cache_modifier=".cg").to(
            tl.float64
        )
    return tree(lanes)
