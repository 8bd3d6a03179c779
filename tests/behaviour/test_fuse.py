"""fuse(): the same object, now fused, and everything that held it before goes on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, snapshot
from stock_optimizers import (
    FOREIGN,
    RULED,
    assert_equal_parameters,
    parameters,
    params_of,
    set_grads,
    stock_step,
    twins,
)
from torch import Tensor
from torch.optim import lr_scheduler

import accumfused as af

# ---- optimizers with a rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("loads", ["never", "before", "after"])
def test_a_fused_optimizer_goes_on_as_torchs(backend: str, name: str, steps_before: int, loads: str) -> None:
    ours, theirs = twins(RULED[name])
    for _ in range(steps_before):
        set_grads(ours, theirs)
        ours.step()
        theirs.step()
    checkpoint = copy.deepcopy(theirs.state_dict())
    if loads == "before":
        ours.load_state_dict(checkpoint)
    kind, state, groups = type(ours), ours.state, ours.param_groups
    fused = af.fuse(ours, max_grad_norm=1.0, backend=backend)
    assert fused is ours
    assert isinstance(ours, kind)
    assert type(ours) is getattr(af, name.split(",")[0])
    assert ours.state is state
    assert ours.param_groups is groups
    if loads == "after":
        ours.load_state_dict(checkpoint)
    for _ in range(4):
        set_grads(ours, theirs, factor=3.0)
        norm = stock_step(theirs)
        ours.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-6, atol=0)
    assert_equal_parameters(ours, theirs)
    theirs.load_state_dict(ours.state_dict())  # and back


@pytest.mark.parametrize("name", [*RULED, *FOREIGN])
def test_windows_of_a_fused_optimizer(backend: str, name: str) -> None:
    ours, theirs = twins((RULED | FOREIGN)[name])
    af.fuse(ours, max_grad_norm=1.0, backend=backend)
    for closed in (False, True, False):
        sums: list[Tensor | None] = [None] * 3
        for i, weight in enumerate((1, 4, 3)):
            set_grads(ours, factor=3.0)
            for j, param in enumerate(params_of(ours)):
                if param.grad is not None:
                    sums[j] = (0.0 if sums[j] is None else sums[j]) + param.grad.double() * (weight / 8)
            ours.accumulate(weight, last=closed and i == 2)
        for param, total in zip(params_of(theirs), sums, strict=True):
            param.grad = None if total is None else total.float()
        norm = stock_step(theirs)
        ours.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-6, atol=0)
        assert all(param.grad is None for param in params_of(ours))
    assert_equal_parameters(ours, theirs)


# ---- schedulers ----------------------------------------------------------------------------------------------------


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=2)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10),
    "SequentialLR": sequence,
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "Doubling"])
@pytest.mark.parametrize("bound", ["before fuse", "before fuse, one step made", "after fuse"])
def test_a_scheduler_goes_on(backend: str, scheduler: str, name: str, bound: str) -> None:
    ours, theirs = twins((RULED | FOREIGN)[name])
    their_schedule = SCHEDULERS[scheduler](theirs)
    if bound.startswith("before"):
        schedule = SCHEDULERS[scheduler](ours)
    if "one step" in bound:
        set_grads(ours, theirs)
        for optimizer, step in ((ours, schedule), (theirs, their_schedule)):
            optimizer.step()
            step.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    af.fuse(ours, max_grad_norm=1.0, backend=backend)
    if bound == "after fuse":
        schedule = SCHEDULERS[scheduler](ours)
    for _ in range(4):
        set_grads(ours, theirs, factor=3.0)
        ours.step()
        assert float(ours.grad_norm) == pytest.approx(float(stock_step(theirs)), rel=1e-6)
        for step in (schedule, their_schedule):  # warnings are errors: none about the order of calls
            step.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_equal_parameters(ours, theirs)
    schedule.load_state_dict(schedule.state_dict())


def test_a_scheduler_that_is_called_before_the_first_step_still_warns(backend: str) -> None:
    optimizer = torch.optim.AdamW(parameters())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    af.fuse(optimizer, backend=backend)
    with pytest.warns(UserWarning, match=r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`"):
        schedule.step()


# ---- hooks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RULED, *FOREIGN])
@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_fire_once_a_step(backend: str, name: str, registered: str) -> None:
    (RULED | FOREIGN)[name](parameters())  # another one of the class has patched the class's step
    torch.optim.AdamW(parameters())
    optimizer = (RULED | FOREIGN)[name](parameters())
    calls: list[str] = []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))

    if registered == "before":
        register()
    af.fuse(optimizer, max_grad_norm=1.0, backend=backend)
    if registered == "after":
        register()
    for _ in range(2):
        calls.clear()
        set_grads(optimizer)
        optimizer.step()
        # torch's AdamW.step, called by the subclass's own, has hooks of its own: stock fires twice there.
        expected = ["pre", "pre", "post", "post"] if name == "Doubling" else ["pre", "post"]
        assert calls == expected
    calls.clear()
    optimizer.state_dict()
    assert calls == ["state"]


# ---- copies --------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", [*RULED, *FOREIGN])
def test_copies_of_a_fused_optimizer_go_on_alike_and_apart(backend: str, name: str, how: str) -> None:
    optimizer = af.fuse((RULED | FOREIGN)[name](parameters()), max_grad_norm=0.5, nonfinite="skip", backend=backend)
    set_grads(optimizer)
    optimizer.step()
    twin = COPIES[how](optimizer)
    assert type(twin) is type(optimizer)
    kept = snapshot(twin)
    set_grads(optimizer, factor=9.0)
    grads = [None if param.grad is None else param.grad.clone() for param in params_of(optimizer)]
    optimizer.step()
    assert differences(kept, snapshot(twin)) == []
    assert {"param 0", "param 1"} <= set(differences(kept, snapshot(optimizer)))
    for param, grad in zip(params_of(twin), grads, strict=True):
        param.grad = grad
    twin.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    assert torch.equal(twin.grad_norm, optimizer.grad_norm)


# ---- refused -------------------------------------------------------------------------------------------------------


def test_lbfgs_is_refused() -> None:
    optimizer = torch.optim.LBFGS(parameters())
    with pytest.raises(TypeError, match="LBFGS evaluates a closure within its step, which cannot be fused"):
        af.fuse(optimizer)
    assert type(optimizer) is torch.optim.LBFGS


def test_sparse_adam_is_refused() -> None:
    optimizer = torch.optim.SparseAdam(parameters())
    text = "SparseAdam takes sparse gradients only, which cannot be fused; keep it as it is .* beside a fused optimizer"
    with pytest.raises(TypeError, match=text):
        af.fuse(optimizer)
    assert type(optimizer) is torch.optim.SparseAdam


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, af.Lion])
def test_what_is_fused_already_is_refused(make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make(parameters())
    if not isinstance(optimizer, af.FusedOptimizer):
        af.fuse(optimizer, max_grad_norm=1.0)
    kind = type(optimizer)
    with pytest.raises(TypeError, match=rf"fused already \({kind.__name__}\)"):
        af.fuse(optimizer)
    assert type(optimizer) is kind


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, got Linear"):
        af.fuse(torch.nn.Linear(2, 2))


def test_a_step_that_somebody_has_replaced_is_refused() -> None:
    optimizer = torch.optim.AdamW(parameters())
    optimizer.step = lambda: None
    with pytest.raises(RuntimeError, match=r"call fuse\(\) before whatever wraps it"):
        af.fuse(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert "step" in vars(optimizer)


def test_differentiable_is_refused() -> None:
    optimizer = torch.optim.AdamW(parameters(), differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        af.fuse(optimizer)
    assert type(optimizer) is torch.optim.AdamW
