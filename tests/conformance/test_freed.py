"""A plan owns no tensor: what a loop frees, replaces, moves or swaps between two calls is free, on every backend."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from places import INSTRUCTION_SETS, Place
from torch import Tensor, nn

import accumfused as af

PLACES = [*INSTRUCTION_SETS[:1], "emulated", "two devices", "interpreted", "reference", "torch"]
every_place = pytest.mark.parametrize("place", PLACES, indirect=True)


def made(place: Place, params: Any, **options: Any) -> af.AdamW:
    optimizer = af.AdamW(params, lr=0.1, **options)
    inside.use_backend(optimizer, place.backend)
    return optimizer


def plain_step(optimizer: af.AdamW, params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def step_that_leaves_gradients(optimizer: af.AdamW, params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def window(optimizer: af.AdamW, params: list[Tensor], *, last: bool = False) -> None:
    for weight in (3, 5):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.accumulate(weight, last=last and weight == 5)
    optimizer.step()


def closed_window(optimizer: af.AdamW, params: list[Tensor]) -> None:
    window(optimizer, params, last=True)


LOOPS = pytest.mark.parametrize("loop", [plain_step, window, closed_window])
FORMATS = pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"state_dtype": "8bit", "state_dtype_min_numel": 0})],
    ids=["fp32", "split16, 8bit"],
)


def alive(references: list[weakref.ref[Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


# Triton's interpreter takes seconds for what depends on the backend in one loop as in another.
def in_few_loops(place: str, loop: Any) -> Any:
    return pytest.mark.full if place == "interpreted" and loop is not window else []


@pytest.mark.parametrize(
    ("place", "loop"),
    [
        pytest.param(p, loop, marks=in_few_loops(p, loop))
        for p in PLACES
        for loop in (plain_step, window, closed_window)
    ],
    indirect=["place"],
)
@FORMATS
def test_states_that_a_loop_replaces_and_a_removed_group_are_freed(
    place: Place, loop: Callable[..., None], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    params = [nn.Parameter(torch.ones(256, dtype=dtype, device=place.device)) for _ in range(2)]
    optimizer = made(place, [{"params": [param]} for param in params], **options)
    loop(optimizer, params)
    states = optimizer.state[params[0]]
    old = [weakref.ref(value) for value in states.values()]
    assert alive(old) == len(old) > 2
    for name in states:
        states[name] = states[name].clone()  # as a loop does that moves them to the host while a model generates
    assert alive(old) == 0
    removed = [weakref.ref(value) for value in (params[1], *optimizer.state[params[1]].values())]
    optimizer.param_groups.pop()
    del optimizer.state[params.pop()]
    assert alive(removed) == 0
    twin = made(place, params, **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = params[0].detach().clone()
    loop(optimizer, params)
    first = params[0].detach().clone()
    with torch.no_grad():
        params[0].copy_(before)
    loop(twin, params)
    assert torch.equal(params[0], first)
    assert not torch.equal(params[0], before)


@every_place
@LOOPS
def test_gradients_that_a_step_has_taken_are_freed(place: Place, loop: Callable[..., None]) -> None:
    params = [nn.Parameter(torch.ones(256, device=place.device)) for _ in range(2)]
    optimizer = made(place, params)
    for param in params:
        param.grad = torch.ones_like(param)
    taken = [weakref.ref(param.grad) for param in params if param.grad is not None]
    if loop is plain_step:
        optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer.accumulate(last=loop is closed_window)
        optimizer.step()
    assert alive(taken) == 0


@pytest.mark.parametrize(
    ("place", "loop"),
    [
        pytest.param(p, loop, marks=in_few_loops(p, loop))
        for p in PLACES
        for loop in (plain_step, step_that_leaves_gradients, window, closed_window)
    ],
    indirect=["place"],
)
@pytest.mark.parametrize("has_grad", [False, True], ids=["no p.grad", "p.grad"])
def test_tensors_may_be_swapped_and_modules_converted(place: Place, loop: Callable[..., None], has_grad: bool) -> None:
    model = nn.Linear(16, 16, device=place.device)
    params, other = [*model.parameters()], nn.Linear(16, 16, device=place.device)
    optimizer = made(place, params)
    loop(optimizer, params)
    if has_grad:
        model(torch.ones(2, 16, device=place.device)).sum().backward()
    torch.utils.swap_tensors(model.weight, other.weight)
    if has_grad:
        model(torch.ones(2, 16, device=place.device)).sum().backward()
    twins = [param.detach().clone().requires_grad_() for param in params]
    twin = made(place, twins)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop(optimizer, params)
    loop(twin, twins)
    for param, expected in zip(params, twins, strict=True):
        assert torch.equal(param, expected)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight.dtype == torch.float16


# ---- an address alone is no identity ------------------------------------------------------------------------------


def swapped_names(states: dict[str, Any]) -> None:
    """The same objects in the same order, under each other's names."""
    first, second = states.pop("exp_avg"), states.pop("exp_avg_sq")
    states |= {"exp_avg_sq": first, "exp_avg": second}


