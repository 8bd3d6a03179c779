"""A torch.optim.Optimizer like any other: groups, schedulers, hooks and autograd find what they expect."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, snapshot
from stock_optimizers import params_of, set_grads
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_peers import CASES, assert_alike, make, train

import accumfused as af

# ---- what it prints -------------------------------------------------------------------------------------------------


def ours_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The lines that follow torch's text."""
    theirs, _, ours = repr(optimizer).partition("\n)\n")
    assert theirs.startswith(f"{type(optimizer).__name__} (\nParameter Group 0\n")
    return [line.strip() for line in ours.splitlines()]


def test_a_printed_optimizer_says_what_runs(backend: str) -> None:
    param = Parameter(torch.ones(3))
    assert ours_of(af.SGD([param])) == ["accumfused.SGD (", "backend: not chosen yet", ")"]
    fused = af.fuse(torch.optim.AdamW([param]), max_grad_norm=0.5, nonfinite="raise", backend=backend)
    chosen = ["accumfused.AdamW (", "max_grad_norm: 0.5", "nonfinite: raise", f"backend: {backend}"]
    assert ours_of(fused) == [*chosen, ")"]
    for count in (1, 2):
        param.grad = torch.ones(3)
        fused.accumulate(last=count == 2)
        phase = "open" if count == 1 else "closed"
        assert ours_of(fused) == [*chosen, f"window: {phase}, micro-batches: {count}", ")"]
    fused.step()
    assert ours_of(fused) == [*chosen, ")"]


