"""16 and 8 bits: every number goes in and comes out alike on all backends, and a NaN stays one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import integers, lists, sampled_from
from places import INSTRUCTION_SETS, INTERPRETED, ON_CPU, ON_GPU, Place
from stored import MASTERS
from table import STATES, WEIGHTS, case_named, random_grads, set_grads
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.backends.reference import ReferenceBackend
from accumfused.formats import codecs, numeric
from accumfused.formats import kinds as formats
from accumfused.optimizers import RULES

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
HALVES = 1 << 16
_HIGHS_AT_ONCE = 256


def of_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int16).view(dtype)


def make(backend: Any, values: Tensor, lr: float, **options: Any) -> tuple[Any, Tensor]:
    param = values.clone().requires_grad_()
    optimizer = af.SGD([param], lr=lr, nonfinite="propagate", rounding_seed=5, **options)
    inside.use_backend(optimizer, backend)
    return optimizer, param


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_number_of_16_bits(weights: str, place: Place) -> None:
    """As a gradient, as a parameter that moves by half a unit, and written from outside, beside another's rest."""
    dtype, options = WEIGHTS[weights]
    half = torch.float16 if weights.startswith("fp16") else torch.bfloat16
    bits = torch.arange(0, HALVES, 7 if place.is_slow else 1, dtype=torch.int32)
    values, neighbours = of_bits(bits, half), of_bits(bits + 1, half)
    steps = (neighbours.float() - values.float()) * torch.rand(len(bits), generator=torch.Generator().manual_seed(4))
    found = []
    for backend, device in ((ReferenceBackend(), "cpu"), (place.backend, place.device)):
        optimizer, param = make(backend, values.to(device, dtype), 1.0, **options)
        after = []
        for grad in (steps, torch.zeros_like(steps), values):
            param.grad = None
            param.grad_dtype = grad.dtype
            param.grad = grad.to(device)
            optimizer.step()
            after.append(param.detach().clone())
            if grad is steps:
                param.data.copy_(values.flip(0))
        found.append([*after, *(v for n, v in optimizer.state[param].items() if "remainder" not in n)])
    for actual, wanted in zip(found[1], found[0], strict=True):
        assert_same_bits(actual.cpu(), wanted)
    written = values.flip(0).to(dtype)
    assert torch.equal(found[0][1].isnan(), written.isnan())
    torch.testing.assert_close(found[0][1], written, rtol=2.0**-7, atol=1e-38, equal_nan=True)


NOT_FINITE = (0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x7F7F)  # NaNs, infinities, the largest number


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS, "emulated", *ON_GPU], indirect=True)
@pytest.mark.parametrize("weights", ["split16", "split8"])
@pytest.mark.parametrize("of", ["param", "grad"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_number_that_is_not_finite_among_codes(weights: str, of: str, grad_dtype: Any, place: Place) -> None:
    def stored(backend: Any, device: str, value: int, at: int, eps: float) -> list[Tensor]:
        param = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        (grad,) = random_grads([param], 0, torch.bfloat16)
        grad[130:140] = 0  # with eps=0 a NaN of finite moments
        (param.data if of == "param" else grad).view(torch.int16)[at] = value - (value >> 15 << 16)
        param = param.detach().to(device).requires_grad_()
        optimizer = case_named("adamw").make(
            [param], backend, nonfinite="propagate", state_dtype="int8", state_dtype_min_numel=2, rounding_seed=17,
            **WEIGHTS[weights][1],
        )  # fmt: skip
        optimizer.param_groups[0]["eps"] = eps
        for _ in range(3):  # the scales of a block that is not finite are read again
            set_grads([param], [grad.to(device, grad_dtype)])
            optimizer.step()
        entries = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):  # what is NaN has codes of no meaning
            entries[name][(entries[f"{name}_scale"] == 255).repeat_interleave(codecs.BLOCK)[:1000]] = 0
        return [param.detach().cpu(), *(value.cpu() for value in entries.values())]

    for number, value in enumerate(NOT_FINITE):
        for at in (0, 257, 903):
            arguments = value, at, (1e-8, 0.0)[(number + at) % 2]
            wanted = stored(ReferenceBackend(), "cpu", *arguments)
            for one, other in zip(stored(place.backend, place.device, *arguments), wanted, strict=True):
                assert_same_bits(one, other, str(arguments))


# ---- the two halves of an fp32 weight -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("place", ["torch", *INSTRUCTION_SETS, "emulated", *ON_GPU], indirect=True)
@pytest.mark.parametrize(("weights", "dtype"), [("split16", torch.int16), ("split8", torch.int8)])
def test_numbers_of_every_half_and_of_every_kind(weights: str, dtype: torch.dtype, place: Place) -> None:
    least, count = torch.iinfo(dtype).min, 2 * torch.iinfo(dtype).max + 2
    high = torch.arange(HALVES).to(torch.int16).repeat_interleave(12)
    rests = torch.randint(least, least + count, (len(high),))
    rests[::2] = torch.tensor([least, least + 1, -1, 0, 1, least + count - 1]).repeat(HALVES)
    high, remainder = high.to(place.device), rests.to(place.device, dtype)
    optimizer, param = make(place.backend, torch.zeros_like(high, dtype=torch.bfloat16), 0.0, master_weights=weights)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_remainder"]
    param.data.view(torch.int16).copy_(high)
    master.copy_(remainder)
    optimizer.step()
    assert_restored(param.detach(), master, high, remainder)


@pytest.mark.full
def test_all_numbers_of_fp32_with_16_bits_of_remainder(native: None) -> None:
    torch.set_num_threads(2)
    param = Parameter(torch.zeros(_HIGHS_AT_ONCE * HALVES, dtype=torch.bfloat16))
    optimizer = af.SGD([param], lr=0.0, master_weights="split16", backend="cpu")
    param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_remainder"]
    remainder = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).repeat(_HIGHS_AT_ONCE)
    master.copy_(remainder)
    stored = param.data.view(torch.int16).view(_HIGHS_AT_ONCE, HALVES)  # the optimizer does not notice its writes
    for first in range(0, HALVES, _HIGHS_AT_ONCE):
        high = torch.arange(first, first + _HIGHS_AT_ONCE).to(torch.int16).view(-1, 1).expand_as(stored)
        stored.copy_(high)
        optimizer.step()
        if not torch.equal(stored, high) or not torch.equal(master, remainder):
            assert_restored(param.detach(), master, high.flatten(), remainder)
            master.copy_(remainder)


