"""16 and 8 bits: every number goes in and comes out alike on all backends, and a NaN stays one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_same_bits, everything
from models import MASTERS
from places import INSTRUCTION_SETS, INTERPRETED, ON_CPU, ON_GPU, Place
from reference import ReferenceBackend
from table import STATES, WEIGHTS, case_named, random_grads, set_grads
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.backends.cpu import CpuBackend
from accumfused.formats import codecs, numeric
from accumfused.formats.kinds import States, Weights, format_of
from accumfused.optimizers import RULES
from accumfused.rules.to_cpp import digest
from accumfused.settings import MasterWeights, Settings

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
HALVES = 1 << 16


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
    """As a gradient, as a parameter that moves by up to a unit, and written from outside, beside another's rest."""
    dtype, options = WEIGHTS[weights]
    half = torch.float16 if weights.startswith("fp16") else torch.bfloat16
    bits = torch.arange(0, HALVES, 7 if place.is_slow else 1, dtype=torch.int32)
    values, neighbours = of_bits(bits, half), of_bits(bits + 1, half)
    units = torch.rand(len(bits), generator=torch.Generator().manual_seed(4))
    units[::5] = 0.5  # ties
    steps = (neighbours.float() - values.float()) * units
    steps.view(torch.int32)[:2] = torch.tensor([0x7FFFFFFF, -1])  # NaNs of ones only: to add to their bits makes zeros
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


# NaNs, infinities, the largest number.
NOT_FINITE = (0x7FC0, 0xFFC0, 0x7FFF, 0x7F81, 0x7F80, 0xFF80, 0x7F7F, 0xFFFF)


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS, "emulated", *ON_GPU], indirect=True)
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
@pytest.mark.parametrize("of", ["param", "grad"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_number_that_is_not_finite_among_codes(weights: str, of: str, grad_dtype: Any, place: Place) -> None:
    """Each at three places of a block of its own."""
    numbers = of_bits(torch.tensor(NOT_FINITE), torch.bfloat16)
    size = 2 * codecs.BLOCK * len(numbers) + 130

    def stored(backend: Any, device: str, at: int, eps: float) -> dict[str, Tensor]:
        param = torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        (grad,) = random_grads([param], 0, torch.bfloat16)
        grad[130:140] = 0  # with eps=0 a NaN of finite moments
        (param.data if of == "param" else grad)[at :: 2 * codecs.BLOCK][: len(numbers)] = numbers
        param = param.detach().to(device).requires_grad_()
        optimizer = case_named("adamw").make(
            [param], backend, nonfinite="propagate", state_dtype="8bit", state_dtype_min_numel=2, rounding_seed=17,
            **WEIGHTS[weights][1],
        )  # fmt: skip
        optimizer.param_groups[0]["eps"] = eps
        for _ in range(3):  # the scales of a block that is not finite are read again
            set_grads([param], [grad.to(device, grad_dtype)])
            optimizer.step()
        found = {name: value.cpu() for name, value in everything(optimizer).items()}
        for name in ("exp_avg", "exp_avg_sq"):  # what is NaN has codes of no meaning
            found[f"{name} 0"][(found[f"{name}_scale 0"] == 255).repeat_interleave(codecs.BLOCK)[:size]] = 0
        return found

    for arguments in ((0, 1e-8), (1, 0.0), (codecs.BLOCK - 1, 1e-8)):
        wanted = stored(ReferenceBackend(), "cpu", *arguments)
        assert_all_same_bits(stored(place.backend, place.device, *arguments), wanted)


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


def joined_and_split(weights: str, backend: Any, high: Tensor, remainder: Tensor) -> None:
    """By a step that changes nothing."""
    optimizer, param = make(backend, torch.zeros_like(high, dtype=torch.bfloat16), 0.0, master_weights=weights)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_remainder"]
    param.data.view(torch.int16).copy_(high)
    master.copy_(remainder)
    optimizer.step()
    assert_restored(param.detach(), master, high, remainder)


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize(("weights", "dtype"), [("split16", torch.int16), ("split8", torch.int8)])
def test_numbers_of_every_half_and_of_every_kind(weights: str, dtype: torch.dtype, place: Place) -> None:
    least, count = torch.iinfo(dtype).min, 2 * torch.iinfo(dtype).max + 2
    high = torch.arange(HALVES).to(torch.int16).repeat_interleave(12)
    rests = torch.randint(least, least + count, (len(high),))
    rests[::2] = torch.tensor([least, least + 1, -1, 0, 1, least + count - 1]).repeat(HALVES)
    some = slice(None, None, 31 if place.is_slow else 1)
    joined_and_split(weights, place.backend, high[some].to(place.device), rests[some].to(place.device, dtype))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, HALVES, 256))
