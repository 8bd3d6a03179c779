"""Codecs store numbers in fewer bits, and noise rounds them, in PyTorch: the counterpart of csrc/codecs.h.

All functions work on the bits of fp32 numbers, so every backend stores the same bits. `encode` takes fp32 values in
memory order, with 32 bits of noise for each; `decode` returns fp32. docs/internals/arithmetic.md has the formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.formats.numeric import CHUNK, chunk_count

# These numbers belong to the arithmetic; a test compares them with csrc/rows.h.
BLOCK = 128  # elements of a quantisation block, which share a scale: a warp of 32 threads holds four each
MIN_SECOND_MOMENT = 4  # the smallest code of a second moment
SMALLEST_SCALE = 33  # biased exponent

_NAN = 0x7FC00000
_SHIFT = 19  # of the 23 bits of a mantissa, codes keep 4
_SIGNED_BASE = 120 << 23  # bits of 2^-7: 3 bits of exponent below 2
_UNSIGNED_BASE = 112 << 23  # of 2^-15: 4 bits
_HEADROOM = 2 << _SHIFT  # see `scale_of`
_HALF = 0xFFFFFFFF
_TURNS = (0, 16, 24)  # the states' noise of 16 bits is then one half each, the weights' whole bytes


# ---- noise ----------------------------------------------------------------------------------------------------------


def mix(value: Tensor) -> Tensor:
    """Mixes 64 bits, as int64: the output function of SplitMix64 (Steele, Lea & Flood 2014)."""
    value = value + -7046029254386353131  # 0x9E3779B97F4A7C15
    value = (value ^ _shift_right(value, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    value = (value ^ _shift_right(value, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return value ^ _shift_right(value, 31)


def key(seed: Tensor, step: Tensor, row: int) -> Tensor:
    """The key of one tensor's noise in one step: int64, shape [].

    Args:
        seed: int64, shape [].
        step: this step's number, int64, shape [].
        row: the tensor's place among the optimizer's parameters.
    """
    return mix(mix(mix(seed) ^ step) ^ row)


def noise(tensor_key: Tensor, numel: int, origin: int = 0) -> Tensor:
    """32 random bits for each element of a tensor, int32 [numel]: a hash of the key and the element's index alone.

    The bits depend neither on the division of the work nor on other elements. One hash of 64 bits is for a pair of
    neighbours: a number of a Weyl sequence is folded by a product of its halves, and again by one with a constant
    (docs/internals/arithmetic.md has the formula, and what it was tested for).

    Args:
        origin: the first element's index in the whole tensor, so that a shard gets the whole tensor's bits. (Each 2^32
            elements have their own key. A shard's chunk across such a boundary keeps its first element's key, so a few
            elements beyond 4G may get different bits.)
    """
    begin = origin + CHUNK * torch.arange(chunk_count(numel), dtype=torch.int64, device=tensor_key.device)
    first, high = (each.repeat_interleave(CHUNK)[:numel] for each in (mix(tensor_key ^ (begin >> 32)), begin >> 32))
    index = torch.arange(origin, origin + numel, dtype=torch.int64, device=tensor_key.device) - (high << 32)
    position = first + (index >> 1) * 0x4E3779B1
    low = position & _HALF
    mixed = low * (low ^ _shift_right(position, 32))  # products below 2^64 keep their bits in int64
    bits = ((mixed & _HALF) ^ _shift_right(mixed, 32)) * 0xFFFF3A4D + mixed
    return torch.where(index % 2 == 0, bits, bits >> 32).to(torch.int32)  # which keeps the low half


def stream(bits: Tensor, number: int) -> Tensor:
    """One of three streams of an element's noise, rotated so that their leading bits differ."""
    turn = _TURNS[number]
    return bits if turn == 0 else (bits << turn) | _logical(bits, 32 - turn)


# ---- 16 bits --------------------------------------------------------------------------------------------------------


