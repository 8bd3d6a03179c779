"""What torch asks of its optimizers' state_dict: the same training after it, older forms, names, and its hooks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import random_grads, random_params, set_grads
from torch import Tensor
from torch.nn import Parameter
from torch_infos import (
    INPUTS,
    STOCK,
    assert_like_stock,
    assert_same,
    copies,
    every_input,
    every_optimizer,
    make,
    make_stock,
    on_each_device,
    params_of,
    train,
)

pytestmark = on_each_device
SHAPES = [(5, 3), (7,), (2,)]


def checkpoint_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint in memory: without a copy, torch's load_state_dict lets two optimizers share their states."""
    return copy.deepcopy(optimizer.state_dict())


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- training goes on ----------------------------------------------------------------------------------------------


@every_input
def test_training_goes_on_to_the_same_bits_from_a_checkpoint(backend: str, info: Any, given: Any) -> None:
    ours = make(info, given, random_params(SHAPES), backend=backend)
    train(ours)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = make(info, given, copies(params_of(ours)), backend=backend)
    again.load_state_dict(loaded)
    twin = copy.deepcopy(ours)
    twin.load_state_dict(checkpoint_of(ours))  # also into one that has a state already
    for optimizer in (again, twin):
        assert_same(optimizer, ours)
        assert options(optimizer) == options(ours)
    train(ours, again, twin, seed=1)
    assert_same(again, ours)
    assert_same(twin, ours)


@every_input
def test_a_state_dict_holds_what_torchs_holds(backend: str, info: Any, given: Any) -> None:
    ours, stock = (
        make(info, given, random_params(SHAPES), backend=backend),
        make_stock(info, given, random_params(SHAPES)),
    )
    train(ours, stock, steps=2)
    mine, theirs = ours.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs) == ["state", "param_groups"]
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    counts = {"step"} if given.kwargs.get("momentum") else set()  # which torch's SGD does not keep
    for index in theirs["state"]:
        names = {name for name, value in theirs["state"][index].items() if value is not None}
        assert set(mine["state"][index]) == names | counts
        assert all(isinstance(value, Tensor) and not value.requires_grad for value in mine["state"][index].values())
    assert bool(mine["state"]) == bool(theirs["state"])


@every_optimizer
def test_the_state_of_the_cpu_is_loaded_on_another_device_and_back(backend: str, info: Any) -> None:
    def on(device: Any, params: list[Tensor]) -> list[Tensor]:
        return [param.detach().to(device, copy=True).requires_grad_() for param in params]

    device = torch.get_default_device()
    cpu = info.optim_cls(on("cpu", random_params(SHAPES)), lr=0.01)
    peer = info.optim_cls(on(device, random_params(SHAPES)), lr=0.01, backend=backend)
    train(cpu, peer)
    here = info.optim_cls(on(device, params_of(cpu)), backend=backend)
    here.load_state_dict(checkpoint_of(cpu))
    train(here, peer, seed=1)
    assert_same(here, peer)
    assert all(value.device == param.device for param in params_of(here) for value in here.state[param].values())
    back = info.optim_cls(on("cpu", params_of(here)))
    back.load_state_dict(checkpoint_of(here))
    train(back, peer, seed=2)
    assert_same(back, peer)


FLAGGED = [
    (info, given, flag)
    for info, given in INPUTS
    for flag in [*info.supported_impls, *(["capturable"] if info.has_capturable_arg else [])]
    if flag != "differentiable"
]


@pytest.mark.parametrize(
    ("info", "given", "flag"), FLAGGED, ids=[f"{info.name}, {given.desc}, {flag}" for info, given, flag in FLAGGED]
)
def test_a_checkpoint_of_any_implementation_of_torchs_is_loaded(backend: str, info: Any, given: Any, flag: str) -> None:
    params = random_params(SHAPES)
    stock = make_stock(info, given, copies(params))
    train(stock)
    ours = make(info, given, copies(params_of(stock)), backend=backend)
    checkpoint = checkpoint_of(stock)
    checkpoint["param_groups"][0][flag] = True
    ours.load_state_dict(checkpoint)
    assert ours.param_groups[0][flag] is True
    train(ours, stock, seed=1)
    assert_like_stock(ours, stock)


