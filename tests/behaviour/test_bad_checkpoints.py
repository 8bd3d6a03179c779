"""A checkpoint that does not fit raises, and leaves the optimizer as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, refused, snapshot
from torch.nn import Parameter

import accumfused as af

Checkpoint = dict[str, Any]


def make(cls: Any, shapes: tuple[tuple[int, ...], ...] = ((3,), (2, 2)), **options: Any) -> Any:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = cls(params, lr=0.1, **options)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def edited(edit: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        edit(checkpoint)
        return checkpoint

    return change


def two_groups() -> Checkpoint:
    params = [Parameter(torch.randn(3)), Parameter(torch.randn(2, 2))]
    return af.AdamW([{"params": params[:1]}, {"params": params[1:]}]).state_dict()


def trained_checkpoint() -> Checkpoint:
    return copy.deepcopy(make(af.AdamW).state_dict())


def with_a_window() -> Checkpoint:
    optimizer = make(af.AdamW)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    optimizer.accumulate(3.0)
    return copy.deepcopy(optimizer.state_dict())


def without(name: str) -> Callable[[Checkpoint], Checkpoint]:
    return edited(lambda checkpoint: checkpoint["state"][1].pop(name))


FOREIGN: dict[str, tuple[Callable[[], Checkpoint], str]] = {
    "a model's": (lambda: dict(torch.nn.Linear(2, 2).state_dict()), r"has 'weight', 'bias'"),
    "nothing": (dict, "not an optimizer's state_dict"),
    "SGD's": (lambda: make(torch.optim.SGD, momentum=0.9).state_dict(), r"groups have no 'betas', which AdamW needs"),
    "Adagrad's": (lambda: make(torch.optim.Adagrad).state_dict(), r"groups have no 'betas', which AdamW needs"),
    "Adamax's": (lambda: make(torch.optim.Adamax).state_dict(), r"has no 'exp_avg_sq', only exp_avg, exp_inf, step"),
    "Lion's": (lambda: make(af.Lion).state_dict(), "groups have no 'eps', which AdamW needs"),
    "of more parameters": (lambda: make(af.AdamW, ((3,), (2, 2), (1,))).state_dict(), "doesn't match the size"),
    "of fewer parameters": (lambda: make(af.AdamW, ((3,),)).state_dict(), "doesn't match the size"),
    "of more groups": (two_groups, "different number of parameter groups"),
    "of other shapes": (
        lambda: make(af.AdamW, ((3,), (4,))).state_dict(),
        r"'exp_avg' of parameter 1 has shape \[4\], its parameter \[2, 2\]; load a checkpoint of the same model",
    ),
}
DAMAGED: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str]] = {
    "no state": (edited(lambda c: c.pop("state")), "this one has 'param_groups'"),
    "no groups": (edited(lambda c: c.pop("param_groups")), "this one has 'state'"),
    "no exp_avg_sq": (without("exp_avg_sq"), "state of parameter 1 has no 'exp_avg_sq'"),
    "no step": (without("step"), "state of parameter 1 has no 'step'"),
    "no lr": (edited(lambda c: c["param_groups"][0].pop("lr")), "groups have no 'lr', which AdamW needs"),
    "a state of nobody": (
        edited(lambda c: c["state"].update({7: c["state"][1]})),
        "a state of parameter 7, which none of its groups has",
    ),
    "a group without params": (
        edited(lambda c: c["param_groups"][0].pop("params")),
        "a group of the checkpoint has no",
    ),
    "a state that is none": (
        edited(lambda c: c["state"].update({0: 3.0})),
        "state of parameter 0 is a float, not a dict",
    ),
    "a step of three": (edited(lambda c: c["state"][1].update(step=torch.ones(3))), r"'step' of parameter 1 has shape"),
    "amsgrad without its maximum": (
        edited(lambda c: c["param_groups"][0].update(amsgrad=True)),
        "has no 'max_exp_avg_sq'",
    ),
}
WINDOWS: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str]] = {
    "no weights": (without("grad_accumulator_weights"), "the open window of parameter 1 is incomplete"),
    "no accumulator": (without("grad_accumulator"), "the open window of parameter 1 is incomplete"),
    "cut weights": (
        edited(lambda c: c["state"][0].update(grad_accumulator_weights=torch.ones(2))),
        "the open window of parameter 0 is incomplete",
    ),
    "weights in a list": (
        edited(lambda c: c["state"][0].update(grad_accumulator_weights=[1.0] * 4)),
        "the open window of parameter 0 is incomplete",
    ),
    "another shape": (
        edited(lambda c: c["state"][0].update(grad_accumulator=torch.ones(2))),
        r"'grad_accumulator' of parameter 0 has shape \[2\], its parameter \[3\]",
    ),
}
EVERY = {
    **FOREIGN,
    **{name: (lambda e=edit: e(trained_checkpoint()), text) for name, (edit, text) in DAMAGED.items()},
    **{f"window: {name}": (lambda e=edit: e(with_a_window()), text) for name, (edit, text) in WINDOWS.items()},
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("trained", [False, True])
def test_it_raises_and_nothing_has_changed(backend: str, name: str, trained: bool) -> None:
    build, text = EVERY[name]
    checkpoint = build()
    optimizer = make(af.AdamW, max_grad_norm=0.5, weight_decay=0.3, backend=backend)
    if not trained:
        optimizer.state.clear()
    groups, settings = copy.deepcopy(optimizer.param_groups), optimizer._settings
    hooks = dict(optimizer._optimizer_load_state_dict_pre_hooks)
    given = copy.deepcopy(checkpoint)
    with refused(optimizer, ValueError, text):
        optimizer.load_state_dict(checkpoint)
    assert repr(optimizer.param_groups) == repr(groups)
    assert (optimizer._settings, dict(optimizer._optimizer_load_state_dict_pre_hooks)) == (settings, hooks)
    assert repr(checkpoint) == repr(given)
    twin = make(af.AdamW, max_grad_norm=0.5, weight_decay=0.3, backend=backend)
    if not trained:
        twin.state.clear()
    for each in (optimizer, twin):
        for param in each.param_groups[0]["params"]:
            param.grad = torch.full_like(param, 0.25)
        each.step()
    assert differences(snapshot(twin), snapshot(optimizer)) == []


@pytest.mark.parametrize("live", [False, True])
def test_nothing_is_loaded_into_an_open_window(backend: str, live: bool) -> None:
    optimizer = make(af.AdamW, backend=backend)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.accumulate()
    if live:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with refused(optimizer, RuntimeError, r"call step\(\) or zero_grad\(\) before load_state_dict\(\)"):
        optimizer.load_state_dict(checkpoint)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
def test_a_checkpoint_of_sgd_is_checked_too(backend: str, options: dict[str, float]) -> None:
    optimizer = make(af.SGD, backend=backend, **options)
    with refused(optimizer, ValueError, "groups have no 'momentum', which SGD needs"):
        optimizer.load_state_dict(make(torch.optim.AdamW).state_dict())
    optimizer.load_state_dict(make(torch.optim.SGD, **options).state_dict())


@pytest.mark.parametrize("cls", [torch.optim.AdamW, af.Adam])
def test_lion_does_not_take_adams_first_moment(backend: str, cls: Any) -> None:
    optimizer = make(af.Lion, backend=backend)
    with refused(optimizer, ValueError, "has 'exp_avg_sq', which Lion has not"):
        optimizer.load_state_dict(make(cls).state_dict())


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, af.Lion])
def test_an_optimizer_without_kernels_is_checked_by_its_own_options(backend: str, cls: Any) -> None:
    optimizer = af.fuse(make(torch.optim.RMSprop), backend=backend)
    with refused(optimizer, ValueError, "groups have no '(momentum|alpha)', which RMSprop needs"):
        optimizer.load_state_dict(make(cls).state_dict())


def test_what_else_a_state_holds_is_kept(backend: str) -> None:
    optimizer, fresh = make(af.AdamW, backend=backend), make(af.AdamW, backend=backend)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["state"][0]["ema"] = torch.ones(3)
    checkpoint["state"]["note"] = "of the whole"
    del checkpoint["state"][1]  # a parameter that had no gradient yet
    fresh.load_state_dict(checkpoint)
    params = fresh.param_groups[0]["params"]
    assert fresh.state[params[0]]["ema"].tolist() == [1.0] * 3
    assert fresh.state["note"] == "of the whole"
    assert params[1] not in fresh.state


def test_of_an_optimizer_without_kernels_its_own_loading_decides(backend: str) -> None:
    optimizer = af.fuse(make(torch.optim.RMSprop), backend=backend)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.accumulate(2.0)
    twin = af.fuse(make(torch.optim.RMSprop), backend=backend)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares what it loads
    for each in (optimizer, twin):
        for param in each.param_groups[0]["params"]:
            param.grad = torch.full_like(param, 3.0)
        each.accumulate(1.0)
        each.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []
