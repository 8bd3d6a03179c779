"""Step in Triton: the kernel of csrc/cuda/step.cuh, for one rule and one format of weights and states.

The grid is that of kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.backends.triton.codecs import noise, noise_keys, step_key, stream
from accumfused.backends.triton.formats import (
    HAS_MASTER,
    load_state,
    load_weights,
    state_at,
    store_state,
    store_weights,
    weights_at,
)
from accumfused.backends.triton.memory import (
    BFLOAT16_BITS,
    BLOCK,
    DTYPE,
    FLOAT16,
    FLOAT32,
    GRAD,
    GROUP,
    HYPER_WORDS,
    KIND,
    MASTER,
    MAX_HYPERS,
    NO_GRAD,
    ORIGIN,
    PARAM,
    REST,
    ROWS,
    SEED,
    STATE,
    STEP,
    WORDS,
    extent,
    float64_from,
    is_aligned,
    is_last_program,
    load,
    pointer,
    pointer_to,
    row_of,
    step_number,
    whole_elements,
)
from accumfused.backends.triton.numeric import LANES

# Their values must not make another kernel: see kernels.py.
NUMBERS = (
    "count",
    "chunks",
    "kind",
    "coefficients",
)


@triton.jit
def hyper(words):
    """Loads a hyper-parameter: a number of the launch, or one on the device, which a graph's replay reads anew."""
    value = float64_from(tl.load(words))
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
        hyper(w), hyper(w + 3), hyper(w + 6), hyper(w + 9), hyper(w + 12), hyper(w + 15), hyper(w + 18), hyper(w + 21),
        hyper(w + 24), hyper(w + 27), hyper(w + 30), hyper(w + 33)
    )  # fmt: skip


@triton.jit
def coefficient_of(coefficients, row, common):
    """Loads a row's coefficient."""
    coefficient = common
    if coefficients != 0:
        coefficient = tl.load(pointer_to(coefficients, tl.float32) + row)
    return coefficient