# ---- older checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float, int], ids=["float", "int"])
@every_input
def test_a_checkpoint_from_before_the_flags_whose_steps_are_numbers_is_loaded(
    backend: str, info: Any, given: Any, number: Callable[[Tensor], float]
) -> None:
    ours, stock = (
        make(info, given, random_params(SHAPES), backend=backend),
        make_stock(info, given, random_params(SHAPES)),
    )
    train(ours, stock)
    older = checkpoint_of(ours)
    for group in older["param_groups"]:
        for flag in (*info.not_og_supported_flags, "decoupled_weight_decay"):
            if flag != "maximize" or not group["maximize"]:
                group.pop(flag, None)
    for state in older["state"].values():
        if info.optim_cls._torch_class is torch.optim.SGD:
            del state["step"]
        elif "step" in state:
            state["step"] = number(state["step"])
    ours.load_state_dict(older)
    if "foreach" in info.supported_impls:
        assert {key: ours.param_groups[0][key] for key in ("maximize", "foreach", "differentiable")} == {
            "maximize": given.kwargs.get("maximize", False), "foreach": None, "differentiable": False,
        }  # fmt: skip
        assert not ours.param_groups[0]["fused"]
    if info.name == "AdamW":
        assert ours.param_groups[0]["decoupled_weight_decay"] is True
    train(ours, stock, seed=1)
    assert_like_stock(ours, stock)
    assert all(isinstance(value, Tensor) for state in ours.state.values() for value in state.values())


@every_optimizer
def test_a_state_dict_of_other_groups_is_refused_with_torchs_error(backend: str, info: Any) -> None:
    two = info.optim_cls([{"params": [param]} for param in random_params([(3,), (4,)])])
    one = info.optim_cls(random_params([(3,), (4,)]), backend=backend)
    longer = info.optim_cls(random_params([(3,), (4,), (5,)]))
    train(one)
    before = everything(one)
    with pytest.raises(ValueError, match="loaded state dict has a different number of parameter groups"):
        one.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="a parameter group that doesn't match the size of optimizer's group"):
        one.load_state_dict(longer.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in everything(one).items())


# ---- names ---------------------------------------------------------------------------------------------------------


def named(prefix: str, params: list[Tensor]) -> list[dict[str, Any]]:
    pairs = [(f"{prefix}{index}", param) for index, param in enumerate(params)]
    return [{"params": pairs[:1]}, {"params": pairs[1:], "lr": 0.5}]


def unnamed(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]


NAMES = [["w0"], ["w1", "w2"]]


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, True), (False, False)])
@every_input
def test_a_checkpoint_with_names_is_loaded_without_and_back(
    backend: str, info: Any, given: Any, saved: bool, loaded: bool
) -> None:
    params = random_params(SHAPES)
    source = make(info, given, named("w", params) if saved else unnamed(params), backend=backend)
    train(source)
    twins = copies(params)
    target = make(info, given, named("v", twins) if loaded else unnamed(twins), backend=backend)
    target.load_state_dict(checkpoint_of(source))
    expected = NAMES if saved else [["v0"], ["v1", "v2"]] if loaded else [None, None]
    assert [group.get("param_names") for group in target.param_groups] == expected
    assert [group.get("param_names") for group in target.state_dict()["param_groups"]] == expected
    train(source, target, seed=1)
    assert_same(target, source)


