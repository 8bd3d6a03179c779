"""A checkpoint of one format goes into every other: states to nearest, masters as far as the other has bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import assert_same, assert_same_bits
from models import MASTERS, Model, build, grads_of, skip_a_step, states_of, through_a_file, train, trained, whole
from table import STATES, WEIGHTS
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af

LAST, FIRST = torch.channels_last, torch.contiguous_format
TORCH = {"torch_fp32": torch.float32, "torch_bf16": torch.bfloat16}


def source_of(weights: str, states: str, backend: str) -> tuple[Model, Any, list[Tensor], dict[str, Tensor]]:
    """A trained model and optimizer, the weights in fp32, and the states in fp64."""
    if weights not in TORCH:
        model, optimizer = trained(weights, states, backend)
        return model, optimizer, whole(optimizer), states_of(optimizer)
    model = Model(TORCH[weights])
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(theirs, 3)
    found = ((index, *item) for index, entries in enumerate(theirs.state.values()) for item in entries.items())
    before = {f"{name} {index}": value.double() for index, name, value in found if name != "step"}
    return model, theirs, [param.detach().float() for param in model.parameters()], before


def kept_of(value: Tensor, half: Tensor, source: str, weights: str) -> Tensor:
    """What of a parameter's fp32 value and of its 16-bit half arrives in another format."""
    if source in ("split16", "split8") and weights in (*MASTERS, "fp32"):
        return value
    half = half.to(WEIGHTS[weights][0])
    if source in MASTERS and weights in MASTERS:
        return torch.where(value.to(half.dtype) == half, value, half.float())
    return half.float()


def assert_states_are_kept(after: dict[str, Tensor], before: dict[str, Tensor], states: str, source: str) -> None:
    for name, value in before.items():
        if states in ("fp32", source):
            assert torch.equal(after[name], value), name
        elif states == "bf16":
            torch.testing.assert_close(after[name], value, rtol=2.0**-8, atol=0)
        else:
            # A code has 4 bits of mantissa over its distance from 2^-7 (a second moment's 2^-15) of the block's scale,
            # which is not above the largest value; the smallest second moment is 2^-17 of it.
            second, largest = name.startswith("exp_avg_sq"), value.abs().max()
            bound = (value.abs() + largest * 2.0 ** (-15 if second else -7)) / 32 + second * largest * 2.0**-17
            assert ((after[name] - value).abs() <= bound).all(), name
            assert not torch.equal(after[name], value) or value.numel() == 1


@pytest.mark.pairwise(
    source=[*WEIGHTS, *TORCH], source_states=[*STATES], weights=[*WEIGHTS], states=[*STATES], states_first=[True, False]
)
def test_what_arrives_in_another_format(
    backend: str, source: str, source_states: str, weights: str, states: str, states_first: bool
) -> None:
    model, optimizer, values, before = source_of(source, source_states, backend)
    source_states = source[-4:] if source in TORCH else source_states
    halves = [param.detach().clone() for param in model.parameters()]
    steps = [entries["step"].clone() for entries in optimizer.state.values()]
    twin_model, twin = build(weights, states, backend, rounding_seed=3)
    saved = [(twin, copy.deepcopy(optimizer.state_dict())), (twin_model, copy.deepcopy(model.state_dict()))]
    for into, state_dict in saved if states_first else saved[::-1]:
        into.load_state_dict(state_dict)
    # What was not stepped yet is saved as it came.
    if source in WEIGHTS and WEIGHTS[source][0] == WEIGHTS[weights][0]:
        third_model, third = build(source, source_states, backend)
        third.load_state_dict(copy.deepcopy(twin.state_dict()))
        third_model.load_state_dict(copy.deepcopy(twin_model.state_dict()))
        for each in (optimizer, third):
            train(each, 2, seed=5)
        assert_same(optimizer, third)
    if weights not in (*MASTERS, "fp32"):  # until a step it has what came with the checkpoint
        skip_a_step(twin)
    for _ in range(2):
        for found, value, half in zip(whole(twin), values, halves, strict=True):
            rtol = 2.0**-16 if weights == "split8" else 0.0
            torch.testing.assert_close(found, kept_of(value, half, source, weights), rtol=rtol, atol=0)
        skip_a_step(twin)
    assert_states_are_kept(states_of(twin), before, states, source_states)
    assert all(map(torch.equal, steps, (entries["step"] for entries in twin.state.values())))
    for entries, known in zip(twin.state.values(), optimizer.state.values(), strict=True):
        assert int(entries.get("rounding_seed", 0)) in (0, int(known.get("rounding_seed", 3)))
    own = trained(weights, states, backend, steps=1)[1].state.values()
    assert [set(entries) for entries in twin.state.values()] == [set(entries) for entries in own]


