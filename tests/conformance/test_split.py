"""The two halves of an fp32 weight: every number is restored bit for bit, and a NaN stays one in the half too.

Where a half was written from outside, beside the remainder of what was there before, it is at most half a unit off, and
never NaN unless NaN was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import integers, lists, sampled_from
from stored import MASTERS
from table import STATES, WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused import codecs

HALVES, REMAINDERS = 1 << 16, 1 << 16
_HIGHS_AT_ONCE = 256


def is_nan(high: Tensor, remainder: Tensor) -> Tensor:
    bits = (high.to(torch.int32) << 16) + remainder.to(torch.int32)
    return (bits & 0x7FFFFFFF) > 0x7F800000


def assert_restored(param: Tensor, master: Tensor, high: Tensor, remainder: Tensor) -> None:
    """A step that changes nothing has joined and split each pair."""
    stored, shift = param.view(torch.int16), 0 if remainder.dtype == torch.int16 else 8
    nan = high.view(torch.bfloat16).isnan()
    written = is_nan(high, remainder.to(torch.int16) << shift) & ~nan  # no split has made these
    assert torch.equal(torch.where(nan, high, stored), high)
    assert torch.equal(torch.where(nan | written, remainder, master), remainder)
    assert not master[written].any()
    assert param[nan].isnan().all()
    assert is_nan(stored, master.to(torch.int16) << shift)[nan].all()


def test_all_numbers_of_fp32_with_16_bits_of_remainder(native: None) -> None:
    torch.set_num_threads(2)
    param = Parameter(torch.zeros(_HIGHS_AT_ONCE * REMAINDERS, dtype=torch.bfloat16))
    optimizer = af.SGD([param], lr=0.0, master_weights="split16", backend="cpu")
    param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_remainder"]
    remainder = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).repeat(_HIGHS_AT_ONCE)
    nans = 0
    master.copy_(remainder)
    stored = param.data.view(torch.int16).view(_HIGHS_AT_ONCE, REMAINDERS)  # the optimizer does not notice its writes
    for first in range(0, HALVES, _HIGHS_AT_ONCE):
        high = torch.arange(first, first + _HIGHS_AT_ONCE).to(torch.int16).view(-1, 1).expand_as(stored)
        stored.copy_(high)
        optimizer.step()
        if torch.equal(stored, high) and torch.equal(master, remainder):
            continue
        nans += 1
        assert_restored(param.detach(), master, high.flatten(), remainder)
        master.copy_(remainder)
    assert nans == 4  # around infinity of either sign, and where their bits wrap around


def test_all_numbers_with_8_bits_of_remainder(backend: str) -> None:
    high = torch.arange(HALVES).to(torch.int16).repeat_interleave(1 << 8)
    remainder = torch.arange(-(1 << 7), 1 << 7).to(torch.int8).repeat(HALVES)
    if backend != "cpu":  # some of them, of every kind
        high, remainder = high[::61].contiguous(), remainder[::61].contiguous()
    param = Parameter(torch.zeros(high.shape, dtype=torch.bfloat16))
    optimizer = af.SGD([param], lr=0.0, master_weights="split8", backend=backend)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_remainder"]
    param.data.view(torch.int16).copy_(high)
    master.copy_(remainder)
    optimizer.step()
    assert_restored(param.detach(), master, high, remainder)


def test_the_reference_splits_and_joins_alike() -> None:
    edges = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, *torch.randint(0, 1 << 16, (23,)).tolist()]
    bits = (torch.arange(HALVES).view(-1, 1) << 16 | torch.tensor(edges)).flatten()
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    high, remainder = codecs.split(values)
    assert int(remainder.min()) == -(1 << 15)
    assert int(remainder.max()) == (1 << 15) - 1
    half = high.to(torch.int16).view(torch.bfloat16)
    joined = codecs.join(high.to(torch.int16).to(torch.int32), remainder.to(torch.int16).to(torch.int32))
    nan = values.isnan()
    assert torch.equal(joined[~nan].view(torch.int32), values[~nan].view(torch.int32))
    assert joined[nan].isnan().all()
    assert half[nan].isnan().all()
    assert not half[~nan].isnan().any()
    # Nearest, ties away from zero: torch's rounding, but for ties.
    finite = values.isfinite() & values.bfloat16().isfinite() & half.isfinite()
    low = bits & 0xFFFF
    untied = finite & (low != 0x8000)
    assert torch.equal(half[untied], values[untied].bfloat16())
    tied = finite & (low == 0x8000)
    assert (half[tied].float().abs() > values[tied].abs()).all()


# What people write through `p.data`, which no version counter tells.
WRITES: list[Callable[[Tensor], Any]] = [
    lambda data: data.masked_fill_(torch.arange(data.numel()) % 3 == 0, 0),  # a pruning mask
    lambda data: data.clamp_(min=0),
    lambda data: data.clamp_(max=0),
    lambda data: data.neg_(),
    lambda data: data.fill_(-0.0),
    lambda data: data.fill_(torch.inf),
    lambda data: data.fill_(-torch.inf),
    lambda data: data.fill_(torch.finfo(data.dtype).max),
    lambda data: data.fill_(torch.finfo(data.dtype).smallest_normal),
    lambda data: data.mul_(0.5),
]


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("weights", MASTERS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=lists(sampled_from(range(len(WRITES))), min_size=1, max_size=4), seed=integers(0, 99))
def test_what_is_written_through_data_counts(
    backend: str, weights: str, states: str, moves: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    dtype, chosen = WEIGHTS[weights]
    param = Parameter(torch.randn(2048 + 40).to(dtype))
    optimizer = af.AdamW([param], lr=1e-6, backend=backend, state_dtype=STATES[states], rounding_seed=1, **chosen)
    for move in [-1, *moves]:
        if move >= 0:
            WRITES[move](param.data)
        before = param.detach().float().clone()
        param.grad = torch.randn_like(param)
        optimizer.step()
        after = param.detach().float()
        assert not after.isnan().any()
        # An infinite half with a remainder may be the largest finite numbers.
        finite = before.abs() < torch.finfo(dtype).max / 2
        torch.testing.assert_close(after[finite], before[finite], rtol=2.0**-7, atol=1e-4)
        zeros = before == 0
        assert (after[zeros].abs() <= 1e-4).all()
