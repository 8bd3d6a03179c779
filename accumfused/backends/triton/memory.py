"""What a program of the Triton kernels does: finds its tensors, reads and writes pieces, learns that it is the last.

The counterpart of csrc/cuda/memory.cuh and block.cuh, and the words of the table that triton.py makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.backends.triton.codecs import from_bfloat16
from accumfused.backends.triton.numeric import CHUNK, whole_steps

# The table: the ticket, which is 0 between launches, and per parameter a row of these words.
ROWS = tl.constexpr(1)
WORDS = tl.constexpr(19)
PARAM = tl.constexpr(0)
STEP = tl.constexpr(1)  # from here on as in formats.Storage
SEED = tl.constexpr(2)
MASTER = tl.constexpr(3)
STATE = tl.constexpr(4)  # three of them
SCALE = tl.constexpr(7)  # theirs
NUMEL = tl.constexpr(10)
FIRST_CHUNK = tl.constexpr(11)
GROUP = tl.constexpr(12)
KIND = tl.constexpr(13)  # rule and formats
ORIGIN = tl.constexpr(14)
GRAD = tl.constexpr(15)
ACCUMULATOR = tl.constexpr(16)
WEIGHT = tl.constexpr(17)
DTYPE = tl.constexpr(18)

NO_GRAD, FLOAT32, FLOAT16 = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)  # what DTYPE says; bfloat16 is the last
BFLOAT16_BITS = tl.constexpr(tl.uint16)  # how bfloat16 is read: Triton's interpreter gets its subnormals wrong
OVERWRITE = tl.constexpr(-1)

HYPER_WORDS = tl.constexpr(3)  # the bits of a number, the address of an fp32 one, of an fp64 one
MAX_HYPERS = tl.constexpr(8)

BLOCK = tl.constexpr(2048)  # elements of a tensor at a time: two accesses of up to 16 bytes a thread
REST = tl.constexpr(1024)  # where each is an access of its own, whose addresses take registers


# ---- where things are -----------------------------------------------------------------------------------------------


@triton.jit
def row_of(rows, count, chunk):
    """The row that a chunk belongs to, and its index: the last one whose first chunk is not behind it.

    Empty tensors have none.
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(rows + middle * WORDS + FIRST_CHUNK) > chunk
        low = tl.where(is_behind, low, middle)
        high = tl.where(is_behind, middle, high)
    return rows + low * WORDS, low


@triton.jit
def float64_from(bits):
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
def step_number(row):
    """Of this step: 1 for the first; 0 where none are counted."""
    address = tl.load(row + STEP)
    number = 0
    if address != 0:
        number = whole_steps(tl.load(pointer_to(address, tl.float32))) + 1
    return number


@triton.jit
def is_last_program(table):
    """Whether all other programs have done their work, which this one then sees. Leaves the ticket at 0."""
    tl.debug_barrier()  # all threads of this program have written
    is_last = tl.atomic_add(table, 1) == tl.num_programs(0) - 1
    if is_last:
        tl.store(table, 0)
    return is_last


@triton.jit
def load_stored(ptr, first, n, size: tl.constexpr, whole: tl.constexpr):
    """Elements first .. first + size. `whole`: they exist, on a boundary of 4; otherwise those from n on are 0.

    The boundary makes 4 neighbours one access. It must be declared on the pointer (on an offset it means nothing), in
    the function that computes it (on an argument it is lost), and for 16 bits as 8 bytes, for 8 as 4: a thread then
    holds the same elements of every tensor, and nothing travels through shared memory.
    """
    start = ptr + first
    i = tl.arange(0, size)
    if whole:
        values = tl.load(tl.multiple_of(start, start.dtype.element_ty.primitive_bitwidth // 2) + i)
    else:
        values = tl.load(start + i, mask=first + i < n, other=0)
    return values


@triton.jit
def load(ptr, first, n, size: tl.constexpr, whole: tl.constexpr):
    """The same of fp32, fp16 or bfloat16, as fp32."""
    values = load_stored(ptr, first, n, size, whole)
    if ptr.dtype.element_ty == BFLOAT16_BITS:
        values = from_bfloat16(values)
    return values.to(tl.float32)


@triton.jit
def store(ptr, values, first, n, size: tl.constexpr, whole: tl.constexpr):
    """To where `load_stored` reads, what it reads."""
    start = ptr + first
    i = tl.arange(0, size)
    if whole:
        tl.store(tl.multiple_of(start, start.dtype.element_ty.primitive_bitwidth // 2) + i, values)
    else:
        tl.store(start + i, values, mask=first + i < n)


@triton.jit
def whole_elements(n, size: tl.constexpr, aligned):
    """How many of n elements go in whole pieces of this size; none where they are not aligned."""
    return tl.where(aligned, n // size * size, 0)
