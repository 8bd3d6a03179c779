"""fuse() of an optimizer without a rule: everything up to the clip is fused, then the optimizer makes its own step."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from snapshot import differences, snapshot
from stock_optimizers import (
    FOREIGN,
    RULED,
    Doubling,
    Logged,
    assert_equal_parameters,
    parameters,
    params_of,
    set_grads,
    stock_step,
    twins,
)
from torch import Tensor

import accumfused as af

# ---- optimizers without a rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("loads", [False, True])
def test_another_optimizer_is_clipped_and_then_makes_its_own_step(backend: str, name: str, loads: bool) -> None:
    ours, theirs = twins(FOREIGN[name])
    set_grads(ours, theirs)
    ours.step()
    theirs.step()
    af.fuse(ours, max_grad_norm=1.0, backend=backend)
    if loads:
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for factor in (3.0, 1e-3, 3.0):  # in the middle nothing is clipped
        set_grads(ours, theirs, factor=factor)
        norm = stock_step(theirs)
        ours.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-6, atol=0)
        for param, truth in zip(params_of(ours), params_of(theirs), strict=True):
            if truth.grad is None:
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad, truth.grad, rtol=1e-6, atol=0)  # clipped, in p.grad
    assert_equal_parameters(ours, theirs)


@pytest.mark.parametrize("name", FOREIGN)
def test_normalizer_and_grad_scale_divide_before_another_optimizers_step(backend: str, name: str) -> None:
    ours, theirs = twins(FOREIGN[name])
    af.fuse(ours, backend=backend)
    set_grads(ours, theirs)
    for param in params_of(ours):
        if param.grad is not None:
            param.grad *= 24.0
    ours.grad_scale = torch.tensor(8.0)
    ours.step(normalizer=3)
    theirs.step()
    assert_equal_parameters(ours, theirs)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "Doubling"])
def test_a_fused_kernel_of_torch_does_not_unscale_again(backend: str, name: str) -> None:
    make = {"Adagrad": torch.optim.Adagrad, "AdamW": torch.optim.AdamW, "Doubling": Doubling}[name]
    ours, theirs = twins(functools.partial(make, lr=0.1, eps=1.0, fused=True))  # eps: the scale matters
    af.fuse(ours, backend=backend)
    set_grads(ours, theirs)
    for param in params_of(ours):
        if param.grad is not None:
            param.grad *= 8.0
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    ours.step()
    theirs.step()
    assert_equal_parameters(ours, theirs)
    assert float(ours.grad_scale) == 8.0  # what the user has set stays


@pytest.mark.parametrize("name", [*RULED, *FOREIGN])
@pytest.mark.parametrize("window", ["none", "open", "closed"])
@pytest.mark.parametrize("cause", ["gradient", "found_inf"])
def test_a_skipped_step_leaves_everything_as_it_is(backend: str, name: str, window: str, cause: str) -> None:
    optimizer = (RULED | FOREIGN)[name](parameters())
    af.fuse(optimizer, max_grad_norm=1.0, backend=backend)
    set_grads(optimizer)
    optimizer.step()
    set_grads(optimizer)
    if cause == "gradient":
        params_of(optimizer)[1].grad[3] = math.inf
    else:
        optimizer.found_inf = torch.tensor(1.0)
    if window != "none":
        optimizer.accumulate(2, last=window == "closed")
    before = snapshot(optimizer)
    optimizer.step()
    written = differences(before, snapshot(optimizer))
    released = (
        {name for name in before if name.startswith(("accumulator", "weights", "grad"))} if window != "none" else set()
    )
    assert set(written) - released == {"skipped steps"}
    assert int(optimizer.skipped_steps) == 1
    assert bool(optimizer.step_was_skipped)
    if window != "none":
        assert all(param.grad is None for param in params_of(optimizer))
    if cause == "found_inf":
        del optimizer.found_inf
    set_grads(optimizer)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert {"param 0", "param 1"} <= set(differences(before, snapshot(optimizer)))


def test_another_optimizer_gets_the_closures_loss_back(backend: str) -> None:
    ours, theirs = twins(FOREIGN["RMSprop"])
    af.fuse(ours, backend=backend)

    def closure(optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params_of(optimizer))
        loss.backward()
        return loss

    for _ in range(3):
        loss, truth = ours.step(lambda: closure(ours)), theirs.step(lambda: closure(theirs))
        torch.testing.assert_close(loss, truth, rtol=1e-5, atol=0)
    assert_equal_parameters(ours, theirs)


def test_a_decorator_of_the_users_stays_around_the_step(backend: str) -> None:
    optimizer = af.fuse(Logged(parameters()), backend=backend)
    set_grads(optimizer)
    optimizer.step()
    assert optimizer.log == ["step"]