def test_the_reference_splits_and_joins_alike() -> None:
    edges = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, *torch.randint(0, 1 << 16, (7,)).tolist()]
    bits = (torch.arange(HALVES).view(-1, 1) << 16 | torch.tensor(edges)).flatten()
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    high, remainder = codecs.split(values)
    assert (int(remainder.min()), int(remainder.max())) == (-(1 << 15), (1 << 15) - 1)
    half, nan, low = of_bits(high, torch.bfloat16), values.isnan(), bits & 0xFFFF
    joined = codecs.join(high.to(torch.int16).to(torch.int32), remainder.to(torch.int16).to(torch.int32))
    assert torch.equal(joined[~nan].view(torch.int32), values[~nan].view(torch.int32))
    assert joined[nan].isnan().all()
    assert torch.equal(half.isnan(), nan)
    # Nearest, ties away from zero: torch's rounding, but for ties.
    finite = values.isfinite() & values.bfloat16().isfinite() & half.isfinite()
    untied, tied = finite & (low != 0x8000), finite & (low == 0x8000)
    assert torch.equal(half[untied], values[untied].bfloat16())
    assert (half[tied].float().abs() > values[tied].abs()).all()


# What people write through `p.data`, which no version counter tells.
WRITES: list[Callable[[Tensor], Any]] = [
    lambda data: data.masked_fill_(torch.arange(data.numel()) % 3 == 0, 0),  # a pruning mask
    lambda data: data.clamp_(min=0), lambda data: data.clamp_(max=0), lambda data: data.neg_(),
    lambda data: data.fill_(-0.0), lambda data: data.fill_(torch.inf), lambda data: data.fill_(-torch.inf),
    lambda data: data.fill_(torch.finfo(data.dtype).max),
    lambda data: data.fill_(torch.finfo(data.dtype).smallest_normal), lambda data: data.mul_(0.5),
]  # fmt: skip


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("weights", MASTERS)
@pytest.mark.parametrize("place", [*ON_CPU, *ON_GPU], indirect=True)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=lists(sampled_from(range(len(WRITES))), min_size=1, max_size=4), seed=integers(0, 99))
def test_what_is_written_through_data_counts(
    weights: str, states: str, moves: list[int], seed: int, place: Place, tensors_there: None
) -> None:
    torch.manual_seed(seed)
    dtype, chosen = WEIGHTS[weights]
    param = Parameter(torch.randn(2048 + 40).to(dtype))
    optimizer = af.AdamW([param], lr=1e-6, state_dtype=STATES[states], rounding_seed=1, **chosen)
    inside.use_backend(optimizer, place.backend)
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
        assert (after[before == 0].abs() <= 1e-4).all()


def test_constants_and_rules_are_those_of_the_kernels(native: None) -> None:
    module = inside.native()
    assert (module.CHUNK, module.LANES) == (numeric.CHUNK, numeric.LANES)
    assert (module.BLOCK, module.MIN_SECOND_MOMENT, module.SMALLEST_SCALE) == (
        codecs.BLOCK, codecs.MIN_SECOND_MOMENT, codecs.SMALLEST_SCALE
    )  # fmt: skip
    assert numeric.CHUNK % codecs.BLOCK == 0
    assert max(formats.Weights) == 8
    assert module.rules() == [(r.name, tuple(r.states), r.counts_steps, tuple(r.hypers)) for r in RULES]
