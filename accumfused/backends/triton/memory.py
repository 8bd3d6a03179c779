"""A program of the Triton kernels finds its tensors, reads and writes pieces, and learns whether it is the last.

The counterpart of csrc/cuda/memory.cuh and block.cuh, with the words of the table that backend.py makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.backends.triton.codecs import from_bfloat16
from accumfused.backends.triton.numeric import CHUNK, whole_steps
from accumfused.rules import rule

# The table: a row that begins with the ticket, which is 0 between launches; then a row of these words per parameter.
ROWS = tl.constexpr(21)
WORDS = ROWS
PARAM = tl.constexpr(0)
STEP = tl.constexpr(1)  # from here on the order of formats.kinds.Storage
SEED = tl.constexpr(2)
MASTER = tl.constexpr(3)
STATE = tl.constexpr(4)  # MAX_STATES of them
SCALE = tl.constexpr(8)  # the states' scales
NUMEL = tl.constexpr(12)
FIRST_CHUNK = tl.constexpr(13)
GROUP = tl.constexpr(14)
KIND = tl.constexpr(15)  # rule and formats
ORIGIN = tl.constexpr(16)
GRAD = tl.constexpr(17)  # from here on a call's operands; a step's are the first two
DTYPE = tl.constexpr(18)
SUM = tl.constexpr(19)
SUM_DTYPE = tl.constexpr(20)

NO_GRAD, FLOAT32, FLOAT16, BFLOAT16 = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of DTYPE
BFLOAT16_BITS = tl.constexpr(tl.uint16)  # kernels read bfloat16 as this: Triton's interpreter gets its subnormals wrong

HYPER_WORDS = tl.constexpr(3)  # a number's bits, an fp32 number's address, an fp64 number's
MAX_HYPERS = tl.constexpr(rule.MAX_HYPERS)

BLOCK = tl.constexpr(2048)  # elements of an aligned piece: two accesses of up to 16 bytes a thread
REST = tl.constexpr(1024)  # elements of any other piece: each is an access, whose address takes registers


# ---- addresses ------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(rows, count, chunk):
    """Finds the row of a chunk, and the row's index: the last row whose first chunk is not after this one.

    Empty tensors have no chunk.
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(rows + middle * WORDS + FIRST_CHUNK) > chunk
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return rows + low * WORDS, low


@triton.jit
def float64_from(bits):
    """Reads fp64 from its bits. The interpreter makes a small argument 32 bits wide, whatever its declaration."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    return address.to(tl.int64).to(tl.pointer_type(dtype))


@triton.jit
def extent(row, chunk):
    """Returns a chunk's offset in its tensor, and its number of elements."""
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
    """Returns the number of this step: 1 for the first; 0 if the row counts none."""
    address = tl.load(row + STEP)
    number = 0
    if address != 0:
        number = whole_steps(tl.load(pointer_to(address, tl.float32))) + 1
    return number


@triton.jit
def is_last_program(table):
    """Tells whether all other programs have finished; the last one sees their work, and resets the ticket to 0."""
    tl.debug_barrier()  # all threads of this program have written
    is_last = tl.atomic_add(table, 1) == tl.num_programs(0) - 1
    if is_last:
        tl.store(table, 0)
    return is_last


@triton.jit
def load_stored(ptr, first, n, size: tl.constexpr, whole: tl.constexpr):
    """Elements first .. first + size. `whole`: all exist, on a boundary of 4; otherwise those from n on are 0.

    The boundary makes 4 neighbours one access. Triton ignores it on an offset and loses it on an argument, so the
    function that computes the pointer declares it there. It is 8 bytes for 16-bit elements, and 4 for 8-bit ones. A
    thread then holds the same elements of every tensor, and nothing travels through shared memory.
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
    """Loads elements of fp32, fp16 or bfloat16 as fp32."""
    values = load_stored(ptr, first, n, size, whole)
    if ptr.dtype.element_ty == BFLOAT16_BITS:
        values = from_bfloat16(values)
    return values.to(tl.float32)


@triton.jit
def store(ptr, values, first, n, size: tl.constexpr, whole: tl.constexpr):
    """Stores the elements that `load_stored` reads."""
    start = ptr + first
    i = tl.arange(0, size)
    if whole:
        tl.store(tl.multiple_of(start, start.dtype.element_ty.primitive_bitwidth // 2) + i, values)
    else:
        tl.store(start + i, values, mask=first + i < n)


@triton.jit
def whole_elements(n, size: tl.constexpr, aligned):
    """Counts those of n elements that whole pieces of this size hold; 0 unless the elements are aligned."""
    return tl.where(aligned, n // size * size, 0)
