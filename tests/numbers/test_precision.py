"""Storage formats keep the accuracy that they promise, at sizes that run in seconds; bench/numerics measures at length.

Seeds are fixed, so nothing here fails by chance: "3 sigma" is how much luck a bound leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import EACH_OPTIMIZER, Case
from torch import Tensor

import accumfused as af
from accumfused.formats import codecs
from bench.exact import master
from bench.numerics import moments, weights
from bench.numerics.weights import Contender

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STOCHASTIC: dict[str, Any] = {"master_weights": None}
TINY: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 + split8": (BF16, {"master_weights": "split8"}),
    "bf16 stochastic": (BF16, STOCHASTIC),
}


pytestmark = pytest.mark.usefixtures("native")


# ---- tiny steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_reference_is_the_exact_displacement(factor: float) -> None:
    """torch's AdamW in fp64 has no bias and no error; steps that are a tenth too long have a bias of 10%."""

    def make(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{**group, "lr": factor * group["lr"]} for group in groups], **options)

    (row,) = weights.follow(Contender(torch.float64, make, grad_dtype=torch.float64), [(0.02, 1e-6, 1 << 13)], 20)
    assert row["bias"] == pytest.approx(factor - 1, abs=1e-8)
    assert row["error"] == pytest.approx(factor - 1, abs=1e-8)


@pytest.mark.parametrize("name", TINY)
def test_steps_far_below_a_weights_resolution_arrive_in_the_mean(name: str) -> None:
    """1000 steps of about 1e-7; bf16 numbers of that size are 1.2e-4 apart."""
    dtype, settings = TINY[name]
    (row,) = weights.follow(weights.ours(dtype, 2, **settings), [(0.02, 1e-7, 1 << 18)], 1000)
    assert row["bias_error"] < 0.003  # or the next line could not fail
    assert abs(row["bias"]) < 0.005


@pytest.mark.parametrize("name", ["fp32", "bf16 + split16", "bf16 + split8", "bf16 stochastic"])
def test_weight_decay_alone_shrinks_weights_as_it_should(name: str) -> None:
    left, exact = weights.decay(weights.CONTENDERS[name])
    assert exact == pytest.approx(0.8187, abs=1e-4)
    assert left == pytest.approx(exact, abs=1e-3)


# ---- masters -------------------------------------------------------------------------------------------------------

MASTERS = [(BF16, "split16"), (FP16, "fp32")]


@pytest.mark.parametrize("case", EACH_OPTIMIZER, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "masters"), MASTERS, ids=str)
def test_masters_are_the_weights_of_fp32_training_bit_for_bit(case: Case, dtype: torch.dtype, masters: Any) -> None:
    """After each of 100 steps; the parameter itself is the number nearest to its master."""
    generator = torch.Generator().manual_seed(3)
    start = (0.02 * torch.randn(1 << 11, generator=generator)).to(dtype)
    exact, param = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    exact.grad_dtype = dtype
    optimizers = case.make([exact]), case.make([param], master_weights=masters, rounding_seed=0)
    for _ in range(100):
        grad = (1e-3 * torch.randn(len(start), generator=generator)).to(dtype)
        exact.grad, param.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        weight = exact.detach()
        assert torch.equal(master(optimizers[1], param).to(FP32).view(torch.int32), weight.view(torch.int32))
        nearest = (weight.to(dtype).float() - weight).abs()
        assert ((param.detach().float() - weight).abs() <= nearest).all()
    assert not torch.equal(exact.detach(), start.float())


def test_split8_keeps_16_bits_of_mantissa() -> None:
    values = torch.randn(4096)
    param, full = (torch.nn.Parameter(values.to(BF16).to(dtype)) for dtype in (BF16, FP32))
    optimizers = af.SGD([param], lr=1e-3, master_weights="split8", rounding_seed=0), torch.optim.SGD([full], lr=1e-3)
    param.grad, full.grad = torch.ones_like(param), torch.ones_like(full)
    for optimizer in optimizers:
        optimizer.step()
    off = (master(optimizers[0], param) - full.detach().double()).abs().max().item()
    assert 0 < off <= 2.0**-14  # of values up to 4


# ---- moments -------------------------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Any]] = {"bf16": {"state_dtype": BF16}, "8-bit": {"state_dtype": "8bit"}}