def new_objects(states: dict[str, Any]) -> None:
    """Others, perhaps at the addresses of those before."""
    for name in ("exp_avg", "exp_avg_sq"):
        shape = states.pop(name).shape
        states[name] = torch.full(shape, 0.25)


def views(states: dict[str, Any]) -> None:
    """Other memory under the same objects."""
    for name in ("exp_avg", "exp_avg_sq"):
        states[name].data = states[name].clone()


def other_strides(states: dict[str, Any]) -> None:
    """The same memory, read in another order."""
    states["exp_avg"].set_(states["exp_avg"].untyped_storage(), 0, states["exp_avg"].shape, (1, 8))


def a_number(states: dict[str, Any]) -> None:
    """Not a tensor any more."""
    states["step"] = float(states["step"])


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS[:1], "emulated", "torch", "reference"], indirect=True)
@pytest.mark.parametrize("change", [swapped_names, new_objects, views, other_strides, a_number])
def test_states_that_were_changed_from_outside_are_those_of_the_next_step(
    place: Place, change: Callable[[dict[str, Any]], None]
) -> None:
    param, twin_param = (nn.Parameter(torch.ones(8, 8, device=place.device)) for _ in range(2))
    optimizer, twin = made(place, [param]), made(place, [twin_param])
    for values in (1.0, 0.5):
        for each, own in ((optimizer, param), (twin, twin_param)):
            own.grad = torch.arange(64.0, device=place.device).view(8, 8) * values
            each.step()
    change(optimizer.state[param])
    change(twin.state[twin_param])
    twin.param_groups[0]["params"] = [twin_param]
    inside.use_backend(twin, place.backend)  # whose plan is new
    for each, own in ((optimizer, param), (twin, twin_param)):
        own.grad = torch.arange(64.0, device=place.device).view(8, 8)
        each.step()
    assert torch.equal(param, twin_param)


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS[:1], "emulated", "torch"], indirect=True)
def test_a_state_of_which_the_memory_is_gone_is_refused_and_nothing_is_written(place: Place) -> None:
    param = nn.Parameter(torch.ones(4096, device=place.device))
    optimizer = made(place, [param])
    plain_step(optimizer, [param])
    before = param.detach().clone()
    optimizer.state[param]["exp_avg"].untyped_storage().resize_(64)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"a state of shape .* lies in a storage of 64 bytes"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS[:1], "emulated", "torch"], indirect=True)
def test_a_new_parameter_at_an_old_address_is_a_new_parameter(place: Place) -> None:
    """Python and torch give the memory of a freed parameter to the next one."""
    optimizer = made(place, [nn.Parameter(torch.ones(64, device=place.device))])
    plain_step(optimizer, optimizer.param_groups[0]["params"])
    for shape in ((64,), (8, 8), (64,), (128,)):
        optimizer.param_groups[0]["params"].clear()
        optimizer.state.clear()
        param = nn.Parameter(torch.full(shape, 2.0, device=place.device))
        optimizer.param_groups[0]["params"].append(param)
        plain_step(optimizer, [param])
        assert float(optimizer.state[param]["step"]) == 1.0
        assert param.unique().numel() == 1
        assert float(param.detach().max()) < 2.0
        del param
