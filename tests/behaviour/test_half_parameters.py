"""16-bit parameters in all that surrounds a step: windows, scalers, common norms, written gradients, `fuse()`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from oracle import Oracle, global_norm, window_mean
from snapshot import refused
from stored import MASTERS
from table import ADAMW_CASE, WEIGHTS, random_grads, random_params
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
SHAPES = [(40, 33), (130,), (), (70_000,)]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place

each_half = pytest.mark.parametrize("dtype", HALVES)
each_accumulator = pytest.mark.parametrize("accumulator", [torch.float32])


def parameters(dtype: torch.dtype, shapes: Any = SHAPES) -> list[Parameter]:
    return [Parameter(param.detach().to(dtype)) for param in random_params(shapes)]


def give(params: list[Parameter], seed: int, dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
    """Sets random gradients of a dtype, multiplied by a power of two."""
    grads = random_grads(params, seed, dtype)
    for param, grad in zip(params, grads, strict=True):
        param.grad_dtype = dtype
        param.grad = grad * factor
    return grads


def whole(optimizer: Any) -> list[Tensor]:
    """Copies of the parameters in fp32."""
    params = torch.nn.ParameterList(optimizer.param_groups[0]["params"])
    return [value.clone() for value in optimizer.full_precision_state_dict(params).values()]


# ---- dtypes of parameters and gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [*MASTERS, "fp32"])
@pytest.mark.parametrize("grads", DTYPES)
def test_gradients_may_have_another_dtype_than_their_parameters(backend: str, weights: str, grads: torch.dtype) -> None:
    dtype, settings = WEIGHTS[weights]
    params = parameters(dtype)
    options = {**ADAMW_CASE.options, "eps": 1e-3}
    optimizer = af.AdamW(params, **options, max_grad_norm=3.0, backend=backend, **settings)
    truth = Oracle(ADAMW_CASE.of.oracle, options, params, max_grad_norm=3.0)
    for step in range(4):
        truth.step(give(params, step, grads))
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm.double().cpu(), truth.norm.cpu(), rtol=2e-6, atol=0)
    unit = 2.0**-16 if weights == "split8" else 0.0
    for value, expected in zip(whole(optimizer), truth.params, strict=True):
        # split8 rounds after each step, so by up to a whole unit.
        torch.testing.assert_close(value.double(), expected, rtol=5e-6 + 2 * 4 * unit, atol=2e-6 + 8 * unit)


def test_parameters_of_several_dtypes_in_one_optimizer(backend: str) -> None:
    params = [param for dtype in DTYPES for param in parameters(dtype, [(40, 33), (130,)])]
    options = {**ADAMW_CASE.options, "eps": 1e-3}
    optimizer = af.AdamW(params, **options, max_grad_norm=3.0, backend=backend)
    truth = Oracle(ADAMW_CASE.of.oracle, options, params, max_grad_norm=3.0)
    for step in range(3):
        grads: list[Tensor] = []
        for start, dtype in zip((0, 2, 4), DTYPES, strict=True):
            grads += give(params[start : start + 2], 3 * step + start, dtype)
        truth.step(grads)
        if step == 1:
            optimizer.accumulate(2.0)
        optimizer.step()
        optimizer.zero_grad()
    for value, expected in zip(whole(optimizer), truth.params, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("weights", MASTERS)
@pytest.mark.parametrize("grads", DTYPES)
@each_accumulator
def test_windows_over_16_bit_parameters_against_fp64(
    backend: str, weights: str, grads: torch.dtype, accumulator: torch.dtype
) -> None:
    dtype, settings = WEIGHTS[weights]
    params = parameters(dtype)
    optimizer = af.SGD(params, lr=0.5, backend=backend, rounding_seed=3, **settings)
    truth = Oracle(functools.partial(sgd_step, lr=0.5), {}, params)
    sizes = (3.0, 1.0, 4.0)
    for window in range(2):
        batches = []
        for index, size in enumerate(sizes):
            batches.append(give(params, 10 * window + index, grads))
            optimizer.accumulate(size)
        mean = window_mean(batches, sizes)
        optimizer.step()
        truth.step(mean)
        rtol = 2e-6 if accumulator == torch.float32 else 2.0**-9
        torch.testing.assert_close(optimizer.grad_norm.double().cpu(), global_norm(mean).cpu(), rtol=rtol, atol=0)
    # fp32 sums: one rounding a micro-batch, of numbers up to 30. bf16 sums are rounded three times a window, by less
    # than a unit (2^-7) of up to 8 * 5 (the weighted sum), over 8; on average over many elements they are right.
    atol = 4e-6 if accumulator == torch.float32 else 0.5 * 2 * 3 * 40 * 2.0**-7 / 8
    atol += 2 * 5 * 2.0**-15 * (weights == "split8")  # two steps, each within a unit of numbers up to 5
    for value, expected in zip(whole(optimizer), truth.params, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=atol)
    if accumulator == torch.bfloat16:
        error = whole(optimizer)[3].double() - truth.params[3]
        assert error.abs().max() > 1e-4
        assert error.mean().abs() < 5 * error.std() / 70_000**0.5  # unbiased


def sgd_step(param: Tensor, grad: Tensor, state: Any, *, lr: float) -> Tensor:
    return param - lr * grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grads", DTYPES)
@each_accumulator
def test_a_closed_windows_p_grad_is_the_accumulator_in_its_dtype(
    backend: str, dtype: torch.dtype, grads: torch.dtype, accumulator: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = af.SGD(params, lr=0.5, backend=backend)
    first, second = give(params, 0, grads), None
    optimizer.accumulate(3.0)
    second = give(params, 1, grads)
    optimizer.accumulate(1.0, last=True)
    for param, a, b in zip(params, first, second, strict=True):
        assert param.grad.dtype == accumulator
        expected = (3 * a.double() + b.double()) / 4
        # bf16: rounded when it was copied, when the second was added, and when it was divided; each within a unit.
        rtol, atol = (2e-6, 1e-6) if accumulator == torch.float32 else (3 * 2.0**-7, 3 * 5 * 2.0**-7)
        torch.testing.assert_close(param.grad.double(), expected, rtol=rtol, atol=atol)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    torch.testing.assert_close(
        norm.double().cpu(), global_norm([torch.zeros(0), *map(mean_of, first, second)]).cpu(), rtol=0.01, atol=0
    )
    for param in params:
        assert param.grad is None
        assert param.grad_dtype == grads
    give(params, 2, grads)
    optimizer.step()


def mean_of(first: Tensor, second: Tensor) -> Tensor:
    return (3 * first.double() + second.double()) / 4


@each_half
@each_accumulator
def test_autograd_fills_windows_of_a_16_bit_model(backend: str, dtype: torch.dtype, accumulator: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(dtype)
    optimizer = af.AdamW(model.parameters(), lr=0.02, max_grad_norm=1.0, backend=backend)
    inputs = torch.randn(64, 8, dtype=dtype)
    targets = inputs[:, :1] * 0.5
    losses = []
    for _ in range(30):
        total = 0.0
        for x, y in zip(inputs.split(20), targets.split(20), strict=True):
            loss = (model(x) - y).float().square().mean()
            loss.backward()
            optimizer.accumulate(weight=len(x))
            total += loss.item() * len(x)
        optimizer.step()
        losses.append(total / 64)
    assert losses[-1] < 0.2 * losses[0]


# ---- scalers ---------------------------------------------------------------------------------------------------------


@each_half
@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
def test_our_scaler_steps_16_bit_parameters(backend: str, dtype: torch.dtype, window: str) -> None:
    params, twins = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"lr": 0.1, "max_grad_norm": 1.0, "backend": backend}
    optimizer, plain = af.AdamW(params, **options), af.AdamW(twins, **options)
    scaler = af.GradScaler(params[0].device.type, init_scale=64.0, growth_interval=1)
    for step in range(3):
        scaler.scale(torch.zeros(1))  # makes the scale
        scale = scaler.get_scale()
        for index in range(1 if window == "p.grad" else 2):
            give(params, 2 * step + index, dtype, scale)
            give(twins, 2 * step + index, dtype)
            if window != "p.grad":
                for each in (optimizer, plain):
                    each.accumulate(1.0, last=window == "closed" and index == 1)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        for each in (optimizer, plain):
            each.zero_grad()
    assert scaler.get_scale() == 512.0
    for one, other in zip(whole(optimizer), whole(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    give(params, 9, dtype)
    params[0].grad[0, 0] = torch.inf
    before = whole(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), int(optimizer.skipped_steps)) == (256.0, 1)
    assert all(map(torch.equal, before, whole(optimizer)))


def test_torchs_scaler_steps_bf16_parameters_and_says_what_it_thinks_of_fp16_gradients(backend: str) -> None:
    params = parameters(torch.bfloat16)
    scaler = torch.amp.GradScaler(params[0].device.type, init_scale=4.0)
    optimizer, plain = (af.AdamW(p, lr=0.1, backend=backend) for p in (params, parameters(torch.bfloat16)))
    scaler.scale(torch.zeros(1))
    give(params, 0, torch.bfloat16, 4.0)
    give(plain.param_groups[0]["params"], 0, torch.bfloat16)
    scaler.step(optimizer)
    plain.step()
    for one, other in zip(whole(optimizer), whole(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    halves = parameters(torch.float16)
    optimizer, scaler = af.AdamW(halves, lr=0.1, backend=backend), torch.amp.GradScaler(halves[0].device.type)
    scaler.scale(torch.zeros(1))
    give(halves, 0, torch.float16)
    with refused(optimizer, ValueError, "Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


# ---- clipping, common norms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
@each_half
@each_accumulator
def test_what_is_applied_has_the_norm_that_was_asked_for(
    backend: str, dtype: torch.dtype, window: str, accumulator: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = af.SGD(params, lr=1.0, max_grad_norm=0.5, backend=backend)
    before = whole(optimizer)
    grads: list[Tensor] = give(params, 0, dtype)
    if window != "p.grad":
        optimizer.accumulate(3.0)
        grads = list(map(mean_of, grads, give(params, 1, dtype)))
        optimizer.accumulate(1.0, last=window == "closed")
    optimizer.step()
    applied = global_norm([old - new for old, new in zip(before, whole(optimizer), strict=True)])
    torch.testing.assert_close(float(applied), 0.5, rtol=2.0**-9, atol=0)
    torch.testing.assert_close(optimizer.grad_norm.double().cpu(), global_norm(grads).cpu(), rtol=2.0**-9, atol=0)
    optimizer.zero_grad()
    assert [param.grad_dtype for param in params] == [dtype] * len(params)


@each_half
def test_16_bit_and_fp32_parameters_are_clipped_together(backend: str, dtype: torch.dtype) -> None:
    halves, plain = parameters(dtype), parameters(torch.float32, [(50,), (3, 3)])
    muon_like = parameters(dtype, [(9, 9)])
    optimizers = [
        af.AdamW(halves, lr=0.1, backend=backend),
        af.SGD(plain, lr=0.1, backend=backend),
        af.fuse(torch.optim.RMSprop(muon_like, lr=0.1), backend=backend),
    ]
    af.clip_together(optimizers, max_grad_norm=1.0)
    for window in (False, True):
        grads = []
        for seed, params in enumerate((halves, plain, muon_like)):
            grads += give(params, seed, params[0].dtype)
            if window:
                optimizers[seed].accumulate(2.0)
        for optimizer in optimizers:
            optimizer.step()
            torch.testing.assert_close(optimizer.grad_norm.double().cpu(), global_norm(grads).cpu(), rtol=2e-6, atol=0)
            optimizer.zero_grad()


# ---- optimizers with steps of their own ------------------------------------------------------------------------------

OWN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.5),
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Muon": torch.optim.Muon,
    "a subclass": type("Own", (torch.optim.AdamW,), {}),
}


@pytest.mark.parametrize("name", OWN)
@each_half
@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
def test_an_own_step_sees_gradients_in_its_parameters_dtype(
    backend: str, name: str, dtype: torch.dtype, window: str
) -> None:
    shapes = [(20, 11), (5, 5)]
    params, twins = parameters(dtype, shapes), parameters(dtype, shapes)
    theirs = OWN[name](twins, lr=0.01)
    ours = af.fuse(OWN[name](params, lr=0.01), backend=backend)
    for step in range(2):
        grads = give(params, 2 * step, dtype)
        if window != "p.grad":
            ours.accumulate(1.0)
            # Powers of two, so that the mean is exact in 16 bits: what the step sees is what the twin is given.
            give(params, 2 * step, dtype)
            ours.accumulate(1.0, last=window == "closed")
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param, twin)
        assert set(ours.state[param]) == set(theirs.state[twin])