def test_a_printed_optimizer_says_which_backend_was_chosen_and_how_numbers_are_kept() -> None:
    params = [Parameter(torch.ones(64, 64, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    optimizer = af.Lion(params, state_dtype="int8", state_dtype_min_numel=0)
    formats = "formats: bf16 + split16, int8 states; fp32, int8 states"
    lines = ["accumfused.Lion (", "state_dtype: int8", "state_dtype_min_numel: 0"]
    assert ours_of(optimizer) == [*lines, "backend: not chosen yet", formats, ")"]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    backend = optimizer._runtime.backend
    assert backend is not None
    assert ours_of(optimizer) == [*lines, f"backend: {backend.name}", formats, ")"]


def test_a_printed_optimizer_with_its_own_step_and_one_of_the_users() -> None:
    class Mine(af.AdamW):
        """A user's."""

    frozen = Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)  # of which no format is known
    params = [Parameter(torch.ones(3, dtype=torch.bfloat16)), frozen]
    own = ours_of(af.fuse(torch.optim.RMSprop(params)))
    assert own == ["accumfused.FusedRMSprop (", "backend: not chosen yet", "formats: bf16, its own states", ")"]
    assert ours_of(Mine(params))[0] == "accumfused.AdamW ("


# ---- groups --------------------------------------------------------------------------------------------------------


def test_groups_with_their_own_options(backend: str) -> None:
    def build(module: Any, **settings: Any) -> torch.optim.Optimizer:
        torch.manual_seed(2)
        first, second, third = (Parameter(torch.randn(6)) for _ in range(3))
        groups = [
            {"params": [first], "amsgrad": True, "lr": 0.3},
            {"params": [second], "betas": (0.1, 0.2), "eps": 0.1},
            {"params": third, "maximize": True, "weight_decay": 0.5},
        ]
        return module.AdamW(groups, lr=0.1, **settings)

    ours, theirs = build(af, backend=backend), build(torch.optim)
    train(4, ours, theirs)
    assert_alike(ours, theirs)
    assert ["max_exp_avg_sq" in ours.state[param] for param in params_of(ours)] == [True, False, False]
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(2, ours, theirs)
    assert_alike(ours, theirs)


def test_options_may_change_between_steps(backend: str) -> None:
    ours, theirs = make(af, "AdamW", backend=backend), make(torch.optim, "AdamW")
    for change in ({"lr": 0.3}, {"betas": (0.2, 0.3)}, {"weight_decay": 0.0}, {"maximize": True}, {"eps": 0.5}):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(change)
        train(2, ours, theirs)
        assert_alike(ours, theirs)


@pytest.mark.parametrize("window", ["none", "open", "closed"])
@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_group_may_be_added_late(backend: str, window: str, unfrozen: bool) -> None:
    params = [Parameter(torch.full((4,), 8.0)) for _ in range(3)]
    optimizer = af.SGD(params[:1], lr=0.5, max_grad_norm=1e6, backend=backend)
    params[0].grad = torch.full((4,), 2.0)
    optimizer.step()  # the plan is made
    params[0].grad = torch.full((4,), 2.0)
    if window != "none":
        optimizer.accumulate(1, last=window == "closed")
    params[1].requires_grad_(not unfrozen)
    optimizer.add_param_group({"params": params[1:], "lr": 0.25})
    params[1].requires_grad_(True)
    if window == "open":
        for param in params[1:]:
            param.grad = torch.full((4,), 4.0)
        optimizer.accumulate(3)
        optimizer.step()
        assert [param[0].item() for param in params] == [8 - 1 - 0.5 * 2 / 4, 8 - 0.25 * 3, 8 - 0.25 * 3]
        torch.testing.assert_close(optimizer.grad_norm, torch.tensor((4 * 0.25 + 8 * 9) ** 0.5), rtol=1e-6, atol=0)
    else:
        optimizer.step()
        assert [param[0].item() for param in params] == [6.0, 8.0, 8.0]


def test_named_parameters(backend: str) -> None:
    ours, theirs = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = af.AdamW(ours.named_parameters(), lr=0.1, backend=backend)
    peer = torch.optim.AdamW(theirs.named_parameters(), lr=0.1)
    train(3, optimizer, peer)
    assert_alike(optimizer, peer)
    assert optimizer.state_dict()["param_groups"] == peer.state_dict()["param_groups"]
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_may_be_missing_in_some_steps(backend: str, case: str) -> None:
    ours, theirs = make(af, case, max_grad_norm=1.0, backend=backend), make(torch.optim, case)
    for missing in ([0], [0, 1, 2], [], [1], [0, 2]):
        set_grads(ours, theirs)
        for optimizer in (ours, theirs):
            for index in missing:
                params_of(optimizer)[index].grad = None
        torch.nn.utils.clip_grad_norm_(params_of(theirs), 1.0)
        ours.step()
        theirs.step()
        assert_alike(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_without_any_gradient_does_nothing(backend: str, frozen: bool) -> None:
    params = [Parameter(torch.randn(4), requires_grad=not frozen) for _ in range(2)]
    optimizer = af.AdamW(params, lr=0.1, weight_decay=0.5, max_grad_norm=1.0, nonfinite="raise", backend=backend)
    before = snapshot(optimizer)
    assert optimizer.step() is None
    assert optimizer.step(lambda: 3.0) == 3.0
    optimizer.zero_grad()
    assert differences(before, snapshot(optimizer)) == []
    assert optimizer.state_dict()["state"] == {}
    assert not optimizer.step_was_skipped
    if not frozen:
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        assert [float(optimizer.state[param]["step"]) for param in params] == [1.0, 1.0]


# ---- learning rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_lr_may_be_a_tensor(backend: str, case: str) -> None:
    ours, theirs = make(af, case, backend=backend), make(torch.optim, case)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    train(2, ours, theirs)
    assert_alike(ours, theirs)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"].fill_(0.3)
    train(2, ours, theirs)
    assert_alike(ours, theirs)
    name, options = CASES[case]
    getattr(af, name)([Parameter(torch.ones(3))], **{**options, "lr": torch.tensor(0.1)})


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "CosineAnnealingWarmRestarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "CyclicLR, which cycles momentum": functools.partial(
        lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2, cycle_momentum=True
    ),
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=12),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("case", ["SGD with momentum", "AdamW", "AdamW with amsgrad"])
def test_schedulers_work_without_a_warning(backend: str, schedule: str, case: str) -> None:
    ours, theirs = make(af, case, backend=backend), make(torch.optim, case)
    schedules = [SCHEDULERS[schedule](optimizer) for optimizer in (ours, theirs)]
    for _ in range(8):
        train(1, ours, theirs)
        for each in schedules:
            each.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_alike(ours, theirs)


# ---- hooks and autograd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_hooks_fire_once_around_the_step_and_may_change_its_arguments(backend: str, name: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = getattr(af, name)([param], lr=0.1, backend=backend)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", param[0].item())))
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": lambda: 5.0}))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", param[0].item())))
    param.grad = torch.ones(3)
    assert optimizer.step() == 5.0
    assert [when for when, _ in seen] == ["pre", "post"]
    assert seen[0][1] == 1.0
    assert seen[1][1] == param[0].item() < 1.0


