"""write_grad=True: after a step p.grad is the gradient as it was applied."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from cases import assert_close, assert_same_bits, random_grads, random_params, set_grads
from snapshot import refused
from torch import Tensor

import accumfused as af

SHAPES = [(5, 3), (40_000,), (0,), ()]
MAKE: dict[str, Any] = {
    "SGD": lambda params, **options: af.SGD(params, lr=1.0, **options),
    "own step": lambda params, **options: af.fuse(type("Own", (torch.optim.SGD,), {})(params, lr=1.0), **options),
}


def make(backend: str, name: str = "SGD", **options: Any) -> tuple[list[Tensor], Any]:
    """Parameters that are 0, so that a step of SGD shows what it has applied."""
    params = random_params(SHAPES)
    for param in params:
        param.data.zero_()
    return params, MAKE[name](params, write_grad=True, backend=backend, **options)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_p_grad_is_what_was_applied(backend: str, name: str, window: str, clip: float | None) -> None:
    params, optimizer = make(backend, name, max_grad_norm=clip)
    grads = random_grads(params, 0)
    set_grads(params, grads)
    if window != "p.grad":
        optimizer.accumulate(3.0)
        set_grads(params, random_grads(params, 1))
        optimizer.accumulate(1.0, last=window == "closed")
        grads = [(3 * a.double() + b.double()) / 4 for a, b in zip(grads, random_grads(params, 1), strict=True)]
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step(normalizer=4)
    norm = torch.cat([grad.double().flatten() for grad in grads]).norm() / 8
    factor = (1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))) / 8
    for param, grad in zip(params, grads, strict=True):
        assert_same_bits(-param.detach() + 0.0, param.grad + 0.0)
        assert_close(param.grad, grad.double() * factor, "norm" if window == "p.grad" else "window")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_and_other_layouts_are_rounded_once(backend: str, dtype: torch.dtype) -> None:
    first, second = torch.zeros(6, 4).requires_grad_(), torch.zeros(6, 4).requires_grad_()
    optimizer = af.SGD([first, second], lr=1.0, write_grad=True, backend=backend)
    first.grad_dtype = dtype
    grads = [torch.randn(6, 4, dtype=dtype), torch.randn(4, 6).t()]
    first.grad, second.grad = (grad.clone() for grad in grads)
    optimizer.step(normalizer=3)
    third = torch.tensor(1 / 3, dtype=torch.float64).float()
    assert torch.equal(first.grad, (grads[0].float() * third).to(dtype))
    assert torch.equal(second.grad, grads[1] * third)
    assert torch.equal(-first.detach(), grads[0].float() * third)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
def test_a_skipped_step_leaves_the_gradient_as_it_came(backend: str, name: str, window: str) -> None:
    params, optimizer = make(backend, name, max_grad_norm=0.5)
    grads = random_grads(params, 0)
    grads[0][1, 1] = math.nan
    set_grads(params, grads)
    if window != "p.grad":
        optimizer.accumulate(last=window == "closed")
    optimizer.step()
    assert all(not param.any() for param in params)
    if window == "open" and name == "own step":
        assert params[0].grad is None  # it was never exposed
    else:
        for param, grad in zip(params, grads, strict=True):
            assert_same_bits(param.grad, grad)


@pytest.mark.parametrize("window", ["open", "closed"])
def test_a_window_stays_closed_until_zero_grad(backend: str, window: str) -> None:
    params, optimizer = make(backend)
    set_grads(params, random_grads(params, 0))
    optimizer.accumulate(last=window == "closed")
    optimizer.step()
    for param in params:
        param.sum().backward()
    with refused(optimizer, RuntimeError, r"call optimizer\.step\(\) or optimizer\.zero_grad\(\)"):
        optimizer.accumulate()
    optimizer.zero_grad()
    before = [param.detach().clone() for param in params]
    set_grads(params, random_grads(params, 1))
    optimizer.accumulate()
    optimizer.step()
    for param, old, grad in zip(params, before, random_grads(params, 1), strict=True):
        assert torch.equal(param.detach(), old - grad)


def test_it_is_a_setting_like_the_others(backend: str) -> None:
    params, optimizer = make(backend)
    twin = copy.deepcopy(optimizer)
    (_, plain) = make(backend)
    plain.load_state_dict(optimizer.state_dict())
    assert twin._settings.write_grad
    set_grads(params, random_grads(params, 0))
    optimizer.step(normalizer=2)
    assert torch.equal(params[0].grad, random_grads(params, 0)[0] / 2)
