"""The three verbs in Triton: the kernels of csrc/cuda/kernels.cuh, under the same names.

A persistent grid: program b takes the chunks b, b + programs, ... of all tensors, found by their addresses in the
table. fp64 numbers come as their bits, because Triton would round them to fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.backends.triton_blocks import (
    ACCUMULATOR,
    BFLOAT16_BITS,
    BLOCK,
    DTYPE,
    FLOAT16,
    FLOAT32,
    GRAD,
    GROUP,
    HYPER_WORDS,
    MAX_HYPERS,
    NO_GRAD,
    OVERWRITE,
    PARAM,
    ROWS,
    RULE,
    STATE,
    STEP,
    WEIGHT,
    WORDS,
    extent,
    from_bits,
    is_aligned,
    is_last_program,
    load,
    pointer,
    pointer_to,
    row_of,
    store,
    whole_elements,
)
from accumfused.triton_numeric import LANES, is_finite, sum_partials, tree, whole_steps

# Arguments whose value must not make another kernel: Triton compiles anew for a 1 and for multiples of 16.
NUMBERS = (
    "count", "chunks", "chunks_to_read", "partials", "normalization", "device_normalization", "found_inf", "clips",
    "max_grad_norm", "skips_nonfinite", "skips", "weight", "scale", "device_scale", "rule",
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
    chunks_to_read: tl.int32,  # 0: no sums of squares are missing from partials
    partials: tl.int64,  # 0: no norm is taken
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
        row = row_of(rows, count, chunk)
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
        divisor = from_bits(normalization)
        if device_normalization != 0:
            divisor *= tl.load(pointer_to(device_normalization, tl.float64))
        inverse = tl.where((divisor > 0) & is_finite(divisor), 1.0 / divisor, float("nan"))
        norm = tl.full([], 0.0, tl.float64)
        if partials != 0:
            norm = tl.sqrt_rn(sum_partials(sums, chunks).to(tl.float32)).to(tl.float64) * inverse
        rounded_norm = norm.to(tl.float32)
        clip = from_bits(max_grad_norm) / (rounded_norm.to(tl.float64) + 1e-6)
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


# ---- accumulate -----------------------------------------------------------------------------------------------------


@triton.jit
def folded(kept, g, keep, add, has_grad: tl.constexpr):
    """A factor of 0 leaves its term out, whatever it holds."""
    value = tl.where(keep != 0, kept * keep, 0.0)
    if has_grad:
        added = g * add
        value = tl.where(add != 0, tl.where(keep != 0, value + added, added), value)
    return value


@triton.jit
def fold_chunk(accumulator, grad, n, aligned, keep, add, has_grad: tl.constexpr, total):
    lanes = tl.zeros([LANES], tl.float32)
    whole = whole_elements(n, 2 * LANES, aligned)
    for first in range(0, whole, 2 * LANES):
        second = first + LANES
        a, b = load(accumulator, first, n, LANES, True), load(accumulator, second, n, LANES, True)
        g, h = a, b
        if has_grad:
            g, h = load(grad, first, n, LANES, True), load(grad, second, n, LANES, True)
        a, b = folded(a, g, keep, add, has_grad), folded(b, h, keep, add, has_grad)
        lanes += a * a
        lanes += b * b
        store(accumulator, a, first, n, LANES, True)
        store(accumulator, b, second, n, LANES, True)
    for first in range(whole, n, LANES):
        a = load(accumulator, first, n, LANES, False)
        g = a
        if has_grad:
            g = load(grad, first, n, LANES, False)
        a = folded(a, g, keep, add, has_grad)
        lanes += a * a
        store(accumulator, a, first, n, LANES, False)
    tl.store(total, tree(lanes))


@triton.jit
def copy_chunk(accumulator, grad, n, aligned):
    whole = whole_elements(n, BLOCK, aligned)
    for first in range(0, whole, BLOCK):
        store(accumulator, load(grad, first, n, BLOCK, True), first, n, BLOCK, True)
    for first in range(whole, n, BLOCK):
        store(accumulator, load(grad, first, n, BLOCK, False), first, n, BLOCK, False)


@triton.jit
def fold_or_copy(accumulator, grad, n, aligned, copies, keep, add, total):
    if copies:
        copy_chunk(accumulator, grad, n, aligned)
    else:
        fold_chunk(accumulator, grad, n, aligned, keep, add, True, total)


@triton.jit(do_not_specialize=NUMBERS)
def accumulate_kernel(
    table,
    count: tl.int32,
    chunks: tl.int32,
    weights,
    weight: tl.int32,
    scale: tl.int64,
    device_scale: tl.int64,
    partials,
):
    rows = table + ROWS
    factor = from_bits(scale)
    if device_scale != 0:
        factor *= tl.load(pointer_to(device_scale, tl.float64))
    add = (tl.load(weights + weight) * factor).to(tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = row_of(rows, count, chunk)
        if tl.load(row + ACCUMULATOR) != 0:
            offset, n = extent(row, chunk)
            accumulator = pointer(row, ACCUMULATOR, tl.float32, offset)
            total = partials + chunk
            held = tl.load(row + WEIGHT)
            keep = (tl.load(weights + tl.maximum(held, 0)) * factor).to(tl.float32)
            copies = held == OVERWRITE
            aligned = is_aligned(row, ACCUMULATOR) & is_aligned(row, GRAD)
            dtype = tl.load(row + DTYPE)
            if dtype == NO_GRAD:
                fold_chunk(accumulator, accumulator, n, aligned, keep, add, False, total)
            elif dtype == FLOAT32:
                grad = pointer(row, GRAD, tl.float32, offset)
                fold_or_copy(accumulator, grad, n, aligned, copies, keep, add, total)
            elif dtype == FLOAT16:
                half = pointer(row, GRAD, tl.float16, offset)
                fold_or_copy(accumulator, half, n, aligned, copies, keep, add, total)
            else:
                brain = pointer(row, GRAD, BFLOAT16_BITS, offset)
                fold_or_copy(accumulator, brain, n, aligned, copies, keep, add, total)


# ---- step -----------------------------------------------------------------------------------------------------------


@triton.jit
def hyper(words):
    """A hyper-parameter: a number of the launch, or one that the device holds and a graph's replay reads anew."""
    value = from_bits(tl.load(words))
    single, double = tl.load(words + 1), tl.load(words + 2)
    if single != 0:
        value = tl.load(pointer_to(single, tl.float32)).to(tl.float64)
    if double != 0:
        value = tl.load(pointer_to(double, tl.float64))
    return value


