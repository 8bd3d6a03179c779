"""An open window is part of a checkpoint: who resumes goes on bit for bit, torch's optimizers are not disturbed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import ADAMW_CASE, Case, every_case, random_grads, random_params, set_grads
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af

SHAPES = [(3, 5), (33,), (), (0,), (70_000,)]
WEIGHTS: dict[str, list[Any]] = {
    "sum": [None, None, None],
    "weights": [0.1, 3.0, 0.7],
    "a first weight of 1": [1, 1, 5],
    "tensors": [torch.tensor(0.3), torch.tensor(2.0), torch.tensor(0.7)],
    "an empty micro-batch first": [0, 3.0, 0.7],
}

every_weight = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=list(WEIGHTS))


def micro_batch(optimizer: Any, seed: int, weight: Any, *, missing: int | None = None, dtype: Any = None) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads: list[Tensor | None] = list(random_grads(params, seed, dtype or torch.float32))
    if missing is not None:
        grads[missing] = None
    set_grads(params, grads)
    optimizer.accumulate(weight)


def through_a_file(checkpoint: Any) -> Any:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(case: Case, optimizer: torch.optim.Optimizer, backend: str) -> Any:
    """A new optimizer over copies of the parameters, from the checkpoint's file."""
    old = [param for group in optimizer.param_groups for param in group["params"]]
    params = [param.detach().clone().requires_grad_() for param in old]
    for param, known in zip(params, old, strict=True):
        param.grad_dtype = known.grad_dtype
    fresh = case.make(params, backend, max_grad_norm=1.0)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    return fresh


def assert_go_on_alike(one: Any, other: Any, seed: int, weights: list[Any], **options: Any) -> None:
    for optimizer in (one, other):
        for index, weight in enumerate(weights):
            micro_batch(optimizer, seed + index, weight, **options)
        optimizer.step()
        micro_batch(optimizer, seed + 10, 2.0)
        optimizer.step()
    assert torch.equal(one.grad_norm, other.grad_norm)
    for (name, bits), again in zip(everything(one).items(), everything(other).values(), strict=True):
        assert_same_bits(again, bits, name)


def test_a_sum_that_was_saved_in_16_bits_goes_on_in_fp32(backend: str) -> None:
    optimizer = af.SGD(random_params([(33,)]), lr=0.1, backend=backend)
    micro_batch(optimizer, 0, None)
    saved = optimizer.state_dict()
    saved["state"][0]["grad_accumulator"] = half = saved["state"][0]["grad_accumulator"].bfloat16()
    (param,) = random_params([(33,)])
    other = af.SGD([param], lr=0.1, backend=backend)
    other.load_state_dict(saved)
    param.grad = added = torch.full_like(param, 2.0**-12)
    other.accumulate(last=True)
    assert_same_bits(param.grad, half.float() + added)


@every_case
@pytest.mark.parametrize("after", [1, 2])
def test_a_window_is_resumed_bit_for_bit(backend: str, case: Case, after: int) -> None:
    weights = WEIGHTS["weights"]
    optimizer = case.make(random_params(SHAPES), backend, max_grad_norm=1.0)
    micro_batch(optimizer, 0, 1.0)
    optimizer.step()
    for index in range(after):
        micro_batch(optimizer, index, weights[index])
    assert_go_on_alike(optimizer, resumed(case, optimizer, backend), 5, weights[after:])


@every_weight
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_it_does_not_matter_where_in_the_window_or_in_training(
    backend: str, weights: list[Any], stepped: bool, after: int
) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend, max_grad_norm=1.0)
    if stepped:
        micro_batch(optimizer, 0, 1.0)
        optimizer.step()
    for index in range(after):
        micro_batch(optimizer, index, weights[index], missing=1 if index == 0 else None)
    assert_go_on_alike(optimizer, resumed(ADAMW_CASE, optimizer, backend), 5, weights[after:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_window_of_16_bit_gradients_is_resumed_in_fp32(backend: str, dtype: torch.dtype) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend, max_grad_norm=1.0)
    for index in range(2):
        micro_batch(optimizer, index, 3.0, dtype=dtype)
    twin = resumed(ADAMW_CASE, optimizer, backend)
    for each in (optimizer, twin):
        micro_batch(each, 5, 0.5, dtype=dtype)
        each.step()
    assert_same_bits(twin.param_groups[0]["params"][0], optimizer.param_groups[0]["params"][0])


def test_another_backend_resumes_it_with_the_same_bits(backend: str) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), "torch", max_grad_norm=1.0)
    for index in range(2):
        micro_batch(optimizer, index, 0.1 + index)
    assert_go_on_alike(optimizer, resumed(ADAMW_CASE, optimizer, backend), 5, [0.7])