@pytest.mark.parametrize("how", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_finds_the_step_by_its_name(backend: str, how: Any) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], lr=0.1, backend=backend)
    for _ in range(2):
        param.grad = torch.ones(3)
        with how() as trace:
            optimizer.step()
        assert [event.count for event in trace.key_averages() if event.key == "Optimizer.step#AdamW.step"] == [1]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers_fire(backend: str, register: Callable[..., Any]) -> None:
    param, seen = Parameter(torch.ones(3)), []
    optimizer = af.AdamW([param], lr=0.1, backend=backend)
    handle = register(lambda opt, args, kwargs: seen.append(opt))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [optimizer]


def test_a_post_accumulate_hook_may_fold_the_gradients_of_its_own_optimizer(backend: str) -> None:
    params = [Parameter(torch.full((4,), 8.0)) for _ in range(2)]
    owners = {param: af.SGD([param], lr=0.5, backend=backend) for param in params}
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: owners[p].accumulate())
    for _ in range(3):
        sum((i + 1) * param.sum() for i, param in enumerate(params)).backward()
    for optimizer in owners.values():
        optimizer.step()
    assert [param[0].item() for param in params] == [8 - 0.5 * 3, 8 - 0.5 * 6]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion"])
def test_a_step_counts_as_a_write_of_what_it_writes(backend: str, name: str) -> None:
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = getattr(af, name)(params, lr=0.1, backend=backend)
    for present in ([0, 1], [0], [0, 1, 2]):
        versions = [param._version for param in params]
        for index, param in enumerate(params):
            param.grad = torch.ones(3) if index in present else None
        optimizer.step()
        assert [p._version > v for p, v in zip(params, versions, strict=True)] == [i in present for i in range(3)]


@pytest.mark.parametrize("how", ["step", "open window", "closed window"])
def test_a_step_between_forward_and_backward_is_caught_by_autograd(backend: str, how: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.ones(3)
    loss: Tensor = (param * param).sum()
    if how != "step":
        optimizer.accumulate(last=how == "closed window")
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_nothing_is_recorded_by_autograd(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], max_grad_norm=1.0, backend=backend)
    param.grad = torch.ones(3)
    optimizer.accumulate(2)
    optimizer.step()
    assert param.is_leaf
    assert param.requires_grad
    for value in (*optimizer.state[param].values(), optimizer.grad_norm, optimizer.skipped_steps):
        assert not value.requires_grad
        assert value.is_leaf


def test_a_gradient_with_a_graph_of_its_own_is_not_changed(backend: str) -> None:
    param = Parameter(torch.full((3,), 8.0))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    (param * param).sum().backward(create_graph=False)
    optimizer.accumulate()
    factor = torch.full((3,), 2.0, requires_grad=True)
    (grad,) = torch.autograd.grad((param * factor).sum(), param, create_graph=True)
    param.grad = grad
    optimizer.accumulate(last=True)
    assert grad.tolist() == [2.0] * 3
    optimizer.step()
    assert param.tolist() == [8.0 - 0.5 * (16.0 + 2.0)] * 3
    grad.sum().backward()
    assert factor.grad.tolist() == [1.0] * 3
