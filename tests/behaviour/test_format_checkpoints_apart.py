"""Checkpoints of formats that one side lacks: masters, torch's optimizers, other dtypes of the model."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from compare import assert_close, assert_same_bits
from snapshot import refused
from stored import (
    MASTERS,
    Model,
    assert_same,
    build,
    grads_of,
    skip_a_step,
    states_of,
    through_a_file,
    train,
    trained,
)
from test_format_checkpoints import (
    assert_states_are_kept,
    each_states,
    each_weights,
    model_first,
    optimizer_first,
    params_of,
)

import accumfused as af

# ---- a master that one side has --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", MASTERS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_a_checkpoint_without_masters_leaves_those_that_are_there(
    backend: str, weights: str, steps: int, states: str
) -> None:
    source, optimizer = trained("fp32", "fp32", backend, steps=steps)
    model, twin = build(weights, states, backend)
    twin.load_full_precision_state_dict(model, source.state_dict())
    whole = twin.full_precision_state_dict(model)
    assert not torch.equal(whole["matrix"], model.matrix.float())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    again = twin.full_precision_state_dict(model)
    saved = torch.optim.AdamW(Model(torch.float32).parameters())
    saved.load_state_dict(through_a_file(twin.state_dict()))  # which is complete
    train(saved, 1)
    skip_a_step(twin)
    for found in (again, twin.full_precision_state_dict(model)):
        for name in ("matrix", "vector", "scalar", "kernel"):
            assert_same_bits(found[name], whole[name], name)
    assert [float(entries["step"]) for entries in twin.state.values()] == [float(steps)] * 4


@pytest.mark.parametrize("weights", MASTERS)
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("reads", [False, True])
def test_masters_that_were_left_follow_a_model_that_is_loaded_later(
    backend: str, weights: str, states: str, reads: bool
) -> None:
    _, optimizer = trained("fp32", "fp32", backend)
    model, twin = trained(weights, states, backend)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    with torch.no_grad():
        model.matrix.add_(8)
    if reads:
        assert torch.equal(twin.full_precision_state_dict(model)["matrix"], model.matrix.float())
    model.vector.grad = torch.zeros_like(model.vector)
    twin.step()  # without a gradient of the one that was written
    skip_a_step(twin)
    assert torch.equal(twin.full_precision_state_dict(model)["matrix"], model.matrix.float())


@pytest.mark.parametrize("weights", ["split16", "split8"])
@pytest.mark.parametrize("into", ["fp32", "fp16_master"])
@pytest.mark.parametrize("route", [optimizer_first, model_first])
def test_remainders_go_into_a_model_of_another_dtype(
    backend: str, weights: str, into: str, route: Callable[..., None]
) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    whole = optimizer.full_precision_state_dict(model)
    twin_model, twin = build(into, "fp32", backend)
    route(twin_model, twin, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    for _ in range(2):
        for name in ("matrix", "vector", "scalar", "kernel"):
            assert_same_bits(twin.full_precision_state_dict(twin_model)[name], whole[name], name)
        skip_a_step(twin)
    # States first, then the weights, which count.
    twin_model, twin = build(into, "fp32", backend)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    twin.load_full_precision_state_dict(twin_model, {name: value * 3 for name, value in whole.items()})
    skip_a_step(twin)
    assert_same_bits(twin.full_precision_state_dict(twin_model)["matrix"], whole["matrix"] * 3)
    # Weights that have what the remainders say need none.
    twin_model, twin = build("fp32", "fp32", backend)
    route(twin_model, twin, copy.deepcopy((whole, optimizer.state_dict())))
    skip_a_step(twin)
    assert_same_bits(twin_model.matrix.detach(), whole["matrix"])


# ---- torch's optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_weights
@each_states
def test_torchs_checkpoint_goes_into_every_format(backend: str, weights: str, states: str, dtype: torch.dtype) -> None:
    stock = torch.optim.AdamW(Model(dtype).parameters(), lr=0.1)
    train(stock, 3)
    saved = copy.deepcopy(stock.state_dict())
    model, optimizer = build(weights, states, backend)
    values = [param.clone() for param in model.parameters()]
    optimizer.load_state_dict(saved)
    skip_a_step(optimizer)
    before = {
        f"{name} {index}": entries[name].double()
        for index, entries in saved["state"].items()
        for name in ("exp_avg", "exp_avg_sq")
    }
    source = "bf16" if dtype == torch.bfloat16 else "fp32"
    assert_states_are_kept(before, states_of(optimizer), states, source)
    assert [float(entries["step"]) for entries in optimizer.state.values()] == [3.0] * 4
    assert all(map(torch.equal, values, model.parameters()))
    train(optimizer, 1)


@pytest.mark.parametrize("weights", ["split16", "bf16_master", "fp16_master"])
def test_training_goes_on_in_torchs_optimizer_of_an_fp32_model(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend, max_grad_norm=None)
    plain = Model(torch.float32)
    saved = optimizer.full_precision_state_dict(model)
    plain.load_state_dict({**saved, "mean": saved["mean"].float()})
    stock = torch.optim.AdamW(plain.parameters(), lr=0.1)
    stock.load_state_dict(through_a_file(optimizer.state_dict()))
    for step in range(3):
        grads_of(optimizer, 5 + step)
        for param, twin in zip(params_of(stock), params_of(optimizer), strict=True):
            param.grad = twin.grad.float()
        optimizer.step()
        stock.step()
    for name, value in plain.named_parameters():
        assert_close(optimizer.full_precision_state_dict(model)[name], value, "torch.optim", name)


@pytest.mark.parametrize("weights", ["split16", "split8", "bf16_master"])
def test_a_master_that_torch_has_cast_is_derived_again(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    stock = torch.optim.AdamW(Model(torch.bfloat16).parameters(), lr=0.1)
    stock.load_state_dict(through_a_file(optimizer.state_dict()))
    twin_model, twin = build(weights, "fp32", backend)
    twin_model.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        twin.load_state_dict(through_a_file(stock.state_dict()))
    assert [warning.filename for warning in seen] == [__file__] * 4
    name = "master_weight" if weights == "bf16_master" else "master_remainder"
    assert f"{name!r} of parameter 0 is torch.bfloat16, so its bits are lost" in str(seen[0].message)
    skip_a_step(twin)
    for name, value in twin.full_precision_state_dict(twin_model).items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name
    assert [int(entries["rounding_seed"]) for entries in twin.state.values() if "rounding_seed" in entries] == (
        [17] * 4 if weights == "split8" else []
    )


def test_codes_that_torch_has_cast_are_refused(backend: str) -> None:
    _, optimizer = trained("split16", "int8", backend)
    for dtype in (torch.float32, torch.bfloat16):
        stock = torch.optim.AdamW(Model(dtype).parameters(), lr=0.1)
        stock.load_state_dict(through_a_file(optimizer.state_dict()))
        _, twin = trained("split16", "int8", backend)
        with refused(
            twin, ValueError, f"is {dtype} with scales in {dtype}.*load the checkpoint as accumfused has saved"
        ):
            twin.load_state_dict(stock.state_dict())


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_what_a_format_has_no_use_for_is_passed_on_until_a_step(backend: str, weights: str) -> None:
    _, optimizer = trained("split8", "fp32", backend)
    _, twin = build(weights, "fp32", backend)
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(saved)
    states = twin.state_dict()["state"]
    for index, entries in saved["state"].items():
        for name, value in entries.items():
            assert_same_bits(states[index][name], value, name)
    lost = pytest.warns(UserWarning, match=r"'master_remainder' of a torch\.float32 parameter of shape \[.*dropped")
    with lost if weights == "fp32" else contextlib.nullcontext():  # its numbers are not those of the checkpoint
        skip_a_step(twin)
    for entries in twin.state_dict()["state"].values():
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}


def test_an_optimizer_without_kernels_loads_as_torchs(backend: str) -> None:
    stock, ours = (torch.optim.RMSprop(Model(torch.bfloat16).parameters(), lr=0.1, momentum=0.5) for _ in range(2))
    ours = af.fuse(ours, backend=backend)
    other = torch.optim.RMSprop(Model(torch.float32).parameters(), lr=0.1, momentum=0.5)
    train(other, 2)
    for each in (stock, ours):
        each.load_state_dict(copy.deepcopy(other.state_dict()))
        train(each, 2, seed=5)
    assert_same(stock, ours)