@triton.jit
def step_block(
    scalars, keys, param, grad, state, first, n, update: tl.constexpr, states: tl.constexpr, moments: tl.constexpr,
    weights: tl.constexpr, form: tl.constexpr, noisy: tl.constexpr, size: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    g = load(grad, first, n, size, whole)
    p = load_weights(param, first, n, size, weights, whole)
    a, b, c, d = p, p, p, p
    if states > 0:
        a = load_state(state[0], first, n, size, form, moments <= 0, whole)
    if states > 1:
        b = load_state(state[1], first, n, size, form, moments <= 1, whole)
    if states > 2:
        c = load_state(state[2], first, n, size, form, moments <= 2, whole)
    if states > 3:
        d = load_state(state[3], first, n, size, form, moments <= 3, whole)
    p, a, b, c, d = update(scalars, p, g, a, b, c, d)
    bits = tl.zeros([size], tl.uint32)
    if noisy:
        bits = noise(keys, first + tl.arange(0, size))
    store_weights(param, p, stream(bits, 2), first, n, size, weights, whole)
    if states > 0:
        store_state(state[0], a, bits, first, n, size, form, moments <= 0, whole)
    if states > 1:
        store_state(state[1], b, stream(bits, 1), first, n, size, form, moments <= 1, whole)
    if states > 2:
        store_state(state[2], c, stream(bits, 1), first, n, size, form, moments <= 2, whole)
    if states > 3:
        store_state(state[3], d, stream(bits, 1), first, n, size, form, moments <= 3, whole)


@triton.jit
def step_chunk(
    scalars, row, keys, grad, offset, n, update: tl.constexpr, states: tl.constexpr, moments: tl.constexpr,
    weights: tl.constexpr, form: tl.constexpr, noisy: tl.constexpr
):  # fmt: skip
    param = weights_at(row, offset, weights)
    state = (
        state_at(row, offset, 0, form), state_at(row, offset, 1, form), state_at(row, offset, 2, form),
        state_at(row, offset, 3, form),
    )  # fmt: skip
    aligned = is_aligned(row, PARAM) & is_aligned(row, GRAD)
    if HAS_MASTER[weights]:
        aligned &= is_aligned(row, MASTER)
    for number in tl.static_range(states):
        aligned &= is_aligned(row, STATE + number)
    whole = whole_elements(n, BLOCK, aligned)
    for first in range(0, whole, BLOCK):
        step_block(
            scalars, keys, param, grad, state, first, n, update, states, moments, weights, form, noisy, BLOCK, True
        )
    for first in range(whole, n, REST):
        step_block(
            scalars, keys, param, grad, state, first, n, update, states, moments, weights, form, noisy, REST, False
        )


@triton.jit
def advance_steps(rows, count, kind):
    """Counts the step of every parameter of this kind that has a gradient, even an empty one."""
    for first in range(0, count, LANES):
        i = first + tl.arange(0, LANES)
        exists = i < count
        row = rows + i * WORDS
        steps = tl.load(row + STEP, mask=exists, other=0)
        stepped = (steps != 0) & (tl.load(row + DTYPE, mask=exists, other=NO_GRAD) != NO_GRAD)
        stepped &= tl.load(row + KIND, mask=exists, other=-1) == kind
        steps = pointer_to(steps, tl.float32)
        tl.store(steps, tl.load(steps, mask=stepped, other=0.0) + 1.0, mask=stepped)


@triton.jit(do_not_specialize=NUMBERS)
def step_kernel(
    table, count: tl.int32, chunks: tl.int32, hypers, kind: tl.int32, outcome, coefficients: tl.int64,
    scalars: tl.constexpr, update: tl.constexpr, states: tl.constexpr, moments: tl.constexpr, weights: tl.constexpr,
    form: tl.constexpr, noisy: tl.constexpr,
):  # fmt: skip
    """Steps the rows of one kind.

    Args:
        coefficients: the address of one for each row; 0: they share the outcome's.
        scalars, update: the rule's arithmetic.
        states: the rule's number of states; moments: how many of them come first and are no second moments.
        weights, form: the formats of parameters and states, as numbers of formats/kinds.py; noisy: whether either
            rounds stochastically.
    """
    if tl.load(outcome + 2) != 0:
        return  # skipped: nothing is written
    rows = table + ROWS
    coefficient = tl.load(outcome)
    # Scalars cost two powers in fp64, so chunks of one group and step number share them.
    row, last = row_of(rows, count, tl.program_id(0))
    group, number = tl.load(row + GROUP), step_number(row)
    row_coefficient = coefficient_of(coefficients, last, coefficient)
    prepared = scalars(group_hypers(hypers, group), number, row_coefficient)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, index = row_of(rows, count, chunk)
        dtype = tl.load(row + DTYPE)
        if (dtype != NO_GRAD) & (tl.load(row + KIND) == kind):
            its_group, its_number = tl.load(row + GROUP), step_number(row)
            if (its_group != group) | (its_number != number) | ((coefficients != 0) & (index != last)):
                group, number, last = its_group, its_number, index
                row_coefficient = coefficient_of(coefficients, index, coefficient)
                prepared = scalars(group_hypers(hypers, group), number, row_coefficient)
            offset, n = extent(row, chunk)
            keys = index, index
            if noisy:
                seed = tl.load(pointer(row, SEED, tl.int64, 0))
                keys = noise_keys(step_key(seed, number, index), tl.load(row + ORIGIN) + offset)
            if dtype == FLOAT32:
                grad = pointer(row, GRAD, tl.float32, offset)
                step_chunk(
                    prepared, row, keys, grad, offset, n, update, states, moments, weights, form, noisy
                )  # fmt: skip
            elif dtype == FLOAT16:
                half = pointer(row, GRAD, tl.float16, offset)
                step_chunk(
                    prepared, row, keys, half, offset, n, update, states, moments, weights, form, noisy
                )  # fmt: skip
            else:
                brain = pointer(row, GRAD, BFLOAT16_BITS, offset)
                step_chunk(
                    prepared, row, keys, brain, offset, n, update, states, moments, weights, form, noisy
                )  # fmt: skip
    if is_last_program(table):
        advance_steps(rows, count, kind)
