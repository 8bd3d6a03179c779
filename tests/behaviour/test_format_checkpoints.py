"""Checkpoints of parameters and states in fewer bits: exact in the same format, converted in another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from snapshot import refused
from stored import MASTERS, Model, assert_same, build, grads_of, skip_a_step, states_of, through_a_file, train, trained
from table import STATES, WEIGHTS
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af

each_weights = pytest.mark.parametrize("weights", WEIGHTS)
each_states = pytest.mark.parametrize("states", STATES)
HALVES = [name for name, (dtype, _) in WEIGHTS.items() if dtype == torch.bfloat16]


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# ---- the same format -------------------------------------------------------------------------------------------------


def optimizer_first(model: Model, optimizer: Any, saved: tuple[Any, Any]) -> None:
    optimizer.load_state_dict(through_a_file(saved[1]))
    model.load_state_dict(through_a_file(saved[0]))


def model_first(model: Model, optimizer: Any, saved: tuple[Any, Any]) -> None:
    model.load_state_dict(through_a_file(saved[0]))
    optimizer.load_state_dict(through_a_file(saved[1]))


def distributed(model: Model, optimizer: Any, saved: tuple[Any, Any]) -> None:
    dcp.set_optimizer_state_dict(model, optimizer, saved[2])
    model.load_state_dict(saved[0])


def distributed_and_flat(model: Model, optimizer: Any, saved: tuple[Any, Any]) -> None:
    model.load_state_dict(saved[0])
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.set_optimizer_state_dict(model, optimizer, saved[3], options=options)


ROUTES = [optimizer_first, model_first, distributed, distributed_and_flat]
IN_TURN = [
    (weights, states, ROUTES[(i + j) % len(ROUTES)])
    for i, weights in enumerate(WEIGHTS)
    for j, states in enumerate(STATES)
]
ALL_WAYS = [
    (*pair, route) for pair in (("split16", "int8"), ("split8", "bf16"), ("fp16_master", "fp32")) for route in ROUTES
]


@pytest.mark.parametrize(
    ("weights", "states", "route"), [*IN_TURN, *(case for case in ALL_WAYS if case not in IN_TURN)]
)
def test_a_checkpoint_is_resumed_bit_for_bit(
    backend: str, weights: str, states: str, route: Callable[..., None]
) -> None:
    model, optimizer = trained(weights, states, backend)
    flat = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = copy.deepcopy(
        (
            model.state_dict(),
            optimizer.state_dict(),
            dcp.get_optimizer_state_dict(model, optimizer),
            dcp.get_optimizer_state_dict(model, optimizer, options=flat),
        )
    )
    twin_model, twin = build(weights, states, backend)
    with torch.no_grad():
        twin_model.matrix.mul_(3)
    route(twin_model, twin, saved)
    assert_same(optimizer, twin)
    train(optimizer, 2, seed=5)
    train(twin, 2, seed=5)
    assert_same(optimizer, twin)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("how", COPIES)
@each_weights
@each_states
def test_a_copy_goes_on_bit_for_bit(backend: str, weights: str, states: str, how: str) -> None:
    model, optimizer = trained(weights, states, backend)
    with torch.no_grad():
        model.vector.mul_(0.5)  # its remainder is not saved with it
    _, twin = COPIES[how]((model, optimizer))
    train(optimizer, 2, seed=5)
    train(twin, 2, seed=5)
    assert_same(optimizer, twin)


@pytest.mark.parametrize("cls", [af.SGD, af.Lion])
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split8", "fp16_master"])
def test_optimizers_with_other_states_too(backend: str, cls: Any, weights: str) -> None:
    options = {"momentum": 0.9} if cls is af.SGD else {}
    for extra in (options, {}):
        model, optimizer = trained(weights, "int8", backend, cls=cls, **extra)
        twin_model, twin = build(weights, "int8", backend, cls=cls, **extra)
        model_first(twin_model, twin, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        train(optimizer, 2, seed=5)
        train(twin, 2, seed=5)
        assert_same(optimizer, twin)


# ---- another format --------------------------------------------------------------------------------------------------


def assert_states_are_kept(before: dict[str, Tensor], after: dict[str, Tensor], states: str, source: str) -> None:
    for name, value in before.items():
        if states == "fp32" or states == source:
            assert torch.equal(after[name], value), name
        elif states == "bf16":
            torch.testing.assert_close(after[name], value, rtol=2.0**-8, atol=0)
        else:
            # A code has 4 bits of mantissa over its distance from 2^-7 (a second moment's 2^-15) of the block's scale,
            # which is not above the largest value; the smallest second moment is 2^-17 of it.
            second = name.startswith("exp_avg_sq")
            largest = value.abs().max()
            bound = (value.abs() + largest * 2.0 ** (-15 if second else -7)) / 32 + second * largest * 2.0**-17
            assert ((after[name] - value).abs() <= bound).all(), name
            assert not torch.equal(after[name], value) or value.numel() == 1


@pytest.mark.parametrize("source", STATES)
@each_states
@pytest.mark.parametrize("weights", ["fp32", "split16"])
def test_states_are_converted_to_nearest(backend: str, weights: str, source: str, states: str) -> None:
    model, optimizer = trained(weights, source, backend)
    before, steps = states_of(optimizer), [entries["step"].clone() for entries in optimizer.state.values()]
    twin_model, twin = build(weights, states, backend)
    model_first(twin_model, twin, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    skip_a_step(twin)  # which must not lose them either
    assert_states_are_kept(before, states_of(twin), states, source)
    assert all(map(torch.equal, steps, (entries["step"] for entries in twin.state.values())))
    own = {name for entries in build_and_step(weights, states, backend).state.values() for name in entries}
    assert {name for entries in twin.state.values() for name in entries} == own
    train(twin, 1)


def build_and_step(weights: str, states: str, backend: str) -> Any:
    return trained(weights, states, backend, steps=1)[1]


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("weights", HALVES)
@pytest.mark.parametrize("order", [model_first, optimizer_first])
def test_masters_are_converted(backend: str, source: str, weights: str, order: Callable[..., None]) -> None:
    model, optimizer = trained(source, "fp32", backend)
    whole = optimizer.full_precision_state_dict(model)
    halves = {name: value.clone() for name, value in model.state_dict().items()}
    twin_model, twin = build(weights, "fp32", backend)
    order(twin_model, twin, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    skip_a_step(twin)
    assert {name for e in twin.state.values() for name in e} == {
        name for e in build_and_step(weights, "fp32", backend).state.values() for name in e
    }
    for name, value in twin.full_precision_state_dict(twin_model).items():
        if weights not in MASTERS:
            assert_same_bits(twin_model.state_dict()[name], halves[name], name)
        elif weights == "split8" and value.is_floating_point():
            torch.testing.assert_close(value, whole[name], rtol=2.0**-16, atol=0)
        else:
            assert_same_bits(value, whole[name], name)


@pytest.mark.parametrize("source", MASTERS[:3])
@pytest.mark.parametrize("through", MASTERS[:3])
@pytest.mark.parametrize("states", [("fp32", "int8"), ("int8", "bf16"), ("bf16", "int8"), ("int8", "fp32")])
def test_what_was_loaded_and_not_stepped_is_saved_as_it_came(
    backend: str, source: str, through: str, states: tuple[str, str]
) -> None:
    model, optimizer = trained(source, states[0], backend)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    between_model, between = build(through, states[1], backend)
    model_first(between_model, between, saved)
    again = copy.deepcopy((between_model.state_dict(), between.state_dict()))
    twin_model, twin = build(source, states[0], backend)
    optimizer_first(twin_model, twin, again)
    train(optimizer, 2, seed=5)
    train(twin, 2, seed=5)
    assert_same(optimizer, twin)


def test_states_in_8_bits_are_read_in_the_layout_in_which_they_were_made(backend: str) -> None:
    values, grad = torch.randn(8, 16, 4, 4), torch.randn(8, 16, 4, 4) * torch.logspace(-3, 3, 16).view(1, 16, 1, 1)
    made = {}
    for form in (torch.contiguous_format, torch.channels_last):
        param = values.to(memory_format=form, copy=True).requires_grad_()
        optimizer = af.AdamW([param], lr=0.1, backend=backend, state_dtype="int8", state_dtype_min_numel=1)
        param.grad = grad.to(memory_format=form, copy=True)
        optimizer.step()
        made[form] = optimizer
    there, back = made.values()
    before = states_of(there)
    back.load_state_dict(through_a_file(there.state_dict()))
    back.max_grad_norm = 1.0
    skip_a_step(back)
    for name, value in states_of(back).items():
        assert value.stride() == params_of(back)[0].stride()
        # Encoded again, in other blocks: half a step of 4 bits, twice.
        assert ((value - before[name]).abs() <= before[name].abs() / 16 + 0.01 * before[name].abs().max()).all()
        rank = torch.corrcoef(torch.stack([value.flatten(), before[name].flatten()]))[0, 1]
        assert rank > 0.999


def moment(optimizer: Any) -> Tensor:
    return states_of(optimizer)["exp_avg 0"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (1, 128, 4, 4), (3, 5, 4, 4)])
def test_distributed_checkpoints_tell_layouts_of_codes_apart(backend: str, shape: Any, tmp_path: Path) -> None:
    def made(form: Any) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Module()
        model.p = torch.nn.Parameter(torch.randn(shape).to(memory_format=form))
        optimizer = af.AdamW(model.parameters(), backend=backend, state_dtype="int8", state_dtype_min_numel=1)
        grads_of(optimizer, 0)
        model.p.grad.mul_(torch.logspace(-3, 3, shape[1]).view(1, -1, 1, 1))
        optimizer.step()
        return model, optimizer

    def into(form: Any, path: Path) -> Any:
        twin_model, twin = made(form)
        moment(twin).zero_()
        state = {"optimizer": dcp.get_optimizer_state_dict(twin_model, twin)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path, no_dist=True)
        dcp.set_optimizer_state_dict(twin_model, twin, state["optimizer"])
        return twin

    for saved, other in (
        (torch.channels_last, torch.contiguous_format),
        (torch.contiguous_format, torch.channels_last),
    ):
        path = tmp_path / str(saved)
        model, optimizer = made(saved)
        state = {"optimizer": dcp.get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
        assert_same_bits(moment(into(saved, path)), moment(optimizer))
        with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="Size mismatch"):
            into(other, path)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_codes_that_were_copied_into_another_layout_are_refused(backend: str, form: torch.memory_format) -> None:
    param = torch.randn(8, 16, 4, 4).to(memory_format=form).requires_grad_()
    optimizer = af.AdamW([param], lr=0.1, backend=backend, state_dtype="int8", state_dtype_min_numel=1)
    train(optimizer, 1)
    saved, forms = copy.deepcopy(optimizer.state_dict()), [torch.contiguous_format, torch.channels_last]
    forms.remove(form)
    entries = saved["state"][0]
    entries["exp_avg"] = entries["exp_avg"].contiguous(memory_format=forms[0])
    one, other = "contiguous", "not contiguous"
    if form == torch.contiguous_format:
        one, other = other, one
    with refused(
        optimizer, ValueError, f"parameter 0 is {one}, and its scales, .* are those of codes that were {other}"
    ):
        optimizer.load_state_dict(saved)


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: change(saved["state"][0])


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "codes without scales": (edit(lambda s: s.pop("exp_avg_scale")), "'exp_avg' of parameter 0 is .*'exp_avg_scale'"),
    "another block size": (
        edit(lambda s: s.update(exp_avg_scale=torch.zeros(2, dtype=torch.uint8))),
        r"has scales of shape \[2\], and 128 elements to a scale make \[4\].*another block size",
    ),
    "scales of two dimensions": (
        edit(lambda s: s.update(exp_avg_sq_scale=s["exp_avg_sq_scale"].view(2, 2))),
        r"'exp_avg_sq' of parameter 0 has scales of shape \[2, 2\]",
    ),
    "scales in fp32": (
        edit(lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].float())),
        r"is torch\.uint8 with scales in torch\.float32",
    ),
    "signed codes": (edit(lambda s: s.update(exp_avg=s["exp_avg"].to(torch.int8))), r"is torch\.int8 with scales"),
    "whole numbers": (
        edit(lambda s: (s.update(exp_avg=s["exp_avg"].to(torch.int32)), s.pop("exp_avg_scale"))),
        r"is torch\.int32 without scales",
    ),
    "codes of another shape": (
        edit(lambda s: s.update(exp_avg=s["exp_avg"].flatten())),
        r"'exp_avg' of parameter 0 has shape \[407\], its parameter \[37, 11\]; load a checkpoint of the same model",
    ),
    "a remainder of another shape": (
        edit(lambda s: s.update(master_remainder=s["master_remainder"][:-1])),
        r"'master_remainder' of parameter 0 has shape \[36, 11\], its parameter \[37, 11\]",
    ),
    "a master of another shape": (
        edit(lambda s: s.update(master_weight=torch.ones(3))),
        r"'master_weight' of parameter 0 has shape \[3\]",
    ),
    "a remainder that is a number": (edit(lambda s: s.update(master_remainder=0)), "'master_remainder' of .* is a int"),
    "two seeds": (
        edit(lambda s: s.update(rounding_seed=torch.zeros(2, dtype=torch.int64))),
        r"'rounding_seed' of parameter 0 has shape \[2\], and is to be one number",
    ),
    "a seed that is a word": (edit(lambda s: s.update(rounding_seed="17")), "'rounding_seed' of parameter 0 is a str"),
    "a state that is a number": (edit(lambda s: s.update(exp_avg=0.5)), "'exp_avg' of parameter 0 is a float, not"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("into", ["int8", "fp32"])
def test_a_checkpoint_that_cannot_be_decoded_is_refused(backend: str, name: str, into: str) -> None:
    change, text = BAD[name]
    saved = copy.deepcopy(trained("split16", "int8", backend)[1].state_dict())
    change(saved)
    _, optimizer = trained("split16", into, backend)
    with refused(optimizer, ValueError, text):
        optimizer.load_state_dict(saved)
    train(optimizer, 1)
