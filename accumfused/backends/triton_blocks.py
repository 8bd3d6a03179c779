"""What a program of the Triton kernels does: finds its tensors, reads and writes pieces, learns that it is the last.

The counterpart of csrc/cuda/block.cuh, and the words of the table that triton.py makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.triton_numeric import CHUNK

# The table: the ticket, which is 0 between launches, and per parameter a row of these words.
ROWS = tl.constexpr(1)
WORDS = tl.constexpr(13)
PARAM = tl.constexpr(0)
STATE = tl.constexpr(1)  # three of them
STEP = tl.constexpr(4)
NUMEL = tl.constexpr(5)
FIRST_CHUNK = tl.constexpr(6)
GROUP = tl.constexpr(7)
RULE = tl.constexpr(8)
GRAD = tl.constexpr(9)
ACCUMULATOR = tl.constexpr(10)
WEIGHT = tl.constexpr(11)
DTYPE = tl.constexpr(12)

NO_GRAD, FLOAT32, FLOAT16 = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)  # what DTYPE says; bfloat16 is the last
BFLOAT16_BITS = tl.constexpr(tl.uint16)  # how bfloat16 is read: Triton's interpreter gets its subnormals wrong
OVERWRITE = tl.constexpr(-1)

HYPER_WORDS = tl.constexpr(3)  # the bits of a number, the address of an fp32 one, of an fp64 one
MAX_HYPERS = tl.constexpr(8)

BLOCK = tl.constexpr(2048)  # elements of a tensor at a time: two accesses of 16 bytes a thread


# ---- where things are -----------------------------------------------------------------------------------------------


@triton.jit
def row_of(rows, count, chunk):
    """The row that a chunk belongs to: the last one whose first chunk is not behind it. Empty tensors have none."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(rows + middle * WORDS + FIRST_CHUNK) > chunk
        low = tl.where(is_behind, low, middle)
        high = tl.where(is_behind, middle, high)
    return rows + low * WORDS


@triton.jit
def from_bits(bits):
    """fp64 from its bits. The interpreter makes a small argument 32 bits wide, whatever its declaration."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    return address.to(tl.int64).to(tl.pointer_type(dtype))


@triton.jit
def extent(row, chunk):
    """Where in its tensor a chunk begins, and of how many elements it is."""
    offset = (chunk - tl.load(row + FIRST_CHUNK)) * CHUNK
    return offset, tl.minimum(tl.load(row + NUMEL) - offset, CHUNK).to(tl.int32)


@triton.jit
def pointer(row, word: tl.constexpr, dtype: tl.constexpr, offset):
    return pointer_to(tl.load(row + word), dtype) + offset


@triton.jit
def is_aligned(row, word: tl.constexpr):
    return tl.load(row + word) % 16 == 0


@triton.jit
def is_last_program(table):
    """Whether all other programs have done their work, which this one then sees. Leaves the ticket at 0."""
    tl.debug_barrier()  # all threads of this program have written
    is_last = tl.atomic_add(table, 1) == tl.num_programs(0) - 1
    if is_last:
        tl.store(table, 0)
    return is_last


@triton.jit
def load(ptr, first, n, size: tl.constexpr, whole: tl.constexpr):
    """Elements first .. first + size as fp32. `whole`: they exist, on a boundary of 4; otherwise those from n on are 0.

    The boundary makes 4 neighbours one access. It must be declared on the pointer (on an offset it means nothing), in
    the function that computes it (on an argument it is lost), and for 16 bits as 8 bytes: a thread then holds the same
    elements of every tensor, and nothing travels through shared memory.
    """
    start = ptr + first
    i = tl.arange(0, size)
    if whole:
        values = tl.load(tl.multiple_of(start, start.dtype.element_ty.primitive_bitwidth // 2) + i)
    else:
        values = tl.load(start + i, mask=first + i < n, other=0)
    if ptr.dtype.element_ty == BFLOAT16_BITS:
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def store(ptr, values, first, n, size: tl.constexpr, whole: tl.constexpr):
    """fp32 to where `load` reads."""
    start = ptr + first
    i = tl.arange(0, size)
    if whole:
        tl.store(tl.multiple_of(start, 16) + i, values)
    else:
        tl.store(start + i, values, mask=first + i < n)


@triton.jit
def whole_elements(n, size: tl.constexpr, aligned):
    """How many of n elements go in whole pieces of this size; none where they are not aligned."""
    return tl.where(aligned, n // size * size, 0)