def test_the_layout_of_the_parameter_in_memory_may_be_another(backend: str) -> None:
    values, grads = torch.randn(6, 4, 2, 2), [torch.randn(6, 4, 2, 2) for _ in range(2)]
    results = []
    for there, back in ((torch.contiguous_format,) * 2, (torch.contiguous_format, torch.channels_last)):
        first, second = (values.to(memory_format=form, copy=True).requires_grad_() for form in (there, back))
        saved, optimizer = (ADAMW_CASE.make([param], backend, max_grad_norm=1.0) for param in (first, second))
        first.grad = grads[0].clone()
        saved.accumulate(0.3)
        optimizer.load_state_dict(saved.state_dict())
        second.grad = grads[1].clone()
        optimizer.accumulate(0.9)
        optimizer.step()
        results.append(second.detach())
    # Other strides, so another order of the norm's sum: one rounding of the coefficient.
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("how", COPIES)
@every_weight
def test_a_copy_has_a_window_of_its_own(backend: str, how: str, weights: list[Any]) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend, max_grad_norm=1.0)
    for index in range(2):
        micro_batch(optimizer, index, weights[index])
    before = [a if a is None else a.clone() for a in optimizer._runtime.window.accumulators]
    twin = COPIES[how](optimizer)
    if how == "copy":  # the same parameters: a step of one is one of the other
        micro_batch(twin, 5, weights[2])
        twin.step()
        for kept, accumulator in zip(before, optimizer._runtime.window.accumulators, strict=True):
            assert (kept is None) == (accumulator is None)
            assert kept is None or torch.equal(kept, accumulator)
    else:
        assert_go_on_alike(optimizer, twin, 5, weights[2:])


# ---- torch -----------------------------------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.3}),
    "SGD with momentum": ("SGD", {"lr": 0.3, "momentum": 0.6, "dampening": 0.4}),
    "Adam": ("Adam", {"lr": 0.1, "betas": (0.5, 0.7), "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.1, "betas": (0.5, 0.7)}),
}


@pytest.mark.parametrize("case", PEERS)
@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_a_torch_optimizer_that_loads_it_is_not_disturbed(
    backend: str, case: str, stepped: int, implementation: dict[str, bool]
) -> None:
    name, options = PEERS[case]
    ours = getattr(af, name)(random_params(SHAPES), backend=backend, **options)
    results = []
    for window in (False, True):
        if not window:
            for index in range(stepped):
                micro_batch(ours, index, 1.0)
                ours.step()
        else:
            micro_batch(ours, 7, 3.0)
        params = [p.detach().clone().requires_grad_() for p in ours.param_groups[0]["params"]]
        theirs = getattr(torch.optim, name)(params, **options)
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        theirs.param_groups[0].update(implementation)
        for step in range(2):
            set_grads(params, random_grads(params, step))
            theirs.step()
        results.append(params)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("case", PEERS)
def test_a_window_survives_the_way_through_torch(backend: str, case: str) -> None:
    name, options = PEERS[case]
    ours = getattr(af, name)(random_params(SHAPES), backend=backend, max_grad_norm=1.0, **options)
    for index, weight in enumerate((3.0, 4096.0)):  # whole numbers: torch casts every state to fp32
        micro_batch(ours, index, weight)
    params = [p.detach().clone().requires_grad_() for p in ours.param_groups[0]["params"]]
    theirs = getattr(torch.optim, name)(params, **options)
    theirs.load_state_dict(ours.state_dict())
    twin = getattr(af, name)(params, backend=backend, max_grad_norm=1.0, **options)
    twin.load_state_dict(through_a_file(theirs.state_dict()))
    assert_go_on_alike(ours, twin, 5, [17.0])


def test_distributed_checkpoint_keeps_it(backend: str) -> None:
    def build() -> tuple[torch.nn.Module, af.AdamW]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return model, af.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.1, backend=backend)

    (model, optimizer), (twin_model, twin) = build(), build()
    micro_batch(optimizer, 0, 1.0)
    optimizer.step()
    for index, weight in enumerate((0.1, 0.9)):
        micro_batch(optimizer, index, weight)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    assert "grad_accumulator" in saved["state"]["0.weight"]
    twin_model.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(twin_model, twin, saved)
    assert_go_on_alike(optimizer, twin, 5, [0.5])