def test_all_numbers_of_fp32_with_16_bits_of_remainder(first: int, native: None) -> None:
    high = torch.arange(first, first + 256).to(torch.int16).repeat_interleave(HALVES)
    joined_and_split("split16", CpuBackend(), high, torch.arange(-(1 << 15), 1 << 15).to(torch.int16).repeat(256))


# What people write through `p.data`, which no version counter tells.
WRITES: list[Callable[[Tensor], Any]] = [
    lambda data: data.masked_fill_(torch.arange(data.numel()) % 3 == 0, 0),  # a pruning mask
    lambda data: data.clamp_(min=0), lambda data: data.clamp_(max=0), lambda data: data.neg_(),
    lambda data: data.fill_(-0.0), lambda data: data.fill_(torch.inf), lambda data: data.fill_(-torch.inf),
    lambda data: data.fill_(torch.finfo(data.dtype).max),
    lambda data: data.fill_(torch.finfo(data.dtype).smallest_normal), lambda data: data.mul_(0.5),
]  # fmt: skip


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", MASTERS)
@pytest.mark.parametrize("place", [*ON_CPU, *ON_GPU], indirect=True)
def test_what_is_written_through_data_counts(weights: str, states: str, place: Place, tensors_there: None) -> None:
    dtype, settings = WEIGHTS[weights]
    param = Parameter(torch.randn(2048 + 40).to(dtype))
    kept: dict[str, Any] = {"state_dtype": STATES[states], "state_dtype_min_numel": 2, "rounding_seed": 1}
    optimizer = af.AdamW([param], lr=1e-6, **kept, **settings)
    inside.use_backend(optimizer, place.backend)
    for write in [lambda data: data, *WRITES]:
        write(param.data)
        before = param.detach().float().clone()
        param.grad = torch.randn_like(param)
        optimizer.step()
        after = param.detach().float()
        assert not after.isnan().any()
        # An infinite half with a remainder may be the largest finite numbers.
        finite = before.abs() < torch.finfo(dtype).max / 2
        torch.testing.assert_close(after[finite], before[finite], rtol=2.0**-7, atol=1e-4)
        assert (after[before == 0].abs() <= 1e-4).all()
        if not finite.any():
            param.data.copy_(torch.randn_like(param))


def test_the_settings_and_the_tests_have_every_format() -> None:
    chosen = [
        format_of(RULES[0], torch.empty(0, dtype=dtype), Settings(**options)).weights
        for dtype, options in WEIGHTS.values()
    ]
    assert chosen == [*Weights]
    assert [*map(int, Weights)] == [*range(len(Weights))]  # lists of the kernels are in this order
    options = [option for weights in chosen[1:] for option in weights.options]
    assert {*options} == {None, *get_args(MasterWeights)}
    assert [*STATES.values()] == [states.option for states in States]
    assert [*map(int, States)] == [*range(len(States))]


def test_constants_and_rules_are_those_of_the_kernels(native: None) -> None:
    module = inside.native()
    assert (module.CHUNK, module.LANES) == (numeric.CHUNK, numeric.LANES)
    assert (module.BLOCK, module.MIN_SECOND_MOMENT, module.SMALLEST_SCALE) == (
        codecs.BLOCK, codecs.MIN_SECOND_MOMENT, codecs.SMALLEST_SCALE
    )  # fmt: skip
    assert numeric.CHUNK % codecs.BLOCK == 0
    assert sorted(module.rules()) == sorted((r.name, digest(r), r.states, r.counts_steps, r.hyper_names) for r in RULES)
