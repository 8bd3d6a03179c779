"""Numbers at the edges of what fp32, and the formats of 16 and 8 bits, can hold."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import models
import pytest
import torch
from compare import assert_close, refused
from table import OPTIMIZERS, WEIGHTS
from torch import Tensor
from torch.nn import Module, Parameter

import accumfused as af

LR, SIZE = 0.125, 4096
TINY, LARGEST = 2.0**-140, torch.finfo(torch.float32).max
# Weights, and by each gradient of SGD with lr = 1 what they become in their dtype, and whole; None: the same.
# fmt: off
STEPS: list[tuple[str, list[float], list[tuple[list[float], list[float], list[float] | None]]]] = [
    ("bf16_stochastic", [6e4, -6e4, 1.0], [([-10240.0, 10240.0, 0.5], [70144.0, -70144.0, 0.5], None)]),
    ("fp16_master", [6e4, -6e4, 1.0], [  # it overflows, and comes back
        ([-1e4, 1e4, 0.5], [inf, -inf, 0.5], [7e4, -7e4, 0.5]), ([1e4, -1e4, 0.0], [6e4, -6e4, 0.5], None),
    ]),
    *[(weights, [1.0] * 4, [
        ([-inf, inf, nan, 0.25], [inf, -inf, nan, 0.75], None), ([0.0, 0.0, 0.0, 0.25], [inf, -inf, nan, 0.5], None),
    ]) for weights in models.MASTERS],
    ("split16", [2.0**-133, 0.0], [([-TINY, TINY], [2.0**-133, -0.0], [2.0**-133 + TINY, -TINY])]),  # subnormals
    ("split16", [0.0], [([-LARGEST], [inf], [LARGEST])]),  # which bf16 has not
    ("split8", [0.0], [([-LARGEST], [inf], None)]),
    ("fp16_master", [2.0**-24, 0.0], [([-TINY, TINY], [2.0**-24, -0.0], [2.0**-24, -TINY])]),
]
# fmt: on


@pytest.mark.parametrize(("weights", "start", "steps"), STEPS)
def test_weights_of_16_bits_at_the_edges(backend: str, weights: str, start: list[float], steps: Any) -> None:
    dtype, settings = WEIGHTS[weights]
    module: Any = Module()
    module.p = Parameter(torch.tensor(start).to(dtype))
    module.p.grad_dtype = torch.float32  # 16 bits would not hold the gradients
    optimizer = af.SGD(module.parameters(), lr=1.0, backend=backend, **settings)
    for grads, half, whole in steps:
        module.p.grad = torch.tensor(grads)
        optimizer.step()
        assert str(module.p.tolist()) == str(half)  # one NaN is as good as another
        assert str(optimizer.full_precision_state_dict(module)["p"].tolist()) == str(whole or half)


def test_a_window_goes_on_when_the_model_becomes_one_of_16_bits_and_fp32_again(backend: str) -> None:
    model: Any = Module()
    param = model.p = Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([param], lr=0.5, momentum=0.5, backend=backend)
    param.grad = torch.ones(4)
    optimizer.step()
    for dtype, value in ((torch.float32, 2.0), (torch.bfloat16, 1.0)):
        param.data = param.data.to(dtype)
        param.grad = torch.full((4,), value, dtype=dtype)
        optimizer.accumulate()
    optimizer.step()
    assert param.dtype == torch.bfloat16
    assert optimizer.full_precision_state_dict(model)["p"].tolist() == [7.5 - 0.5 * (0.5 + 3.0)] * 4
    assert set(optimizer.state[param]) == {"step", "momentum_buffer", "master_remainder"}
    param.data = param.data.float()
    param.grad = torch.full((4,), 0.25)
    optimizer.step()
    assert param.tolist() == [5.75 - 0.5 * (0.5 * 3.5 + 0.25)] * 4
    assert set(optimizer.state[param]) == {"step", "momentum_buffer"}


@pytest.mark.pairwise(unit=(1e-25, 2.0**-90, 2.0**70, 1e25), last=(False, True), kind=("host", "device", "resumed"))
def test_weights_far_from_1_are_applied_as_others(backend: str, unit: float, last: bool, kind: str) -> None:
    """By a power of two not a bit changes."""
    results: list[list[Tensor]] = []
    grads = [torch.randn(SIZE) for _ in range(3)]
    mean = sum((number + 3) * grad for number, grad in enumerate(grads)) / 12
    for factor in (unit, 1.0):
        param = Parameter(torch.zeros(SIZE))
        optimizer: Any = af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
        for number, grad in enumerate(grads):
            weight = (3.0 + number) * factor
            param.grad = grad.clone()
            given = torch.tensor(weight, dtype=torch.float64) if kind == "device" else weight
            optimizer.accumulate(given, last=last and number == 2)
            if kind == "resumed" and number < 2:
                saved, optimizer = optimizer.state_dict(), af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
                optimizer.load_state_dict(saved)
        optimizer.step()
        results.append([param.detach(), optimizer.grad_norm])
    tolerance = 0 if math.frexp(unit)[0] == 0.5 else 1e-6
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * LR / 64)  # where terms cancel
    assert_close(results[1][0], -LR * mean / mean.norm(), "fp64 oracle")


@pytest.mark.parametrize(
    ("size", "divisor", "skips"),
    [(2.0**-80, 2.0**-60, True), (2.0**-80, 2.0**-40, False), (2.0**-60, 2.0**-60, True), (0.0, 2.0**-60, True),
     (1.0, 1e-39, True), (1.0, 2.0**-60, False)],
)  # fmt: skip
def test_a_norm_whose_squares_are_lost_or_an_infinite_coefficient_skips_the_step_where_it_could_matter(
    backend: str, size: float, divisor: float, skips: bool
) -> None:
    param = Parameter(torch.zeros(SIZE))
    optimizer = af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
    param.grad = torch.full((SIZE,), size)
    optimizer.step(normalizer=divisor)
    assert bool(optimizer.step_was_skipped) is skips
    wanted = -LR * min(size / divisor, 1 / math.sqrt(SIZE))
    torch.testing.assert_close(param.detach(), torch.full((SIZE,), 0.0 if skips else wanted), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_loss_in_16_bits_does_not_round_its_weight(backend: str, dtype: torch.dtype, on_device: bool) -> None:
    param = Parameter(torch.full((SIZE,), 8.0))
    optimizer = af.SGD([param], lr=LR, backend=backend)
    for tokens, slope in ((1003.0, 1.0), (1004.0, 2.0), (70001.0, 3.0)):
        optimizer.backward((param.mean() * slope).to(dtype), torch.tensor(tokens) if on_device else tokens)
    optimizer.step()
    truth = LR * (1003.0 + 1004.0 * 2.0 + 70001.0 * 3.0) / (1003.0 + 1004.0 + 70001.0) / SIZE
    assert 8.0 - param[0].item() == pytest.approx(truth, rel=1e-3, abs=2e-6)
    with af.release_gradients(optimizer):
        with refused(optimizer, RuntimeError, r"would round its weight; compute it in fp32"):
            optimizer.backward(param.mean().to(dtype), 70001.0)
        optimizer.backward(param.mean().to(dtype), 256.0)
        optimizer.step()


ADDS_EPS_TO_A_ROOT = ("Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "Adan", "AdEMAMix", "AdamWScheduleFree")


@pytest.mark.parametrize(
    ("name", "states"),
    [(name, "fp32") for name in ADDS_EPS_TO_A_ROOT] + [(name, "8bit") for name in ADDS_EPS_TO_A_ROOT[:-1]],
)
def test_at_the_least_eps_tiny_gradients_move_weights_as_in_fp64(name: str, states: str, backend: str) -> None:
    """Where a second moment is stored as 0: its root is at most 2^-63 / sqrt(1 - beta2), a thousandth of eps and a bit.

    (In 8-bit blocks it is 2^-47, of an eps of 1e-11.) Gradients go from far below to far above that.
    """
    row = OPTIMIZERS[name]
    eps, settings = (1e-16, {}) if states == "fp32" else (1e-11, {"state_dtype": "8bit", "state_dtype_min_numel": 0})
    for exponent in range(-21, -11):
        moved = []
        for dtype, options in ((torch.float64, {}), (torch.float32, {"backend": backend, **settings})):
            param = torch.nn.Parameter(torch.zeros(128, dtype=dtype))
            optimizer = row.ours([param], lr=1e-3, eps=eps, weight_decay=0.0, **options)
            for _ in range(6):
                param.grad = torch.full_like(param, 10.0**exponent)
                optimizer.step()
            moved.append(param[0].item())
        assert moved[1] == pytest.approx(moved[0], rel=0.05 if states == "fp32" else 0.2), exponent  # codes have 3 bits