@every_optimizer
def test_a_hook_loads_by_name(backend: str, info: Any) -> None:
    def by_name(optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The saved states in the order of this optimizer's names."""
        (saved,), (group,) = checkpoint["param_groups"], optimizer.param_groups
        places = [saved["param_names"].index(name) for name in group["param_names"]]
        states = {here: checkpoint["state"][there] for here, there in enumerate(places)} if checkpoint["state"] else {}
        return {"state": states, "param_groups": [{**saved, "params": list(range(len(places)))}]}

    params = random_params(SHAPES)
    source = info.optim_cls([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, backend=backend)
    train(source)
    twins = copies(params)
    target = info.optim_cls([("w2", twins[2]), ("w0", twins[0])], lr=0.1, backend=backend)
    target.register_load_state_dict_pre_hook(by_name)
    target.load_state_dict(checkpoint_of(source))
    grads = random_grads(params, 50)
    set_grads(params, grads)
    set_grads([twins[0], twins[2]], [grads[0], grads[2]])
    source.step()
    target.step()
    for index in (0, 2):
        assert_same_bits(twins[index], params[index])


# ---- hooks of state_dict and load_state_dict -----------------------------------------------------------------------


@every_optimizer
def test_hooks_of_state_dict_run_in_order_around_it(backend: str, info: Any) -> None:
    optimizer = info.optim_cls(random_params(SHAPES), lr=0.1, backend=backend)
    calls: list[str] = []

    def change(opt: torch.optim.Optimizer) -> None:
        opt.param_groups[0]["lr"] = 0.25
        calls.append("before")

    def add(opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        assert opt is optimizer
        state["note"] = "added in place"
        calls.append("after")

    def replace(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("last")
        return {**state, "other": "a new dict"}

    handles = [
        optimizer.register_state_dict_pre_hook(change),
        optimizer.register_state_dict_pre_hook(lambda opt: calls.append("first"), prepend=True),
        optimizer.register_state_dict_post_hook(replace),
        optimizer.register_state_dict_post_hook(add, prepend=True),
    ]
    state = optimizer.state_dict()
    assert calls == ["first", "before", "after", "last"]
    assert (state["param_groups"][0]["lr"], state["note"], state["other"]) == (0.25, "added in place", "a new dict")
    for handle in handles:
        handle.remove()
    assert list(optimizer.state_dict()) == ["state", "param_groups"]
    assert len(calls) == 4


@every_optimizer
def test_hooks_of_load_state_dict_run_in_order_around_it(backend: str, info: Any) -> None:
    optimizer = info.optim_cls(random_params(SHAPES), lr=0.1, backend=backend)
    train(optimizer)
    calls: list[str] = []

    def replace(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("before")
        return {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}

    def double(opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        calls.append("later")
        state["param_groups"][0]["lr"] *= 2

    def after(opt: torch.optim.Optimizer) -> None:
        calls.append("after")
        opt.param_groups[0]["lr"] += 1.0

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("last"))
    optimizer.register_load_state_dict_post_hook(after, prepend=True)
    given = checkpoint_of(optimizer)
    optimizer.load_state_dict(given)
    assert calls == ["before", "later", "after", "last"]
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert given["param_groups"][0]["lr"] == 0.1
    peer = STOCK[info.optim_cls](copies(params_of(optimizer)), lr=2.0)
    peer.load_state_dict({**peer.state_dict(), "state": copy.deepcopy(given["state"])})
    train(optimizer, peer, steps=1, seed=1)
    assert_like_stock(optimizer, peer)


@every_optimizer
def test_a_hook_that_writes_the_state_after_loading_is_heard(backend: str, info: Any) -> None:
    # The plan of the last step must not outlive what a hook puts in the place of its tensors.
    optimizer = info.optim_cls([Parameter(torch.ones(4))], lr=0.1, backend=backend)
    train(optimizer)

    def forget(opt: torch.optim.Optimizer) -> None:
        opt.state.clear()

    optimizer.register_load_state_dict_post_hook(forget)
    optimizer.load_state_dict(optimizer.state_dict())
    fresh = info.optim_cls(copies(params_of(optimizer)), lr=0.1, backend=backend)
    train(optimizer, fresh)
    assert_same(optimizer, fresh)