# ---- what is around it ----------------------------------------------------------------------------------------------


def test_saving_changes_nothing_and_the_hooks_see_the_window(backend: str) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend)
    twin = ADAMW_CASE.make(random_params(SHAPES), backend)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: seen.append(sorted(saved["state"][0])))
    for index, weight in enumerate((0.1, 0.9)):
        for each in (optimizer, twin):
            micro_batch(each, index, weight)
        optimizer.state_dict()
        assert all("grad_accumulator" not in entries for entries in optimizer.state.values())
    assert seen[:2] == ["pre", ["exp_avg", "exp_avg_sq", "grad_accumulator", "grad_accumulator_weights", "step"]]
    for each in (optimizer, twin):
        each.step()
    assert all(map(torch.equal, everything(optimizer).values(), everything(twin).values()))


@pytest.mark.parametrize("cls", [af.SGD, af.AdamW])
def test_distributed_checkpoint_saves_a_window_before_the_first_step(backend: str, cls: Any) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer, twin = (cls(model.parameters(), lr=0.25, backend=backend) for _ in range(2))
    for index, weight in enumerate((0.1, 0.9)):
        micro_batch(optimizer, index, weight)
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    dcp.set_optimizer_state_dict(model, twin, saved)
    assert [each.param_groups[0]["lr"] for each in (optimizer, twin)] == [0.25, 0.25]
    for ours, theirs in zip(optimizer._runtime.window.accumulators, twin._runtime.window.accumulators, strict=True):
        assert torch.equal(ours, theirs)
    assert all(param.grad is None for param in model.parameters())


def test_a_hook_before_saving_may_write_to_the_state(backend: str) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend)
    param = optimizer.param_groups[0]["params"][0]
    optimizer.register_state_dict_pre_hook(lambda opt: opt.state[param].update(note=torch.ones(1)))
    micro_batch(optimizer, 0, 1.0)
    assert "note" in optimizer.state_dict()["state"][0]
    assert "note" in optimizer.state[param]


def test_loading_releases_a_closed_window(backend: str) -> None:
    param = torch.zeros(4).requires_grad_()
    param.grad_dtype = torch.bfloat16
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    other = af.SGD([torch.zeros(4).requires_grad_()], lr=1.0, backend=backend)
    other.param_groups[0]["params"][0].grad = torch.ones(4)
    other.accumulate()
    param.grad = torch.full((4,), 100.0, dtype=torch.bfloat16)
    optimizer.accumulate(last=True)
    optimizer.load_state_dict(other.state_dict())
    assert param.grad is None
    assert param.grad_dtype is torch.bfloat16
    optimizer.step()
    assert param.tolist() == [-1.0] * 4


@pytest.mark.parametrize("phase", ["idle", "closed"])
def test_there_is_no_window_to_save_where_p_grad_has_the_gradients(backend: str, phase: str) -> None:
    optimizer = ADAMW_CASE.make(random_params(SHAPES), backend)
    set_grads(optimizer.param_groups[0]["params"], random_grads(optimizer.param_groups[0]["params"], 0))
    if phase == "closed":
        optimizer.accumulate(last=True)
    assert optimizer.state_dict()["state"] == {}


def test_a_pre_hook_may_take_the_window_out_of_what_is_loaded(backend: str) -> None:
    optimizer, other = (ADAMW_CASE.make(random_params(SHAPES), backend) for _ in range(2))
    micro_batch(optimizer, 0, 1.0)

    def without(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": {}}

    other.register_load_state_dict_pre_hook(without)
    other.load_state_dict(optimizer.state_dict())
    other.step()  # there is nothing
    assert all(map(torch.equal, other.param_groups[0]["params"], random_params(SHAPES)))
