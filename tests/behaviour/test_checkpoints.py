"""A resumed run has the same bits: every optimizer and format, in a window, by every route; torch.optim's runs too."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from compare import (
    assert_close,
    assert_same,
    assert_same_bits,
    everything,
    params_of,
    refused,
    snapshot,
    writes_nothing,
)
from models import ROUTES, Model, Pair, build, grads_of, through_a_file, train, trained
from table import OF_TORCH, STATES, WEIGHTS, Case, Own, kept, one_of_each
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS: dict[str, list[Any]] = {  # the weights of a window's micro-batches
    "sum": [None, None, None],
    "weights": [0.1, 3.0, 0.7],
    "a first weight of 1": [1, 1, 5],
    "tensors": [torch.tensor(0.3), torch.tensor(2.0), torch.tensor(0.7)],
    "a bad one": [torch.tensor(0.3), torch.tensor(torch.nan), torch.tensor(0.7)],  # by which the step is skipped
    "an empty micro-batch first": [0, 3.0, 0.7],
    "zeros that only the device knows": [torch.tensor(0.0)] * 3,  # skipped too, where numbers would be refused
}


def micro_batches(optimizer: Any, weights: list[Any], seed: int = 0, grads: torch.dtype | None = None) -> None:
    for index, weight in enumerate(weights, seed):
        grads_of(optimizer, 50 + index, grads)
        if index == 0:
            params_of(optimizer)[1].grad = None
        optimizer.accumulate(weight)


EVERY = one_of_each(lambda case: case.states)
# Steps of the saved optimizer, steps of the loading one, and its rounding seed where the saved one has 17: saved states
# bring their seed, and an optimizer makes new ones with its own. Not (0, 1): a checkpoint without masters leaves those
# of the loading optimizer as they are.
STEPS = {"into a fresh one": (2, 0, 3), "into a trained one": (2, 1, 3), "before the first step": (0, 0, 17)}


def pair(case: Case, weights: str, states: str, backend: str, steps: int, factor: float, seed: int = 17) -> Pair:
    """A model and its optimizer, after these steps and a write from outside."""
    options = {"cls": case.of.ours, **case.options, "rounding_seed": seed}
    model, optimizer = trained(weights, kept(states, case), backend, steps, **options)
    with torch.no_grad():
        model.matrix.mul_(factor)  # what the matrix's master holds beyond this is not to be saved
    return model, optimizer


def assert_goes_on(optimizer: Any, twin: Any, weights: list[Any], seed: int, grads: torch.dtype | None = None) -> None:
    """The rest of a window, its step and one more have the same bits, and move the weights."""
    before = params_of(optimizer)[0].detach().clone()
    assert re.findall("window: .*", repr(twin)) == re.findall("window: .*", repr(optimizer))
    for each in (optimizer, twin):
        micro_batches(each, weights, seed, grads)
        each.step()
    assert_same_bits(twin.grad_norm, optimizer.grad_norm)
    for each in (optimizer, twin):
        train(each, 1, seed=9)
    assert_same(optimizer, twin)
    assert not torch.equal(before, params_of(optimizer)[0])


@pytest.mark.in_turn(case=EVERY)
@pytest.mark.pairwise(
    weights=[*WEIGHTS], states=[*STATES], window=[*WINDOWS], after=[0, 1, 2, 3], grads=[None, *DTYPES],
    steps=[*STEPS], loads_on=["", "reference"], route=["weights first", "states first"],
)  # fmt: skip
def test_a_run_resumed_from_a_file_has_the_same_bits(
    backend: str, case: Case, weights: str, states: str, window: str, after: int, grads: torch.dtype | None,
    steps: str, loads_on: str, route: str,
) -> None:  # fmt: skip
    (saved_after, loaded_after, seed), micro = STEPS[steps], WINDOWS[window]
    old = pair(case, weights, states, backend, saved_after, 0.5)
    new = pair(case, weights, states, loads_on or backend, loaded_after, 3, seed)
    micro_batches(old[1], micro[:after], grads=grads)
    _, twin = ROUTES[route](old, new)
    assert_goes_on(old[1], twin, micro[after:], after, grads)


@pytest.mark.in_turn(case=EVERY)
@pytest.mark.pairwise(
    window=[*WINDOWS], weights=[*WEIGHTS], after=[0, 1, 2, 3], states=[*STATES], grads=[None, *DTYPES],
    steps=[*STEPS],
)  # fmt: skip
def test_a_run_resumed_by_names_has_the_same_bits(
    backend: str, case: Case, weights: str, states: str, window: str, after: int, grads: torch.dtype | None,
    steps: str,
) -> None:  # fmt: skip
    """By torch.distributed.checkpoint, which never learns of the backend."""
    (saved_after, loaded_after, seed), micro = STEPS[steps], WINDOWS[window]
    old = pair(case, weights, states, backend, saved_after, 0.5)
    new = pair(case, weights, states, backend, loaded_after, 3, seed)
    micro_batches(old[1], micro[:after], grads=grads)
    _, twin = ROUTES["names"](old, new)
    assert_goes_on(old[1], twin, micro[after:], after, grads)


@pytest.mark.in_turn(case=EVERY)
@pytest.mark.pairwise(weights=[*WEIGHTS], states=[*STATES], steps=[*STEPS])
def test_a_run_resumed_by_flat_names_has_the_same_bits(
    backend: str, case: Case, weights: str, states: str, steps: str
) -> None:
    """Between windows: torch loads those entries alone that the optimizer has already, and it has no window."""
    saved_after, loaded_after, seed = STEPS[steps]
    old = pair(case, weights, states, backend, saved_after, 0.5)
    new = pair(case, weights, states, backend, loaded_after, 3, seed)
    _, twin = ROUTES["flat names"](old, new)
    assert_goes_on(old[1], twin, WINDOWS["weights"], 0)


@pytest.mark.in_turn(case=EVERY)
@pytest.mark.pairwise(
    after=[0, 1, 2, 3], states=[*STATES], grads=[None, *DTYPES], weights=[*WEIGHTS], window=[*WINDOWS], steps=[2, 0],
    route=["deepcopy", "pickle"],
)  # fmt: skip
def test_a_copy_of_a_run_goes_on_with_the_same_bits(
    backend: str, case: Case, weights: str, states: str, window: str, after: int, grads: torch.dtype | None,
    steps: int, route: str,
) -> None:  # fmt: skip
    """With all settings, which a checkpoint lacks. No other optimizer loads: one of other steps, seed or backend."""
    old, micro = pair(case, weights, states, backend, steps, 0.5), WINDOWS[window]
    micro_batches(old[1], micro[:after], grads=grads)
    _, twin = ROUTES[route](old, old)
    assert repr(twin) == repr(old[1])
    assert_goes_on(old[1], twin, micro[after:], after, grads)


def test_a_window_of_empty_micro_batches_alone_is_in_the_checkpoint(backend: str) -> None:
    (model, optimizer), (_, twin) = (build("fp32", "fp32", backend) for _ in range(2))
    micro_batches(optimizer, [0])
    dcp.get_optimizer_state_dict(model, optimizer)  # before the first step
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with refused(twin, ValueError, "the weights of this window are all zero"):
        twin.step()
    grads_of(twin, 0)
    with refused(twin, ValueError, "weights for some micro-batches of a window only"):
        twin.accumulate()


def test_a_window_before_the_first_step_brings_8_bit_states_of_a_parameter_with_holes(backend: str) -> None:
    optimizer, twin = (
        af.AdamW([torch.ones(64, 256)[:, ::2].requires_grad_()], backend=backend, state_dtype="8bit") for _ in range(2)
    )
    micro_batches(optimizer, [1.0], seed=1)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, twin):
        each.step()
    assert_same(optimizer, twin)
    assert bool((params_of(optimizer)[0] != 1).all())


def test_a_shallow_copy_has_the_settings_and_a_window_of_its_own(backend: str) -> None:
    _, optimizer = trained("split16", "bf16", backend, nonfinite="raise")
    micro_batches(optimizer, [0.1, 3.0])
    twin = copy.copy(optimizer)
    assert repr(twin) == repr(optimizer)  # which tells every setting that was chosen
    sums = {name: value for name, value in snapshot(optimizer).items() if name[:5] in ("accum", "weigh")}
    micro_batches(twin, [0.7], seed=2)
    twin.step()
    assert sums.items() <= snapshot(optimizer).items()


def stock(case: Case, model: torch.nn.Module) -> Any:
    return case.of.torch_class(model.parameters(), **case.options)  # type: ignore[misc]


# (With dampening torch's SGD takes any buffer for one that has seen a gradient.)
UNDAMPED = [case for case in OF_TORCH if not case.options.get("dampening")]


@pytest.mark.parametrize("case", one_of_each(lambda case: case.of.ours, UNDAMPED), ids=lambda case: case.name)
def test_torch_goes_on_after_a_skipped_first_step(backend: str, case: Case) -> None:
    model = Model(torch.float32)
    ours = case.make(model.parameters(), backend, nonfinite="skip")
    theirs, peer = (stock(case, Model(torch.float32)) for _ in "ab")
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    ours.step()
    assert ours.step_was_skipped
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for each in (theirs, peer):
        train(each, 2)
    assert all(map(torch.equal, params_of(theirs), params_of(peer)))


@pytest.mark.pairwise(
    case=one_of_each(lambda case: (case.of.ours, case.rule), OF_TORCH), stepped=[2, 0],
    implementation=[{"foreach": True}, {"fused": True}],
)  # fmt: skip
def test_training_goes_on_in_torchs_optimizer_and_comes_back_with_a_window(
    backend: str, case: Case, stepped: int, implementation: dict[str, bool]
) -> None:
    model = Model(torch.float32)
    ours, theirs, peer = case.make(model.parameters(), backend), *(stock(case, Model(torch.float32)) for _ in "ab")
    for there, back, seed in ((theirs, ours, 0), (ours, theirs, 2), (theirs, ours, 4)):
        for each in (ours, theirs, peer):
            train(each, stepped, seed)
        for each in (ours, theirs):
            found = everything(each)
            for name, value in everything(peer).items():
                if stepped or name.startswith("param"):  # torch's Adagrad has states before it steps
                    assert_close(found[name], value, "torch.optim", name)
        back.load_state_dict(copy.deepcopy(there.state_dict()))
    # A window does not disturb torch's optimizer, and comes through it.
    plain, windowed = (stock(case, copy.deepcopy(model)) for _ in range(2))
    plain.load_state_dict(through_a_file(ours.state_dict()))
    micro_batches(ours, [3.0, 4096.0], seed=1)  # whole numbers: torch casts every state to fp32
    windowed.load_state_dict(through_a_file(ours.state_dict()))
    twin = case.make(copy.deepcopy(model).parameters(), backend)
    twin.load_state_dict(through_a_file(windowed.state_dict()))
    for each in (plain, windowed):
        each.param_groups[0].update(implementation)
        train(each, 2, seed=7)
    assert all(map(torch.equal, params_of(plain), params_of(windowed)))
    before = model.matrix.detach().clone()
    for each in (ours, twin):
        micro_batches(each, [17.0], seed=3)
        each.step()
    assert_same(ours, twin)
    assert not torch.equal(before, model.matrix)


@pytest.mark.parametrize("weights", ["split16", "split8"])
def test_a_master_that_torch_has_cast_is_derived_again_with_a_warning(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    theirs = torch.optim.AdamW(Model(torch.bfloat16).parameters(), lr=0.1)
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    twin_model, twin = build(weights, "fp32", backend, rounding_seed=3)
    twin_model.load_state_dict(model.state_dict())
    text = r"'master_remainder' of parameter \d is torch.bfloat16, so its bits are lost"
    with pytest.warns(UserWarning, match=text) as seen:
        twin.load_state_dict(through_a_file(theirs.state_dict()))
    assert [warning.filename for warning in seen] == [__file__] * 4
    for known, value in twin.full_precision_state_dict(twin_model).items():
        assert torch.equal(value, model.state_dict()[known].to(value.dtype)), known
    train(twin, 1)
    assert {int(entries.get("rounding_seed", 3)) for entries in twin.state.values()} == {3}  # 17 was cast, too


def test_saving_changes_nothing_and_hooks_see_the_open_window_in_order(backend: str) -> None:
    _, optimizer = build("fp32", "fp32", backend)
    calls, first = list[Any](), params_of(optimizer)[0]
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "calls": [*calls]})
    optimizer.register_state_dict_post_hook(lambda opt, saved: calls.append(sorted(saved["state"][0])), prepend=True)
    optimizer.register_state_dict_pre_hook(lambda opt: opt.state[first].update(note=torch.ones(1)))
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append([*opt.state[first]]), prepend=True)
    micro_batches(optimizer, [0.1, 0.9])
    window = ["exp_avg", "exp_avg_sq", "grad_accumulator", "grad_accumulator_weights", "note", "step"]
    assert optimizer.state_dict()["calls"] == [[], window]
    with writes_nothing(optimizer):
        optimizer.state_dict()
    assert [sorted(entries) for entries in optimizer.state.values()] == [["note"]]
    grads_of(optimizer, 0)
    optimizer.accumulate(0.5, last=True)  # p.grad is the window now, and is not saved
    assert optimizer.state_dict()["calls"] == [[], window, ["note"], window, ["note"], ["note"]]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_may_leave_the_open_window_out_and_the_window_goes_on(backend: str, steps: int) -> None:
    """From such a checkpoint a run that repeats the whole window gets the same bits."""
    _, optimizer = trained("split16", "bf16", backend, steps)
    twin, keys = copy.deepcopy(optimizer), list[set[str]]()
    optimizer.register_state_dict_post_hook(lambda opt, saved: keys.append(set().union(*saved["state"].values())))
    micro_batches(optimizer, [0.1, 3.0])
    with writes_nothing(optimizer):
        saved = through_a_file(optimizer.state_dict(window=False))
        optimizer.state_dict()
    window = {"grad_accumulator", "grad_accumulator_weights"}
    assert [window & names for names in keys] == [set(), window]
    twin.load_state_dict(saved)
    micro_batches(optimizer, [0.7], seed=2)
    micro_batches(twin, [0.1, 3.0, 0.7])
    for each in (optimizer, twin):
        each.step()
    assert_same(optimizer, twin)


def test_loading_releases_a_closed_window(backend: str) -> None:
    (model, optimizer), (_, other) = (build("fp32", "fp32", backend) for _ in range(2))
    before = model.matrix.detach().clone()
    micro_batches(other, [2.0])
    grads_of(optimizer, 0, torch.bfloat16)
    optimizer.accumulate(last=True)
    optimizer.load_state_dict(other.state_dict())
    assert [(param.grad, param.grad_dtype) for param in params_of(optimizer)] == [(None, torch.bfloat16)] * 4
    optimizer.step()
    other.step()
    assert_same(other, optimizer)
    assert not torch.equal(before, model.matrix)


def test_load_hooks_run_in_order_and_may_edit_the_checkpoint_and_unknown_entries_stay(backend: str) -> None:
    (_, optimizer), (_, twin) = trained("fp32", "fp32", backend), build("fp32", "fp32", backend)
    (first, second, *_), calls = params_of(twin), list[Any]()
    micro_batches(optimizer, [1.0])
    edited = {0: {"ema": torch.ones(3), **optimizer.state[params_of(optimizer)[0]]}, "note": "of the whole"}
    twin.register_load_state_dict_pre_hook(lambda opt, saved: calls.append([*saved["state"]]))
    twin.register_load_state_dict_pre_hook(lambda opt, saved: {**saved, "state": edited}, prepend=True)
    twin.register_load_state_dict_post_hook(lambda opt: calls.append("last"))
    twin.register_load_state_dict_post_hook(lambda opt: calls.append(sorted(opt.state[first])), prepend=True)
    twin.load_state_dict(optimizer.state_dict())
    assert calls == [[0, "note"], ["ema", "exp_avg", "exp_avg_sq", "step"], "last"]
    assert (twin.state["note"], twin.state[first]["ema"].tolist()) == ("of the whole", [1.0] * 3)
    assert second not in twin.state
    micro_batches(twin, [None])  # a window with weights would refuse it


def test_an_optimizer_without_kernels_loads_as_its_torch_class_does(backend: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    saved, theirs, ours, twin = (Own(Model(d).parameters(), lr=0.1, momentum=0.5) for d in dtypes)
    train(saved, 2)
    for each in (theirs, af.fuse(ours, backend=backend), af.fuse(twin, backend=backend)):
        each.load_state_dict(copy.deepcopy(saved.state_dict()))
    for each in (theirs, ours):
        train(each, 2, seed=5)
    assert_same(theirs, ours)
    ours = copy.deepcopy(twin)
    micro_batches(ours, [2.0])
    twin.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch shares what it loads
    for each in (ours, twin):
        micro_batches(each, [1.0], seed=1)
        each.step()
    assert_same(ours, twin)
