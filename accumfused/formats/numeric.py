"""The arithmetic that every backend shares, in PyTorch: the counterpart of csrc/numeric.h and csrc/norm.h.

The functions use only operations that equal separate IEEE operations: `mul`, `add`, `sub`, `div` by a tensor,
comparisons. `add(alpha=)`, `lerp` and `addcmul` may contract. rules/on_tensors.py has roots and powers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

# These numbers belong to the arithmetic; a test compares them with csrc/rows.h.
CHUNK = 32768  # elements: the unit of work, and of the norm's summation order
LANES = 1024

SMALLEST_NORMAL = 2.0**-126
_SMALLEST_DOUBLE = sys.float_info.min
LEAST_SUM, LEAST_DIVISOR = 2.0**-100, 2.0**-50  # see csrc/norm.h


def flush_subnormal(value: Tensor) -> Tensor:
    """`value` with everything below the smallest normal fp32 number replaced by 0."""
    return torch.where(value.abs() < SMALLEST_NORMAL, torch.zeros_like(value), value)


def whole_steps(count: Tensor) -> Tensor:
    """A step count as int64, clamped to the range that fp32 counts exactly."""
    return torch.where(count > 0, count.clamp(max=2.0**24), 0.0).to(torch.int64)


def memory_order(tensor: Tensor) -> Tensor:
    """A view of a dense tensor's elements in memory order, shape [numel]."""
    return tensor.as_strided((tensor.numel(),), (1,))


def full(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or as it is in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def chunk_count(numel: int) -> int:
    return -(-numel // CHUNK)


def sums_of_squares(values: Tensor) -> Tensor:
    """One fp32 sum of squares per chunk of a flat fp32 tensor, in the canonical order.

    Lane l of a chunk sums the squares of elements l, l + 1024, ... in sequence; a halving tree sums the lanes.
    """
    chunks = chunk_count(values.numel())
    padded = torch.zeros(chunks * CHUNK, dtype=torch.float32, device=values.device)
    padded[: values.numel()] = values
    rows = padded.view(chunks, CHUNK // LANES, LANES)
    lanes = torch.zeros(chunks, LANES, dtype=torch.float32, device=values.device)
    for row in rows.unbind(1):
        lanes = lanes + row * row
    return _tree(lanes)


def sum_partials(partials: Tensor) -> Tensor:
    """The sum of all chunks' sums, fp64, shape []: strided over 1024 lanes, then the same halving tree."""
    rows = -(-partials.numel() // LANES)
    padded = torch.zeros(rows * LANES, dtype=torch.float64, device=partials.device)
    padded[: partials.numel()] = partials
    return _tree(_lane_sums(padded.view(rows, LANES)))


def sum_segments(partials: Tensor, bounds: Tensor) -> Tensor:
    """The sums of partials[bounds[i]:bounds[i + 1]], fp64 [segments], each in the order of `sum_partials`."""
    ends, numel = bounds[1:, None], partials.numel()
    longest = int(bounds.diff().max()) if bounds.device.type == "cpu" else numel  # no wait for a GPU
    width = 1
    while width < min(longest, LANES):
        width *= 2
    lane = bounds[:-1, None] + torch.arange(width, device=bounds.device)
    padded = torch.zeros(numel + 1, dtype=torch.float64, device=partials.device)
    padded[:numel] = partials
    lanes = torch.zeros(lane.shape, dtype=torch.float64, device=partials.device)
    for first in range(0, longest, LANES):
        lanes = lanes + padded[torch.where(lane + first < ends, lane + first, numel)]
    return _tree(lanes)


def _lane_sums(rows: Tensor) -> Tensor:
    """Each column's sum, added up from 0 in sequence."""
    # cumsum is one kernel in place of one per row. Along every dimension but the last, each of its threads adds up a
    # column in sequence. torch calls cumsum nondeterministic on GPUs because of the last dimension.
    if rows.is_cuda and len(rows) > 1 and not torch.are_deterministic_algorithms_enabled():
        return rows.cumsum(0)[-1]
    lanes = rows.new_zeros(rows.shape[1])
    for row in rows.unbind(0):
        lanes = lanes + row
    return lanes


def _tree(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@contextlib.contextmanager
def ieee() -> Iterator[None]:
    """Keeps subnormals inside the block, even if `torch.set_flush_denormal` is on in the calling thread."""
    flushes = _SMALLEST_DOUBLE * 0.5 == 0.0  # the thread's mode is Python's, too
    if not flushes:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)  # torch's other threads may have inherited the mode, and cannot be asked
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)


def layout(tensor: Tensor) -> str:
    """ "dense" (no holes, no overlap), "strided" (holes) or "overlapping"."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return "dense"
    reach = 1  # elements that the dimensions so far span
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return "overlapping"
        reach += stride * (size - 1)
    return "dense" if reach == tensor.numel() else "strided"