def test_a_remainder_of_other_numbers_is_dropped_with_a_warning(backend: str) -> None:
    (_, optimizer), (model, twin) = trained("split8", "fp32", backend), build("fp32", "fp32", backend)
    before = whole(twin)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(UserWarning, match=r"'master_remainder' of a torch\.float32 parameter of shape \[.*dropped"):
        skip_a_step(twin)
    assert all(map(torch.equal, before, model.parameters()))
    for param, value in zip(model.parameters(), whole(optimizer), strict=True):
        param.detach().copy_(value)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    skip_a_step(twin)  # what has it already needs no warning


def test_remainders_that_an_optimizer_of_torch_has_cast_are_still_read(backend: str) -> None:
    model, optimizer = trained("split16", "fp32", backend)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = whole(optimizer)
    assert {entries["master_remainder"].dtype for entries in theirs.state.values()} == {torch.bfloat16}
    fused = af.fuse(theirs, backend=backend, nonfinite="skip")
    skip_a_step(fused)
    for found, value in zip(whole(fused), before, strict=True):
        torch.testing.assert_close(found, value, rtol=2.0**-16, atol=0)  # a remainder is at most half a bf16 ulp


def test_small_states_stay_in_fp32_unless_told_otherwise(backend: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (4095, 4096)]
    optimizer = af.SGD(params, lr=0.1, momentum=0.5, state_dtype="8bit", backend=backend)
    train(optimizer, 1)
    assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.float32
    assert optimizer.state[params[1]]["momentum_buffer_8bit"].dtype == torch.uint8


def coded(form: torch.memory_format, shape: tuple[int, ...], backend: str) -> tuple[torch.nn.Module, Any]:
    """With states in 8 bits, of blocks of memory in which numbers are alike or not."""
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.randn(shape).to(memory_format=form))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "state_dtype": "8bit", "state_dtype_min_numel": 1}
    optimizer = af.AdamW(model.parameters(), backend=backend, **options)
    grads_of(optimizer, 0)
    model.p.grad.mul_(torch.logspace(-3, 3, shape[1]).view(1, -1, 1, 1))
    optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (1, 128, 4, 4), (3, 5, 4, 4)])
