"""A step decodes and encodes weights and states in memory with these functions, over codecs.py.

The counterpart of csrc/cpu/formats.inl. A kernel is compiled for one format of weights and one of states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from accumfused.backends.triton.codecs import (
    SCALED,
    bits_of,
    decode,
    encode,
    inverse_scale,
    join,
    join_master,
    join_short,
    scale_factor,
    scale_of,
    split,
    split_master,
    split_short,
    spread,
    to_bfloat16_stochastic,
)
from accumfused.backends.triton.memory import (
    BFLOAT16_BITS,
    MASTER,
    PARAM,
    SCALE,
    STATE,
    load,
    load_stored,
    pointer,
    store,
)
from accumfused.backends.triton.numeric import flush_subnormal
from accumfused.formats.kinds import States, Weights

BFLOAT16_STOCHASTIC = tl.constexpr(int(Weights.BFLOAT16_STOCHASTIC))
SPLIT16 = tl.constexpr(int(Weights.BFLOAT16_SPLIT16))
SPLIT8 = tl.constexpr(int(Weights.BFLOAT16_SPLIT8))
FLOAT16_MASTER = tl.constexpr(int(Weights.FLOAT16_MASTER))

BFLOAT16_STATES = tl.constexpr(int(States.BFLOAT16))
INT8_STATES = tl.constexpr(int(States.INT8))


def type_of(dtype: torch.dtype) -> tl.dtype:
    """The type in which kernels read a stored number."""
    return BFLOAT16_BITS.value if dtype == torch.bfloat16 else getattr(tl, str(dtype).removeprefix("torch."))


# By the formats' numbers.
PARAM_TYPES = tl.constexpr(tuple(type_of(weights.dtype) for weights in Weights))
MASTER_TYPES = tl.constexpr(tuple(weights.master and type_of(weights.master[1]) for weights in Weights))
HAS_MASTER = tl.constexpr(tuple(weights.master is not None for weights in Weights))
STATE_TYPES = tl.constexpr(tuple(type_of(states.dtype) for states in States))


@triton.jit
def weights_at(row, offset, weights: tl.constexpr):
    """Pointers to a chunk of a parameter and of its master; without a master, the parameter again."""
    param = pointer(row, PARAM, PARAM_TYPES[weights], offset)
    master = param
    if HAS_MASTER[weights]:
        master = pointer(row, MASTER, MASTER_TYPES[weights], offset)
    return param, master


@triton.jit
def load_weights(place, first, n, size: tl.constexpr, weights: tl.constexpr, whole: tl.constexpr):
    """Loads fp32 weights."""
    param, master = place
    if HAS_MASTER[weights]:
        stored = load_stored(param, first, n, size, whole)
        rest = load_stored(master, first, n, size, whole)
        if weights == SPLIT16:
            values = join(stored, rest)
        elif weights == SPLIT8:
            values = join_short(stored, rest)
        elif weights == FLOAT16_MASTER:
            values = join_master(stored, rest)
    else:
        values = load(param, first, n, size, whole)
    return values


@triton.jit
def store_weights(place, values, noise, first, n, size: tl.constexpr, weights: tl.constexpr, whole: tl.constexpr):
    param, master = place
    stored, rest = values, values
    if weights == BFLOAT16_STOCHASTIC:
        stored = to_bfloat16_stochastic(values, noise)
    elif weights == SPLIT16:
        stored, rest = split(values)
    elif weights == SPLIT8:
        stored, rest = split_short(values, noise)
    elif weights == FLOAT16_MASTER:
        stored, rest = split_master(values)
    store(param, stored, first, n, size, whole)
    if HAS_MASTER[weights]:
        store(master, rest, first, n, size, whole)


@triton.jit
def state_at(row, offset, number: tl.constexpr, form: tl.constexpr):
    """Pointers to a chunk of a state and of its scales; without scales, the state again."""
    state = pointer(row, STATE + number, STATE_TYPES[form], offset)
    scale = state
    if form == INT8_STATES:
        scale = pointer(row, SCALE + number, tl.uint8, offset // SCALED)
    return state, scale


@triton.jit
def load_state(
    place, first, n, size: tl.constexpr, form: tl.constexpr, second_moment: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    state, scale = place
    if form == INT8_STATES:
        block = tl.arange(0, size // SCALED)
        exponent = tl.load(scale + first // SCALED + block, mask=first + block * SCALED < n, other=0).to(tl.int32)
        codes = load_stored(state, first, n, size, whole)
        values = decode(codes, spread(scale_factor(exponent), size), second_moment)
    else:
        values = load(state, first, n, size, whole)
    return values


@triton.jit
def store_state(
    place, values, noise, first, n, size: tl.constexpr, form: tl.constexpr, second_moment: tl.constexpr,
    whole: tl.constexpr
):  # fmt: skip
    state, scale = place
    if form == INT8_STATES:
        magnitudes = bits_of(values) & 0x7FFFFFFF
        if not whole:
            magnitudes = tl.where(first + tl.arange(0, size) < n, magnitudes, 0)
        exponent = scale_of(magnitudes, size)
        block = tl.arange(0, size // SCALED)
        tl.store(scale + first // SCALED + block, exponent.to(tl.uint8), mask=first + block * SCALED < n)
        stored = encode(values, spread(inverse_scale(exponent), size), noise, second_moment)
    elif form == BFLOAT16_STATES:
        stored = to_bfloat16_stochastic(flush_subnormal(values), noise)
    else:
        stored = flush_subnormal(values)
    store(state, stored, first, n, size, whole)