@triton.jit
def group_hypers(hypers, group):
    w = hypers + group * (MAX_HYPERS * HYPER_WORDS)
    return (
        hyper(w), hyper(w + 3), hyper(w + 6), hyper(w + 9), hyper(w + 12), hyper(w + 15), hyper(w + 18), hyper(w + 21)
    )  # fmt: skip


@triton.jit
def step_number(row):
    """Of this step: 1 for the first; 0 where the rule counts none."""
    address = tl.load(row + STEP)
    number = 0
    if address != 0:
        number = whole_steps(tl.load(pointer_to(address, tl.float32))) + 1
    return number


@triton.jit
def step_block(
    scalars, param, grad, state0, state1, state2, first, n, update: tl.constexpr, states: tl.constexpr,
    whole: tl.constexpr
):  # fmt: skip
    g = load(grad, first, n, BLOCK, whole)
    p = load(param, first, n, BLOCK, whole)
    a, b, c = p, p, p
    if states > 0:
        a = load(state0, first, n, BLOCK, whole)
    if states > 1:
        b = load(state1, first, n, BLOCK, whole)
    if states > 2:
        c = load(state2, first, n, BLOCK, whole)
    p, a, b, c = update(scalars, p, g, a, b, c, states)
    store(param, p, first, n, BLOCK, whole)
    if states > 0:
        store(state0, a, first, n, BLOCK, whole)
    if states > 1:
        store(state1, b, first, n, BLOCK, whole)
    if states > 2:
        store(state2, c, first, n, BLOCK, whole)


@triton.jit
def step_chunk(scalars, row, grad, offset, n, update: tl.constexpr, states: tl.constexpr):
    param = pointer(row, PARAM, tl.float32, offset)
    aligned = is_aligned(row, PARAM) & is_aligned(row, GRAD)
    state0, state1, state2 = param, param, param
    if states > 0:
        state0 = pointer(row, STATE, tl.float32, offset)
        aligned &= is_aligned(row, STATE)
    if states > 1:
        state1 = pointer(row, STATE + 1, tl.float32, offset)
        aligned &= is_aligned(row, STATE + 1)
    if states > 2:
        state2 = pointer(row, STATE + 2, tl.float32, offset)
        aligned &= is_aligned(row, STATE + 2)
    whole = whole_elements(n, BLOCK, aligned)
    for first in range(0, whole, BLOCK):
        step_block(scalars, param, grad, state0, state1, state2, first, n, update, states, True)
    for first in range(whole, n, BLOCK):
        step_block(scalars, param, grad, state0, state1, state2, first, n, update, states, False)


@triton.jit
def advance_steps(rows, count, rule):
    """Counts the step of every parameter of this rule that has a gradient, an empty one too."""
    for first in range(0, count, LANES):
        i = first + tl.arange(0, LANES)
        exists = i < count
        row = rows + i * WORDS
        steps = tl.load(row + STEP, mask=exists, other=0)
        stepped = (steps != 0) & (tl.load(row + DTYPE, mask=exists, other=NO_GRAD) != NO_GRAD)
        stepped &= tl.load(row + RULE, mask=exists, other=-1) == rule
        steps = pointer_to(steps, tl.float32)
        tl.store(steps, tl.load(steps, mask=stepped, other=0.0) + 1.0, mask=stepped)


@triton.jit(do_not_specialize=NUMBERS)
def step_kernel(
    table, count: tl.int32, chunks: tl.int32, hypers, rule: tl.int32, outcome,
    scalars: tl.constexpr, update: tl.constexpr, states: tl.constexpr,
):  # fmt: skip
    if tl.load(outcome + 2) != 0:
        return  # skipped: nothing is written
    rows = table + ROWS
    coefficient = tl.load(outcome)
    # Scalars cost two powers in double, so chunks of one group and step number share them.
    row = row_of(rows, count, tl.program_id(0))
    group, number = tl.load(row + GROUP), step_number(row)
    prepared = scalars(group_hypers(hypers, group), number, coefficient)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = row_of(rows, count, chunk)
        dtype = tl.load(row + DTYPE)
        if (dtype != NO_GRAD) & (tl.load(row + RULE) == rule):
            its_group, its_number = tl.load(row + GROUP), step_number(row)
            if (its_group != group) | (its_number != number):
                group, number = its_group, its_number
                prepared = scalars(group_hypers(hypers, group), number, coefficient)
            offset, n = extent(row, chunk)
            if dtype == FLOAT32:
                step_chunk(prepared, row, pointer(row, GRAD, tl.float32, offset), offset, n, update, states)
            elif dtype == FLOAT16:
                step_chunk(prepared, row, pointer(row, GRAD, tl.float16, offset), offset, n, update, states)
            else:
                step_chunk(prepared, row, pointer(row, GRAD, BFLOAT16_BITS, offset), offset, n, update, states)
    if is_last_program(table):
        advance_steps(rows, count, rule)
