"""16-bit parameters in all that surrounds a step, against fp64: windows, scalers, clipping."""

from __future__ import annotations

from typing import Any

import inside
import pytest
import torch
from compare import assert_close
from oracle import Oracle, window_mean
from stored import MASTERS, assert_same, whole
from table import ADAMW_CASE, WEIGHTS, random_grads, random_params
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = {**ADAMW_CASE.options, "eps": 1e-3}


def parameters(*dtypes: torch.dtype) -> list[Parameter]:
    shapes = [(40, 33), (130,), (), (70_000,)]
    return [Parameter(param.detach().to(dtype)) for dtype in dtypes for param in random_params(shapes)]


def give(params: list[Parameter], seed: int, dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
    """Sets random gradients of a dtype, multiplied by a power of two."""
    grads = random_grads(params, seed, dtype)
    for param, grad in zip(params, grads, strict=True):
        param.grad_dtype = dtype
        param.grad = grad * factor
    return grads


@pytest.mark.pairwise(
    weights=[*MASTERS, "fp32", "all dtypes"], grads=DTYPES, window=["p.grad", "open", "closed"],
    scaler=[None, af.GradScaler, torch.amp.GradScaler],
)  # fmt: skip
def test_numbers_are_those_of_fp32(backend: str, weights: str, grads: torch.dtype, window: str, scaler: Any) -> None:
    if scaler is torch.amp.GradScaler and (window == "open" or grads == torch.float16):
        scaler = af.GradScaler  # torch's refuses those
    dtype, settings = WEIGHTS.get(weights, (None, {}))
    params = parameters(*(DTYPES if dtype is None else [dtype]))
    optimizer = af.AdamW(params, **OPTIONS, max_grad_norm=3.0, backend=backend, **settings)
    truth = Oracle(ADAMW_CASE.of.oracle, OPTIONS, params, max_grad_norm=3.0)
    scale = None if scaler is None else scaler("cpu", init_scale=64.0, growth_interval=1)
    sizes = [1.0] if window == "p.grad" else [3.0, 1.0, 4.0]
    for step in range(3):
        factor = 1.0 if scale is None else float(scale.scale(torch.ones(())))
        batches = []
        for index, size in enumerate(sizes):
            batches.append(give(params, 10 * step + index, grads, factor))
            if window != "p.grad":
                optimizer.accumulate(size, last=window == "closed" and index == 2)
        if window == "closed":
            assert {param.grad.dtype for param in params} == {torch.float32}
            assert all(inside.version(param.grad) for param in params)  # what autograd's checks look at
        truth.step(window_mean(batches, sizes))
        if scale is None:
            optimizer.step()
        else:
            scale.step(optimizer)
            scale.update()
        assert_close(optimizer.grad_norm, truth.norm, "norm")
        optimizer.zero_grad()
        assert {(param.grad, param.grad_dtype) for param in params} == {(None, grads)}
    assert scale is None or scale.get_scale() == 512.0
    for value, expected in zip(whole(optimizer), truth.params, strict=True):
        if weights == "split8":  # which is rounded after each step, by up to a whole unit
            torch.testing.assert_close(value.double(), expected, rtol=2.0**-13, atol=2.0**-13)
        else:
            assert_close(value, expected, "fp64 oracle")


OWN = {name: getattr(torch.optim, name) for name in ("RMSprop", "NAdam", "Adagrad", "RAdam", "Adamax", "Muon")}
OWN["a subclass"] = type("Own", (torch.optim.AdamW,), {})


@pytest.mark.pairwise(name=[*OWN], dtype=DTYPES[1:], window=["p.grad", "open", "closed"])
def test_a_step_of_its_own_sees_gradients_in_its_parameters_dtype(
    backend: str, name: str, dtype: torch.dtype, window: str
) -> None:
    param, twin = (parameters(dtype)[0] for _ in range(2))
    ours, theirs = af.fuse(OWN[name]([param], lr=0.01), backend=backend), OWN[name]([twin], lr=0.01)
    for step in range(2):
        for index in range(1 if window == "p.grad" else 2):  # twice the same, whose mean is exact in 16 bits
            give([param], step, dtype)
            if window != "p.grad":
                ours.accumulate(1.0, last=window == "closed" and index == 1)
        give([twin], step, dtype)
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert_same(theirs, ours)