@pytest.mark.parametrize("states", STATES)
def test_no_update_is_much_larger_than_exact_moments_would_make_it(states: str) -> None:
    """Whatever the gradients: of many scales in one block, heavy-tailed, mostly zero."""
    rows = dict(zip(moments.KINDS, moments.updates(f"{states} states", elements=1 << 12, count=150), strict=True))
    assert all(1 / 1.5 < row["largest"] < 1.5 for row in rows.values()), rows
    for kind in ("normal", "log-normal 1", "Student t(3)", "sparse rows"):
        assert rows[kind]["error"] < {"bf16": 0.02, "8-bit": 0.1}[states], kind


@pytest.mark.parametrize("states", ["fp32", *STATES])
def test_without_gradients_nothing_moves_and_second_moments_fade(states: str) -> None:
    """To 0.999^1000 of what they were; rounded to nearest, a bf16 number could not lose a thousandth of itself."""
    nothing = torch.zeros(1, 1 << 12)
    never = moments.stepping(f"{states} states", *nothing.shape)
    assert all(not never(nothing).any() for _ in range(20))
    step, exact = moments.stepping(f"{states} states", *nothing.shape), moments.Moments()
    generator = torch.Generator().manual_seed(2)
    for grads in (*(torch.randn(nothing.shape, generator=generator) for _ in range(50)), *[nothing] * 999):
        step(grads), exact(grads)
    probe = torch.full_like(nothing, 1e-4)  # too small to change a second moment, which its update shows
    found, right = step(probe), exact(probe)
    # An update is the first moment, which both have alike, over the root of the second.
    second = exact.moments[1]
    assert float(((right / found).square() * second).mean() / second.mean()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("states", STATES)
def test_a_second_moment_grows_past_a_power_of_two(states: str) -> None:
    """The last code of a block must not hold it: from gradients of 1 it goes to 1, wherever its scale begins."""
    param = torch.nn.Parameter(torch.zeros(1 << 12))
    optimizer = af.AdamW([param], lr=1e-3, betas=(0.9, 0.99), rounding_seed=0, **STATES[states])
    for _ in range(1000):
        param.detach().zero_()
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert param.detach().double().mean().item() == pytest.approx(-1e-3, rel=0.01)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


Rounded = Callable[[Tensor, Tensor], Tensor]  # (fp32 values, noise) -> what is stored, fp64


def bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    return codecs.to_bfloat16_stochastic(values, noise).double()


def split8(values: Tensor, noise: Tensor) -> Tensor:
    return codecs.join_short(*codecs.split_short(values, noise)).double()


def coded(*, second_moment: bool) -> Rounded:
    def rounded(values: Tensor, noise: Tensor) -> Tensor:
        scale = codecs.scale_of(values)
        codes = codecs.encode(values, scale, noise, second_moment=second_moment)
        return codecs.decode(codes, scale, second_moment=second_moment).double()

    return rounded


ROUNDED: dict[str, tuple[Rounded, tuple[float, ...]]] = {  # values, none of which the format has
    "bf16": (bfloat16, (1.001, -0.0203, 3e-30)),
    "split8": (split8, (1.000001, -0.0200003, 3e-30)),
    "8-bit first moment": (coded(second_moment=False), (0.7, -0.011, 0.0001)),
    "8-bit second moment": (coded(second_moment=True), (0.7, 0.011, 0.0005)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    """Of many elements and steps that all hold one value; every block also holds 1, and so its scale.

    That no noise knows of another one: test_parts.py.
    """
    rounded, values = ROUNDED[name]
    for value in values:
        elements = torch.full((1 << 12,), value)
        elements[:: codecs.BLOCK] = 1.0
        kept = elements != 1.0
        exact = elements[kept].double()
        keys = [codecs.key(torch.tensor(0), torch.tensor(step), 0) for step in range(1, 33)]
        errors = torch.cat([rounded(elements, codecs.noise(key, 1 << 12))[kept] - exact for key in keys])
        low, high = errors.min(), errors.max()
        sigma = float((-low * high).sqrt()) / math.sqrt(len(errors))  # two outcomes, whose mean is to be 0
        assert len(errors) > 100_000
        assert abs(float(errors.mean())) < 3 * sigma, value