def to_bfloat16_stochastic(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds to one of the two neighbours, the nearer one more often in proportion."""
    return bfloat16_of(_logical(_one_nan(values) + _logical(noise, 16), 16))


def bfloat16_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


# ---- bfloat16 with a remainder: the fp32 master weight in two halves ------------------------------------------------


def split(values: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Splits fp32 into the nearest bfloat16 (ties away from zero), and its remainder: int16. It needs no noise.

    `join` returns the same bits; every NaN becomes one NaN, which the bfloat16 half shows too.
    """
    bits = _one_nan(values)
    return bfloat16_of(_logical(bits + 0x8000, 16)), bits.to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """Joins both halves of fp32 numbers.

    A split number is NaN only if its bfloat16 half is. If only the joined number is NaN, user code has written the
    parameter since (a zero beside the old, negative remainder, say). Then the parameter counts as it is.
    """
    high = param.view(torch.int16).to(torch.int32) << 16
    joined = (high + remainder).view(torch.float32)
    return torch.where(joined.isnan(), high.view(torch.float32), joined)


def split_short(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Splits with a remainder of int8, after it has rounded the mantissa stochastically to 16 bits."""
    bits = _one_nan(values) + _logical(noise, 24)
    return bfloat16_of(_logical(bits + 0x8000, 16)), (bits >> 8).to(torch.int8)


def join_short(param: Tensor, remainder: Tensor) -> Tensor:
    return join(param, remainder.to(torch.int32) << 8)


# ---- a 16-bit parameter with a whole fp32 master --------------------------------------------------------------------


def split_master(values: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds fp32 to the nearest fp16, beside the whole value as its master. It needs no noise."""
    return values.half(), values


def join_master(param: Tensor, master: Tensor) -> Tensor:
    """Returns the fp32 master, except elements that no longer round to the parameter: those come from the parameter."""
    is_same = master.to(param.dtype).view(torch.int16) == param.view(torch.int16)
    return torch.where(is_same, master, param.float())


# ---- blocks of 8 bits -----------------------------------------------------------------------------------------------
# A code is a float with 4 bits of mantissa and 3 or 4 of exponent. The code c has a number F(c), at least 2^-7 or 2^-15
# and below 2, and stands for (F(c) - F(0)) times the block's scale. So 0 is a code, and rounding is unbiased down to 0.


def scale_of(values: Tensor) -> Tensor:
    """The biased exponent of each block's scale, a power of two: uint8 [blocks].

    The largest value is below 1.875 times the scale, so no value exceeds the last code. If the codec cut a second
    moment off, it would never grow past a power of two. 255: a value is infinite, NaN or above 1.5e38, and the whole
    block decodes to NaN. 0: all values are below 2^-94 and become 0, so a block never decodes to subnormals.
    """
    largest = (_bits(_blocks(values)) & 0x7FFFFFFF).amax(1)
    exponent = _logical(largest + _HEADROOM, 23)  # the sum of some NaNs is beyond int32
    exponent = torch.where(exponent < SMALLEST_SCALE, 0, exponent)
    return torch.where(exponent >= 254, 255, exponent).to(torch.uint8)


def encode(values: Tensor, scale: Tensor, noise: Tensor, *, second_moment: bool) -> Tensor:
    """Codes of fp32 values under their blocks' scales: uint8, the shape of the values.

    A first moment's code has its sign in the top bit. A second moment's code is at least MIN_SECOND_MOMENT. A second
    moment of 0 under a first moment that is not 0 would make the update thousands of times too large.
    """
    exponent = _spread(scale, values).to(torch.int32)
    inverse = torch.where(exponent == 255, 0, (254 - exponent) << 23).view(torch.float32)
    base = _UNSIGNED_BASE if second_moment else _SIGNED_BASE
    offset = torch.full((), base, dtype=torch.int32, device=values.device).view(torch.float32)
    code = (_bits(values.abs() * inverse + offset) + (_logical(noise, 16) << _SHIFT - 16) - base) >> _SHIFT
    if second_moment:
        return code.clamp(min=MIN_SECOND_MOMENT).to(torch.uint8)
    return ((code & 0x7F) | (_logical(_bits(values), 24) & 0x80)).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, *, second_moment: bool) -> Tensor:
    """fp32 values from codes and their blocks' scales."""
    exponent = _spread(scale, codes).to(torch.int32)
    factor = torch.where(exponent == 255, _NAN, exponent << 23).view(torch.float32)
    code = codes.to(torch.int32)
    base = _UNSIGNED_BASE if second_moment else _SIGNED_BASE
    offset = torch.full((), base, dtype=torch.int32, device=codes.device).view(torch.float32)
    if second_moment:
        return (((code << _SHIFT) | base).view(torch.float32) - offset) * factor
    value = ((((code & 0x7F) << _SHIFT) | base).view(torch.float32) - offset) * factor
    return torch.where(code >= 0x80, -value, value)


def block_count(numel: int) -> int:
    return -(-numel // BLOCK)


def _blocks(values: Tensor) -> Tensor:
    """The values as [blocks, BLOCK], with zeros behind the end."""
    padded = values.new_zeros(block_count(values.numel()) * BLOCK)
    padded[: values.numel()] = values
    return padded.view(-1, BLOCK)


def _spread(scale: Tensor, values: Tensor) -> Tensor:
    """Repeats each block's scale for its elements."""
    return scale.repeat_interleave(BLOCK)[: values.numel()]


# ---- bits -----------------------------------------------------------------------------------------------------------


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _one_nan(values: Tensor) -> Tensor:
    """The values' bits, the same for every NaN: rounding turns the bits of some NaNs into other numbers."""
    return torch.where(values.isnan(), _NAN, _bits(values))


def _logical(bits: Tensor, count: int) -> Tensor:
    """Shifts int32 right without the sign; 0 < count < 32."""
    return (bits >> count) & (0xFFFFFFFF >> count)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts int64 right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
