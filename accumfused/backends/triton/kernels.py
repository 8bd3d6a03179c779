"""Norm and accumulate in Triton: the kernels of csrc/cuda, under the same names. step.py has the third.

A persistent grid: program b takes the chunks b, b + programs, ... of all tensors, whose addresses are in the table.
The host passes fp64 numbers as bits, because Triton would round them to fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.backends.triton.codecs import (
    from_bfloat16,
    mix,
    noise,
    noise_keys,
    to_bfloat16,
    to_bfloat16_stochastic,
)
from accumfused.backends.triton.memory import (
    BFLOAT16,
    BFLOAT16_BITS,
    BLOCK,
    DTYPE,
    FLOAT16,
    FLOAT32,
    GRAD,
    NO_GRAD,
    ORIGIN,
    ROWS,
    SUM,
    SUM_DTYPE,
    extent,
    float64_from,
    is_aligned,
    is_last_program,
    load,
    pointer,
    pointer_to,
    row_of,
    store,
    whole_elements,
)
from accumfused.backends.triton.numeric import LANES, LEAST_DIVISOR, LEAST_SUM, is_finite, sum_partials, tree

# Values of these arguments must not make another kernel: Triton compiles anew for a 1 and for multiples of 16.
NUMBERS = (
    "table", "hypers", "outcome", "count", "chunks", "chunks_to_read", "partials", "normalization",
    "device_normalization", "found_inf", "clips", "max_grad_norm", "skips_nonfinite", "skips", "factor",
    "device_factor", "before", "overwrites", "copies", "words", "salt",
)  # fmt: skip


# ---- norm -----------------------------------------------------------------------------------------------------------


@triton.jit
def sum_of_squares(grad, n, aligned):
    lanes = tl.zeros([LANES], tl.float32)
    whole = whole_elements(n, 4 * LANES, aligned)
    for first in range(0, whole, 4 * LANES):
        for k in tl.static_range(4):
            g = load(grad, first + k * LANES, n, LANES, True)
            lanes += g * g
    for first in range(whole, n, LANES):
        g = load(grad, first, n, LANES, False)
        lanes += g * g
    return tree(lanes)


@triton.jit(do_not_specialize=NUMBERS)
def norm_kernel(
    table,
    count: tl.int32,
    chunks: tl.int32,
    chunks_to_read: tl.int32,  # 0: partials holds all sums of squares
    partials: tl.int64,  # 0: take no norm
    normalization: tl.int64,
    device_normalization: tl.int64,
    found_inf: tl.int64,
    clips: tl.int32,
    max_grad_norm: tl.int64,
    skips_nonfinite: tl.int32,
    outcome,
    skips: tl.int64,
):
    rows = table + ROWS
    sums = pointer_to(partials, tl.float32)
    for chunk in range(tl.program_id(0), chunks_to_read, tl.num_programs(0)):
        row, _ = row_of(rows, count, chunk)
        dtype = tl.load(row + DTYPE)
        if dtype != NO_GRAD:
            offset, n = extent(row, chunk)
            aligned = is_aligned(row, GRAD)
            if dtype == FLOAT32:
                tl.store(sums + chunk, sum_of_squares(pointer(row, GRAD, tl.float32, offset), n, aligned))
            elif dtype == FLOAT16:
                tl.store(sums + chunk, sum_of_squares(pointer(row, GRAD, tl.float16, offset), n, aligned))
            else:
                tl.store(sums + chunk, sum_of_squares(pointer(row, GRAD, BFLOAT16_BITS, offset), n, aligned))
    if is_last_program(table):
        # csrc/norm.h's finish_norm
        divisor = float64_from(normalization)
        if device_normalization != 0:
            divisor *= tl.load(pointer_to(device_normalization, tl.float64))
        inverse = tl.where((divisor > 0) & is_finite(divisor), 1.0 / divisor, float("nan"))
        norm = tl.full([], 0.0, tl.float64)
        if partials != 0:
            total = sum_partials(sums, chunks)
            norm = tl.sqrt_rn(total.to(tl.float32)).to(tl.float64) * inverse
            norm = tl.where((total < LEAST_SUM) & (divisor < LEAST_DIVISOR), float("nan"), norm)
        rounded_norm = norm.to(tl.float32)
        clip = float64_from(max_grad_norm) / (rounded_norm.to(tl.float64) + 1e-6)
        clip = tl.where((clips == 0) | (clip > 1.0), 1.0, clip)  # keeps a NaN
        coefficient = (inverse * clip).to(tl.float32)
        skipped = (skips_nonfinite != 0) & ~(is_finite(coefficient) & is_finite(rounded_norm))
        if found_inf != 0:
            skipped |= tl.load(pointer_to(found_inf, tl.float32)) != 0
        tl.store(outcome, coefficient)
        tl.store(outcome + 1, rounded_norm)
        tl.store(outcome + 2, skipped.to(tl.float32))
        if skips != 0:
            counter = pointer_to(skips, tl.int64)
            tl.store(counter, tl.load(counter) + skipped.to(tl.int64))


@triton.jit(do_not_specialize=("segments",))
def segment_norms_kernel(partials, bounds, segments: tl.int32, squares):
    """Adds up partials[bounds[s]] up to partials[bounds[s + 1]] as squares[s]; a program for each."""
    for segment in range(tl.program_id(0), segments, tl.num_programs(0)):
        begin = tl.load(bounds + segment)
        chunks = (tl.load(bounds + segment + 1) - begin).to(tl.int32)
        tl.store(squares + segment, sum_partials(partials + begin, chunks))


# ---- accumulate -----------------------------------------------------------------------------------------------------


@triton.jit
def keys_of_sum(row, words, chunk, salt, offset, rounds):
    """Returns a chunk's keys of noise, and whether it has noise: csrc/rows.h's Fold. Its word counts the addition."""
    first, odd = tl.cast(0, tl.uint64), tl.cast(0, tl.uint32)
    is_noisy = rounds & (words != 0)
    if is_noisy:  # atomic, because one thread must not write the word before all others have read it
        word = tl.atomic_add(pointer_to(words, tl.int64) + chunk, 1, sem="relaxed")
        key = mix(word.to(tl.uint64) ^ salt.to(tl.uint64))
        first, odd = noise_keys(key, tl.load(row + ORIGIN) + offset)
    return (first, odd), is_noisy


@triton.jit
def store_sum(accumulator, values, keys, is_noisy, first, n, size: tl.constexpr, whole: tl.constexpr):
    """Stores elements of a sum, rounded if it is in bfloat16; returns them as they are stored."""
    if accumulator.dtype.element_ty == BFLOAT16_BITS:
        rounded = to_bfloat16(values)
        if is_noisy:
            rounded = to_bfloat16_stochastic(values, noise(keys, first + tl.arange(0, size)))
        store(accumulator, rounded, first, n, size, whole)
        values = from_bfloat16(rounded)
    else:
        store(accumulator, values, first, n, size, whole)
    return values


@triton.jit
def fold_chunk(accumulator, grad, n, aligned, factor, keeps, keys, is_noisy, adds: tl.constexpr, total):
    """accumulator <- (accumulator if keeps) + (factor * grad if adds). total: the sum of squares of the result."""
    lanes = tl.zeros([LANES], tl.float32)
    whole = whole_elements(n, 2 * LANES, aligned)
    for first in range(0, whole, 2 * LANES):
        second = first + LANES
        a, b = load(accumulator, first, n, LANES, True), load(accumulator, second, n, LANES, True)
        if adds:
            g = load(grad, first, n, LANES, True) * factor
            h = load(grad, second, n, LANES, True) * factor
            a, b = tl.where(keeps, a + g, g), tl.where(keeps, b + h, h)
        else:
            a, b = tl.where(keeps, a, 0.0), tl.where(keeps, b, 0.0)
        a = store_sum(accumulator, a, keys, is_noisy, first, n, LANES, True)
        b = store_sum(accumulator, b, keys, is_noisy, second, n, LANES, True)
        lanes += a * a
        lanes += b * b
    for first in range(whole, n, LANES):
        a = load(accumulator, first, n, LANES, False)
        if adds:
            g = load(grad, first, n, LANES, False) * factor
            a = tl.where(keeps, a + g, g)
        else:
            a = tl.where(keeps, a, 0.0)
        a = store_sum(accumulator, a, keys, is_noisy, first, n, LANES, False)
        lanes += a * a
    tl.store(total, tree(lanes))


@triton.jit
def fold_or_copy(accumulator, grad, n, aligned, copies, factor, keeps, keys, is_noisy, total):
    if copies != 0:
        whole = whole_elements(n, BLOCK, aligned)
        for first in range(0, whole, BLOCK):
            store_sum(accumulator, load(grad, first, n, BLOCK, True), keys, False, first, n, BLOCK, True)
        for first in range(whole, n, BLOCK):
            store_sum(accumulator, load(grad, first, n, BLOCK, False), keys, False, first, n, BLOCK, False)
    else:
        fold_chunk(accumulator, grad, n, aligned, factor, keeps, keys, is_noisy, True, total)


@triton.jit
def fold_row(row, accumulator, offset, n, copies, factor, keeps, is_fresh, keys, is_noisy, total):
    """Folds one chunk of a row with its gradient, whatever its dtype is."""
    aligned = is_aligned(row, SUM) & is_aligned(row, GRAD)
    dtype = tl.load(row + DTYPE)
    has_grad = dtype != NO_GRAD
    if (factor == 0) | (has_grad == 0):
        if is_fresh | has_grad:
            fold_chunk(accumulator, accumulator, n, aligned, factor, keeps, keys, False, False, total)
    elif dtype == FLOAT32:
        grad = pointer(row, GRAD, tl.float32, offset)
        fold_or_copy(accumulator, grad, n, aligned, copies, factor, keeps, keys, is_noisy, total)
    elif dtype == FLOAT16:
        half = pointer(row, GRAD, tl.float16, offset)
        fold_or_copy(accumulator, half, n, aligned, copies, factor, keeps, keys, is_noisy, total)
    else:
        brain = pointer(row, GRAD, BFLOAT16_BITS, offset)
        fold_or_copy(accumulator, brain, n, aligned, copies, factor, keeps, keys, is_noisy, total)


@triton.jit(do_not_specialize=NUMBERS)
def accumulate_kernel(
    table,
    count: tl.int32,
    chunks: tl.int32,
    factor: tl.int64,
    device_factor: tl.int64,
    before: tl.int64,
    overwrites: tl.int32,
    copies: tl.int32,
    partials,
    words: tl.int64,  # 0: sums in bfloat16 are rounded to the nearest
    salt: tl.int64,
):
    rows = table + ROWS
    number = float64_from(factor)
    if device_factor != 0:
        number = tl.load(pointer_to(device_factor, tl.float64))
    multiplier = number.to(tl.float32)
    keeps = overwrites == 0
    is_fresh = False
    if before != 0:  # protocol.Fold
        is_fresh = tl.load(pointer_to(before, tl.float64)) == 0
    if is_fresh:
        multiplier = tl.where(keeps, 1.0, multiplier)
        keeps = False
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, _ = row_of(rows, count, chunk)
        if tl.load(row + SUM) != 0:
            offset, n = extent(row, chunk)
            total = partials + chunk
            if tl.load(row + SUM_DTYPE) == FLOAT32:
                single = pointer(row, SUM, tl.float32, offset)
                fold_row(row, single, offset, n, copies, multiplier, keeps, is_fresh, (0, 0), False, total)
            else:
                brain = pointer(row, SUM, BFLOAT16_BITS, offset)
                dtype = tl.load(row + DTYPE)
                rounds = (dtype != NO_GRAD) & (multiplier != 0) & (keeps | (multiplier != 1) | (dtype != BFLOAT16))
                keys, is_noisy = keys_of_sum(row, words, chunk, salt, offset, rounds)
                fold_row(row, brain, offset, n, copies, multiplier, keeps, is_fresh, keys, is_noisy, total)