@pytest.mark.parametrize("forms", [(LAST, FIRST), (FIRST, LAST)])
def test_codes_are_read_in_the_layout_in_which_they_were_made(
    backend: str, shape: tuple[int, ...], forms: tuple[Any, Any], tmp_path: Path
) -> None:
    (model, optimizer), (other_model, other) = (coded(form, shape, backend) for form in forms)
    before = states_of(optimizer)
    save({"optimizer": dcp.get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    twin_model, twin = copy.deepcopy((model, optimizer))
    twin.state[twin_model.p]["exp_avg_8bit"].zero_()
    state = {"optimizer": dcp.get_optimizer_state_dict(twin_model, twin)}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_optimizer_state_dict(twin_model, twin, state["optimizer"])
    assert_same_bits(twin.state[twin_model.p]["exp_avg_8bit"], optimizer.state[model.p]["exp_avg_8bit"])
    with pytest.raises(CheckpointException, match="Size mismatch"):  # it would copy element by element
        load({"optimizer": dcp.get_optimizer_state_dict(other_model, other)}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    skip_a_step(other)
    for name, value in states_of(other).items():  # encoded again, in other blocks: half a step of 4 bits, twice
        assert ((value - before[name]).abs() <= before[name].abs() / 16 + 0.01 * before[name].abs().max()).all()
        assert torch.corrcoef(torch.stack([value.flatten(), before[name].flatten()]))[0, 1] > 0.999


# ---- codes have names of their own -----------------------------------------------------------------------------------

IN_CODES = {
    "SGD": {"momentum": 0.9}, "AdamW": {}, "Adam": {}, "RAdam": {}, "Adagrad": {}, "Adadelta": {}, "Muon": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
}  # fmt: skip


def in_codes(name: str, backend: str = "auto") -> Any:
    params = [torch.nn.Parameter(torch.full((64, 4), 8.0)), torch.nn.Parameter(torch.ones(8, 16))]
    options: dict[str, Any] = {"lr": 0.1, "state_dtype": "8bit", "state_dtype_min_numel": 2, "backend": backend}
    optimizer = getattr(af, name)(params, **options, **IN_CODES[name])
    grads_of(optimizer, 0)
    optimizer.step()
    return optimizer


def as_older(entries: dict[str, Any]) -> dict[str, Any]:
    """A state as checkpoints and pickles had it: codes under the names of their states."""
    return {name.removesuffix("_8bit"): value for name, value in entries.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", IN_CODES)
def test_torchs_optimizers_refuse_codes_at_their_first_step_and_write_nothing(name: str, way: dict[str, bool]) -> None:
    optimizer = in_codes(name)
    params = [torch.nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    theirs = getattr(torch.optim, name)(params, lr=0.1, **IN_CODES[name])
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    if name != "Muon":
        if "fused" in way and name not in ("SGD", "AdamW", "Adam", "Adagrad"):
            pytest.skip("torch has no such kernel")
        theirs.param_groups[0].update({"foreach": None, "fused": None, **way})
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises((KeyError, AttributeError, TypeError, AssertionError)):
        theirs.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("route", ["checkpoint", "pickle"])
@pytest.mark.parametrize("name", IN_CODES)
def test_codes_under_the_names_of_older_versions_still_load(backend: str, name: str, route: str) -> None:
    optimizer, twin = in_codes(name, backend), in_codes(name, backend)
    if route == "pickle":
        carried = optimizer.__getstate__()
        carried["state"] = {param: as_older(entries) for param, entries in carried["state"].items()}
        twin = type(optimizer).__new__(type(optimizer))
        twin.__setstate__(copy.deepcopy(carried))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"] = {key: as_older(entries) for key, entries in saved["state"].items()}
        twin.load_state_dict(saved)
    loaded, known = twin.state_dict()["state"], optimizer.state_dict()["state"]
    assert [loaded[row].keys() for row in (0, 1)] == [known[row].keys() for row in (0, 1)]
    for each in (optimizer, twin):
        grads_of(each, 1)
        each.step()
    assert_same(optimizer, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["split8", "8bit", "window"])
def test_fuse_refuses_what_torch_has_cast_and_takes_the_checkpoint_after_it(
    backend: str, kind: str, dtype: torch.dtype
) -> None:
    masters = kind if kind.startswith("split") else "split16" if kind == "8bit" else None
    states = "8bit" if kind == "8bit" else torch.float32
    settings: dict[str, Any] = {"master_weights": masters, "state_dtype": states, "state_dtype_min_numel": 2}
    old = torch.nn.Linear(16, 8, dtype=torch.bfloat16)
    optimizer = af.AdamW(old.parameters(), lr=1e-3, backend=backend, **settings)
    for seed in range(2):
        grads_of(optimizer, seed)
        optimizer.step()
    if kind == "window":
        grads_of(optimizer, 2)
        optimizer.accumulate()
    saved = through_a_file(optimizer.state_dict())

    def made() -> tuple[Any, Any]:
        model = torch.nn.Linear(16, 8, dtype=dtype)
        model.load_state_dict(old.state_dict())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, theirs = made()
    theirs.load_state_dict(copy.deepcopy(saved))
    before = repr(theirs)
    with pytest.raises(ValueError, match=r"call fuse\(\) first and load the checkpoint then"):
        af.fuse(theirs, backend=backend, **settings)
    assert (type(theirs), repr(theirs)) == (torch.optim.AdamW, before)
    model, theirs = made()
    fused = af.fuse(theirs, backend=backend, **settings)
    fused.load_state_dict(copy.deepcopy(saved))
    if kind == "window":
        assert "window: open" in repr(fused)
        return
    grads_of(fused, 5)
    whole_weights = [value.clone() for value in fused.full_precision_state_dict(model).values()]
    for value, known in zip(whole_weights, optimizer.full_precision_state_dict(old).values(), strict=True):
        assert torch.equal(value, known)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes of new tensors that there are at a time during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return max(accumulate(inside.allocations(profiler)))


def stepped(count: int, weights: str, states: str, backend: str, *, steps: int) -> Any:
    """An optimizer of so many equal parameters, of a size that has 8-bit states, with gradients for the next step."""
    dtype, settings = WEIGHTS[weights]
    params = [torch.nn.Parameter(torch.ones(64, 64, dtype=dtype)) for _ in range(count)]
    optimizer = af.AdamW(params, lr=0.1, backend=backend, state_dtype=STATES[states], **settings)
    train(optimizer, steps)
    grads_of(optimizer, steps)
    return optimizer


def bytes_of_state(saved: dict[str, Any]) -> int:
    """Of the first parameter in a checkpoint."""
    return sum(value.nbytes for value in saved["state"][0].values() if isinstance(value, Tensor))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("fp32", "fp32"), ("fp32", "8bit")),
        (("fp32", "8bit"), ("fp32", "fp32")),
        (("split16", "fp32"), ("split8", "fp32")),
        (("split8", "bf16"), ("split16", "8bit")),
        (("bf16_stochastic", "fp32"), ("split16", "fp32")),
        (("split16", "8bit"), ("fp32", "fp32")),  # its parameters are written, too
        (("fp16_master", "fp32"), ("fp16_master", "bf16")),
    ],
    ids=str,
)
def test_a_checkpoint_is_converted_parameter_by_parameter(
    backend: str, source: tuple[str, str], target: tuple[str, str]
) -> None:
    """A checkpoint and a first step take the memory of the larger format's states, and of one parameter at work."""
    peaks, count = list[int](), 64
    for number in (1, count):
        saved = stepped(number, *source, backend, steps=1).state_dict()
        optimizer = stepped(number, *target, backend, steps=0)

        def resume(optimizer: Any = optimizer, saved: Any = saved) -> None:
            optimizer.load_state_dict(copy.deepcopy(saved))
            optimizer.step()

        peaks.append(peak_of(resume))
        old, new = bytes_of_state(saved), bytes_of_state(optimizer.state_dict())
        assert old != new
    assert peaks[1] <= peaks[0] + (count - 1) * max(old, new) + (old + new)
