"""Codecs store numbers in fewer bits, and noise rounds them, in Triton: the counterpart of formats/codecs.py.

Values are fp32; their bits, and noise, are uint32. Triton's interpreter reports an overflow as an error, so sums and
products that may wrap say so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accumfused.formats import codecs

SCALED = tl.constexpr(codecs.BLOCK)  # elements of a quantisation block, which share a scale
MIN_SECOND_MOMENT = tl.constexpr(codecs.MIN_SECOND_MOMENT)
SMALLEST_SCALE = tl.constexpr(codecs.SMALLEST_SCALE)

NAN = tl.constexpr(0x7FC00000)
SHIFT = tl.constexpr(19)  # of the 23 bits of a mantissa, codes keep 4
SIGNED_BASE = tl.constexpr(120 << 23)
UNSIGNED_BASE = tl.constexpr(112 << 23)
HEADROOM = tl.constexpr(2 << 19)


@triton.jit
def bits_of(values):
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


# ---- noise ----------------------------------------------------------------------------------------------------------


@triton.jit
def mix(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def step_key(seed, step, row):
    """Returns the key of one tensor's noise in one step."""
    return mix(mix(mix(seed.to(tl.uint64)) ^ tl.cast(step, tl.uint64)) ^ tl.cast(row, tl.uint64))


@triton.jit
def noise_keys(key, start):
    """Returns a chunk's keys of noise: its first pair's position, and 1 if it begins with the second element of a pair.

    `start`: index of the chunk's first element in the whole tensor, whose key is `key`.
    """
    first = mix(key ^ (start.to(tl.uint64) >> 32))
    pair = (start.to(tl.uint32) >> 1).to(tl.uint64)
    return tl.add(first, pair * 0x4E3779B1, sanitize_overflow=False), start.to(tl.uint32) & 1


@triton.jit
def noise(keys, element):
    """Draws 32 bits of noise for each element; `element` holds the indices in the chunk."""
    first, odd = keys
    element = element.to(tl.uint32) + odd
    position = tl.add((element >> 1).to(tl.uint64) * 0x4E3779B1, first, sanitize_overflow=False)
    mixed = position.to(tl.uint32).to(tl.uint64) * (position ^ (position >> 32)).to(tl.uint32)
    factor = (mixed ^ (mixed >> 32)).to(tl.uint32).to(tl.uint64)
    bits = tl.add(factor * 0xFFFF3A4D, mixed, sanitize_overflow=False)
    return tl.where(element % 2 == 0, bits, bits >> 32).to(tl.uint32)


@triton.jit
def stream(bits, number: tl.constexpr):
    """Returns one of three streams of an element's noise, each rotated by other bits."""
    turned = bits
    if number > 0:
        turn: tl.constexpr = 16 if number == 1 else 24
        turned = (bits << turn) | (bits >> 32 - turn)
    return turned


# ---- 16 bits --------------------------------------------------------------------------------------------------------


@triton.jit
def one_nan(values):
    """Returns the values' bits, the same for every NaN: rounding turns the bits of some NaNs into other numbers."""
    return tl.where(values != values, NAN, bits_of(values))


@triton.jit
def to_bfloat16_stochastic(values, noise):
    return ((one_nan(values) + (noise >> 16)) >> 16).to(tl.uint16)


@triton.jit
def to_bfloat16(values):
    """Rounds to the nearest; ties go to even."""
    bits = one_nan(values)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(tl.uint16)


@triton.jit
def from_bfloat16(bits):
    return from_bits(bits.to(tl.uint32) << 16)


# ---- bfloat16 with a remainder --------------------------------------------------------------------------------------


@triton.jit
def split(values):
    """Splits fp32 into bfloat16 and an int16 remainder."""
    bits = one_nan(values)
    return ((bits + 0x8000) >> 16).to(tl.uint16), bits.to(tl.int16)


@triton.jit
def split_short(values, noise):
    """Splits fp32 into bfloat16 and an int8 remainder."""
    bits = one_nan(values) + (noise >> 24)
    return ((bits + 0x8000) >> 16).to(tl.uint16), (bits >> 8).to(tl.int8)


@triton.jit
def join(high, remainder):
    """Joins both halves; where they make a NaN, the parameter counts as it is: see formats/codecs.py."""
    param = high.to(tl.uint32) << 16
    joined = from_bits(tl.add(param, remainder.to(tl.uint32), sanitize_overflow=False))
    return tl.where(joined != joined, from_bits(param), joined)


@triton.jit
def join_short(high, remainder):
    return join(high, remainder.to(tl.uint32) << 8)


# ---- a 16-bit parameter with a whole fp32 master --------------------------------------------------------------------


@triton.jit
def split_master(values):
    """Rounds fp32 to fp16, beside the whole value as its master."""
    return values.to(tl.float16), values


@triton.jit
def join_master(param, master):
    """Returns the master, but for elements that no longer round to the parameter: see formats/codecs.py."""
    is_same = master.to(tl.float16).to(tl.uint16, bitcast=True) == param.to(tl.uint16, bitcast=True)
    return tl.where(is_same, master, param.to(tl.float32))


# ---- blocks of 8 bits -----------------------------------------------------------------------------------------------


@triton.jit
def scale_of(magnitudes, size: tl.constexpr):
    """Computes each block's biased exponent, [size / SCALED], from the bits of its magnitudes, [size]."""
    largest = tl.max(tl.reshape(magnitudes, (size // SCALED, SCALED)), axis=1)
    exponent = ((largest + HEADROOM) >> 23).to(tl.int32)
    return tl.where(exponent >= 254, 255, tl.where(exponent < SMALLEST_SCALE, 0, exponent))


@triton.jit
def scale_factor(exponent):
    return from_bits(tl.where(exponent == 255, NAN, exponent << 23))


@triton.jit
def inverse_scale(exponent):
    return from_bits(tl.where(exponent == 255, 0, (254 - exponent) << 23))


@triton.jit
def spread(scales, size: tl.constexpr):
    """Repeats each block's number for its elements."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(scales, 1), (size // SCALED, SCALED)), (size,))


@triton.jit
def encode(values, inverse, noise, second_moment: tl.constexpr):
    """Encodes values; `inverse` holds each element's inverse scale."""
    base = UNSIGNED_BASE if second_moment else SIGNED_BASE
    offset = 2.0**-15 if second_moment else 2.0**-7
    bits = bits_of(tl.abs(values) * inverse + offset).to(tl.int32) - base + (noise >> 16 << SHIFT - 16).to(tl.int32)
    if second_moment:
        code = (tl.maximum(bits, MIN_SECOND_MOMENT << SHIFT) >> SHIFT).to(tl.uint32)
    else:
        code = ((bits >> SHIFT) & 0x7F).to(tl.uint32) | ((bits_of(values) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def decode(codes, factor, second_moment: tl.constexpr):
    """Decodes codes; `factor` holds each element's scale."""
    codes = codes.to(tl.uint32)
    if second_moment:
        values = (from_bits((codes << SHIFT) | UNSIGNED_BASE) - 2.0**-15) * factor
    else:
        magnitude = from_bits(((codes & 0x7F) << SHIFT) | SIGNED_BASE) - 2.0**-7
        values = magnitude * from_bits(bits_of(factor) ^ ((codes & 0x80) << 24))
    return values
