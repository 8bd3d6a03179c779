"""Numbers at the edges of what fp32, and the formats of 16 and 8 bits, can hold."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import pytest
import stored
import torch
from compare import assert_same_bits
from snapshot import refused
from table import EACH_RULE, WEIGHTS, Case
from torch import Tensor
from torch.nn import Module, Parameter

import accumfused as af

LR, SIZE = 0.125, 4096
TINY, LARGEST = 2.0**-140, torch.finfo(torch.float32).max
# Weights, and by each gradient of SGD with lr = 1 what they become in their dtype, and whole; None: the same.
# fmt: off
STEPS: list[tuple[str, list[float], list[tuple[list[float], list[float], list[float] | None]]]] = [
    ("fp16_stochastic", [6e4, -6e4, 1.0], [([-1e4, 1e4, 0.5], [inf, -inf, 0.5], None)]),
    ("bf16_stochastic", [6e4, -6e4, 1.0], [([-10240.0, 10240.0, 0.5], [70144.0, -70144.0, 0.5], None)]),
    ("fp16_master", [6e4, -6e4, 1.0], [  # it overflows, and comes back
        ([-1e4, 1e4, 0.5], [inf, -inf, 0.5], [7e4, -7e4, 0.5]), ([1e4, -1e4, 0.0], [6e4, -6e4, 0.5], None),
    ]),
    *[(weights, [1.0] * 4, [
        ([-inf, inf, nan, 0.25], [inf, -inf, nan, 0.75], None), ([0.0, 0.0, 0.0, 0.25], [inf, -inf, nan, 0.5], None),
    ]) for weights in stored.MASTERS],
    ("split16", [2.0**-133, 0.0], [([-TINY, TINY], [2.0**-133, -0.0], [2.0**-133 + TINY, -TINY])]),  # subnormals
    ("bf16_master", [2.0**-133, 0.0], [([-TINY, TINY], [2.0**-133, -0.0], [2.0**-133 + TINY, -TINY])]),
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


def test_a_window_goes_on_when_the_model_becomes_one_of_16_bits(backend: str) -> None:
    param = Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([param], lr=0.5, momentum=0.5, backend=backend)
    param.grad = torch.ones(4)
    optimizer.step()
    for dtype, value in ((torch.float32, 2.0), (torch.bfloat16, 1.0)):
        param.data = param.data.to(dtype)
        param.grad = torch.full((4,), value, dtype=dtype)
        optimizer.accumulate()
    optimizer.step()
    assert param.dtype == torch.bfloat16
    assert param.tolist() == [7.5 - 0.5 * (0.5 + 3.0)] * 4
    assert set(optimizer.state[param]) == {"step", "momentum_buffer", "master_remainder"}


def test_the_state_follows_a_model_that_is_cast_back(backend: str) -> None:
    model, optimizer = stored.trained("split16", "int8", backend, 2)
    whole = optimizer.full_precision_state_dict(model)["vector"]
    for param in model.parameters():
        param.data = param.data.float()
    stored.train(optimizer, 1, seed=2)
    assert "master_remainder" not in optimizer.state[model.vector]
    torch.testing.assert_close(model.vector.detach(), whole, rtol=0.01, atol=0.3)


@pytest.mark.pairwise(unit=(1e-25, 2.0**-90, 2.0**70, 1e25), last=(False, True), kind=("host", "device", "resumed"))
def test_weights_far_from_1_are_applied_as_others(backend: str, unit: float, last: bool, kind: str) -> None:
    """By a power of two not a bit changes."""
    results: list[list[Tensor]] = []
    grads = [torch.randn(SIZE) for _ in range(3)]
    for factor in (unit, 1.0):
        param = Parameter(torch.full((SIZE,), 8.0))
        optimizer: Any = af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
        for number, grad in enumerate(grads):
            weight = (3.0 + number) * factor
            param.grad = grad.clone()
            if kind == "device":
                optimizer.accumulate(torch.tensor(weight, dtype=torch.float64), last=last and number == 2)
            else:
                optimizer.accumulate(weight, last=last and number == 2)
            if kind == "resumed" and number < 2:
                saved, optimizer = optimizer.state_dict(), af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
                optimizer.load_state_dict(saved)
        optimizer.step()
        results.append([param.detach(), optimizer.grad_norm])
    tolerance = 0 if math.frexp(unit)[0] == 0.5 else 1e-6
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0)


@pytest.mark.parametrize("size", [2.0**-80, 2.0**-60, 0.0])
def test_a_norm_whose_squares_are_lost_skips_the_step_where_it_could_matter(backend: str, size: float) -> None:
    for divisor in (2.0**-60, 2.0**-40):
        param = Parameter(torch.full((SIZE,), 8.0))
        optimizer = af.SGD([param], lr=LR, max_grad_norm=1.0, backend=backend)
        param.grad = torch.full((SIZE,), size)
        optimizer.step(normalizer=divisor)
        assert bool(optimizer.step_was_skipped) is (divisor == 2.0**-60)


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


@pytest.mark.parametrize("case", EACH_RULE, ids=lambda case: case.name)
def test_the_default_dtype_changes_no_bit(backend: str, case: Case) -> None:
    settings: Any = {"max_grad_norm": 1.0, "state_dtype": torch.bfloat16, "rounding_seed": 0}
    results: list[list[Tensor]] = []
    for default in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        param, settings = (
            Parameter(torch.full((SIZE,), 8.0)),
            {"max_grad_norm": 1.0, "state_dtype": torch.bfloat16, "rounding_seed": 0},
        )
        optimizer: Any = case.make([param], backend, **settings)
        torch.set_default_dtype(default)
        try:
            for number in range(4):
                tokens = torch.tensor(1e5 + number, dtype=torch.float64) if number > 1 else 3.0 + number
                param.grad = torch.full_like(param, 1 / (3 + number))
                optimizer.accumulate(tokens)
                if number % 2 == 0:
                    saved, optimizer = optimizer.state_dict(), case.make([param], backend, **settings)
                    optimizer.load_state_dict(saved)
                else:
                    optimizer.step(normalizer=torch.tensor(2.0))
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([param.detach(), *optimizer.state[param].values()])
        for known, other in zip(results[0], results[-1], strict=True):
            assert_same_bits(other, known)
