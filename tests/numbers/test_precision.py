"""What the storage formats promise in accuracy, at sizes that run in seconds; bench/numerics measures it at length.

Seeds are fixed, so nothing here fails by chance: "3 sigma" is how much luck a bound leaves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accumfused as af
from bench.numerics import codec_study, contenders, equal, moments, rounding, tiny_steps
from bench.numerics.contenders import BF16, FP16

STOCHASTIC: dict[str, Any] = {"master_weights": None}
TINY: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 + split8": (BF16, {"master_weights": "split8"}),
    "bf16 stochastic": (BF16, STOCHASTIC),
    "fp16 stochastic": (FP16, STOCHASTIC),
}


pytestmark = pytest.mark.usefixtures("native")


# ---- tiny steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_steps_far_below_a_weights_resolution_arrive_in_the_mean(name: str) -> None:
    """1000 steps of about 1e-7; bf16 numbers of that size are 1.2e-4 apart."""
    dtype, settings = TINY[name]
    (row,) = tiny_steps.follow(contenders.ours(name, dtype, 2, **settings), [(0.02, 1e-7, 1 << 18)], 1000)
    assert row["bias_error"] < 0.003  # or the next line could not fail
    assert abs(row["bias"]) < 0.005


@pytest.mark.parametrize("name", ["fp32", "bf16 + fp32 master", "bf16 + split16", "bf16 + split8", "bf16 stochastic"])
def test_weight_decay_alone_shrinks_weights_as_it_should(name: str) -> None:
    row = tiny_steps.decay(name, quick=False)
    assert row["exact"] == pytest.approx(0.8187, abs=1e-4)
    assert abs(row["difference"]) < 1e-3


# ---- masters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", equal.RULES)
def test_masters_are_the_weights_of_fp32_training_bit_for_bit(rule: str) -> None:
    """After each of 100 steps; the parameter itself is the number nearest to its master."""
    for row in equal.against_fp32(rule, elements=1 << 11, count=100):
        assert (row["differing"], row["not_nearest"]) == (0, 0), row


# ---- moments -------------------------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Any]] = {"bf16": {"state_dtype": BF16}, "int8": {"state_dtype": "int8"}}


@pytest.mark.parametrize("states", STATES)
def test_no_update_is_much_larger_than_exact_moments_would_make_it(states: str) -> None:
    """Whatever the gradients: of many scales in one block, heavy-tailed, mostly zero."""
    rows = moments.largest_updates(f"{states} states", elements=1 << 12, count=150)
    assert [row["gradients"] for row in rows] == list(codec_study.KINDS)
    for row in rows:
        assert 1 / 1.5 < row["largest"] < 1.5, row
    by_kind = {row["gradients"]: row for row in rows}
    for kind in ("normal", "log-normal 1", "Student t(3)", "sparse rows"):
        assert by_kind[kind]["error"] < {"bf16": 0.02, "int8": 0.1}[states], by_kind[kind]


@pytest.mark.parametrize("states", ["fp32", *STATES])
def test_without_gradients_nothing_moves_and_second_moments_fade(states: str) -> None:
    """To 0.999^1000 of what they were; rounded to nearest, a bf16 number could not lose a thousandth of itself."""
    row = moments.zeros(f"{states} states", (1000,))
    assert row["from_start"] == 0
    assert row["after 1000"] == pytest.approx(1, rel=0.05)


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


@pytest.mark.parametrize("name", rounding.FORMATS)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    for value in rounding.FORMATS[name][1]:
        row = rounding.mean_error(name, value, draws=1 << 17)
        assert row["draws"] > 100_000
        assert abs(row["sigmas"]) < 3, row


def test_no_rounding_knows_of_another() -> None:
    """Neither elements, nor steps, tensors, seeds, nor the moments and the weight of one element."""
    for row in rounding.correlations(1 << 18):
        assert abs(row["sigmas"]) < 3, row
