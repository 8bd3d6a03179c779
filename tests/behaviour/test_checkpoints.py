"""Checkpoints and copies: to torch's optimizer of the same name and back, from older ones, by deepcopy and pickle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, snapshot
from stock_optimizers import params_of, set_grads
from torch.nn import Parameter
from torch_peers import CASES, assert_alike, make, train

import accumfused as af

# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_to_torch_and_back_and_training_goes_on(backend: str, case: str) -> None:
    ours, theirs, peer = make(af, case, backend=backend), make(torch.optim, case), make(torch.optim, case)
    for there, back in ((ours, theirs), (theirs, ours), (ours, theirs)):
        train(3, ours, theirs, peer)
        assert_alike(ours, peer)
        assert_alike(theirs, peer)
        back.load_state_dict(copy.deepcopy(there.state_dict()))
    train(3, ours, theirs, peer)
    assert_alike(ours, peer)
    assert_alike(theirs, peer)


@pytest.mark.parametrize("case", CASES)
def test_state_dicts_have_torchs_keys_shapes_and_dtypes(backend: str, case: str) -> None:
    def form(optimizer: torch.optim.Optimizer) -> Any:
        train(1, optimizer)
        checkpoint = optimizer.state_dict()
        states = {
            index: {
                name: (value.dtype, value.shape, None if name == "step" else value.device)  # torch's step: on the CPU
                for name, value in state.items()
                if value is not None and not (name == "step" and "SGD" in case)  # ours counts steps with momentum
            }
            for index, state in checkpoint["state"].items()
        }
        return checkpoint["param_groups"], {index: state for index, state in states.items() if state}

    assert form(make(af, case, backend=backend)) == form(make(torch.optim, case))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_read_with_weights_only_and_gives_the_same_bits(backend: str, case: str) -> None:
    ours, resumed = make(af, case, backend=backend), make(af, case, backend=backend)
    train(3, ours)
    file = io.BytesIO()
    torch.save({"optimizer": ours.state_dict(), "params": params_of(ours)}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    with torch.no_grad():
        for param, value in zip(params_of(resumed), checkpoint["params"], strict=True):
            param.copy_(value)
    resumed.load_state_dict(checkpoint["optimizer"])
    train(3, ours, resumed)
    assert differences(snapshot(ours), snapshot(resumed)) == []
    assert not torch.equal(params_of(ours)[0], checkpoint["params"][0])


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)])
def test_an_older_checkpoint_whose_step_is_a_number_is_read(backend: str, step: Any) -> None:
    ours, theirs = make(af, "Adam", backend=backend), make(torch.optim, "Adam")
    train(3, ours, theirs)
    older = copy.deepcopy(theirs.state_dict())
    for state in older["state"].values():
        state["step"] = copy.deepcopy(step)
    for group in older["param_groups"]:
        for key in (
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
            "decoupled_weight_decay",
            "amsgrad",
        ):
            del group[key]
    ours.load_state_dict(older)
    train(3, ours, theirs)
    assert_alike(ours, theirs)
    assert [float(state["step"]) for state in ours.state.values()] == [6.0, 6.0]


def test_a_state_of_another_dtype_is_converted(backend: str) -> None:
    ours, theirs = make(af, "AdamW", backend=backend), make(torch.optim, "AdamW")
    train(3, theirs)
    checkpoint = copy.deepcopy(theirs.state_dict())
    for state in checkpoint["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    for param, truth in zip(params_of(ours), params_of(theirs), strict=True):
        param.data.copy_(truth.data)
    ours.load_state_dict(checkpoint)
    train(2, ours, theirs)
    assert_alike(ours, theirs)


def test_loading_a_torch_checkpoint_keeps_the_settings(backend: str) -> None:
    ours, theirs = make(af, "AdamW", max_grad_norm=0.5, nonfinite="raise", backend=backend), make(torch.optim, "AdamW")
    train(1, theirs)
    ours.load_state_dict(theirs.state_dict())
    assert_settings_are_kept(ours)


# ---- copies --------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def assert_settings_are_kept(optimizer: torch.optim.Optimizer) -> None:
    set_grads(optimizer, factor=100.0)
    params_of(optimizer)[0].grad[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="nothing was updated"):  # nonfinite="raise"
        optimizer.step()
    peer = torch.optim.SGD([Parameter(param.detach().clone()) for param in params_of(optimizer)])
    set_grads(optimizer, peer, factor=100.0)
    norm = torch.nn.utils.clip_grad_norm_(params_of(peer), 0.5)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)  # a norm is taken: max_grad_norm


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_keeps_the_settings_and_goes_on_alike(backend: str, case: str, how: str) -> None:
    ours = make(af, case, max_grad_norm=0.5, nonfinite="raise", backend=backend)
    train(2, ours)
    twin = COPIES[how](ours)
    assert type(twin) is type(ours)
    if how != "copy":
        before = snapshot(ours)
        train(2, ours, twin)
        assert differences(snapshot(ours), snapshot(twin)) == []
        assert {"param 0", "param 1"} <= set(differences(before, snapshot(ours)))
        assert torch.equal(ours.grad_norm, twin.grad_norm)
    assert_settings_are_kept(twin)


def test_a_copy_of_a_model_with_its_optimizer_is_apart(backend: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = af.AdamW(model.parameters(), backend=backend)
    twin_model, twin = copy.deepcopy((model, optimizer))
    before = snapshot(optimizer)
    twin_model(torch.ones(3)).sum().backward()
    twin.step()
    assert params_of(twin)[0] is twin_model.weight
    assert not torch.equal(twin_model.weight, model.weight)
    assert differences(before, snapshot(optimizer)) == []
