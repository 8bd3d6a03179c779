"""After `release_memory()` an optimizer has its states and nothing else, and goes on with the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_same_bits, everything, refused
from harness import tensors_alive
from places import INSTRUCTION_SETS, Place
from table import random_grads
from torch import Tensor, nn

import accumfused as af
from accumfused.backends.several import SeveralDevices
from accumfused.backends.torch_kernels import TorchBackend

PLACES = [*INSTRUCTION_SETS[:1], "emulated", "two devices", "interpreted", "reference", "torch"]
every_place = pytest.mark.parametrize("place", PLACES, indirect=True)
SHAPES = ((32, 16), (16, 32), (7, 9), (32, 16), (8, 4))  # more than the three numbers of a norm and its coefficient
NUMBERS = {(), (1,), (2,), (3,)}  # shapes of what can be read of steps, and of step counts


@dataclass(frozen=True)
class Kind:
    """A kind of optimizer."""

    options: dict[str, Any] = field(default_factory=dict)
    cls: Callable[..., Any] = af.AdamW
    dtype: torch.dtype = torch.float32
    remembers: tuple[tuple[int, ...], ...] = ()  # shapes of more numbers that can be read, or have a history
    is_common: bool = True  # there are CUDA kernels


EVERY_ROW = (len(SHAPES),)
KINDS = {
    "fp32": Kind(),
    "split16, 8 bits": Kind({"state_dtype": "8bit", "state_dtype_min_numel": 0}, dtype=torch.bfloat16),
    "metrics": Kind({"metrics": True}, remembers=((3, 1), (3, len(SHAPES)))),
    "noise scale": Kind({"noise_scale": True}, remembers=((4,),)),
    "clip per tensor": Kind({"clip": af.clip.PerTensor(0.5)}, remembers=(EVERY_ROW,)),
    "clip by a history": Kind({"clip": af.clip.ZScore(0.1, 0.5, 2)}, remembers=((2, 3),)),
    "drop": Kind({"nonfinite": "drop"}, dtype=torch.bfloat16),
    "Schedule-Free": Kind(cls=af.AdamWScheduleFree, dtype=torch.bfloat16, is_common=False),
    "Muon": Kind(cls=af.Muon, is_common=False),
}  # fmt: skip


def made(place: Place, kind: Kind, *, strided: bool = False) -> tuple[list[nn.Parameter], Any]:
    """An optimizer; with `strided` the last parameter's memory is not dense."""
    values = [
        torch.linspace(-1.0, 1.0, rows * columns, dtype=kind.dtype).view(rows, columns) for rows, columns in SHAPES
    ]
    if strided:
        values[-1] = values[-1].repeat_interleave(2, dim=1)[:, ::2]
    params = [nn.Parameter(value.to(place.device)) for value in values]
    optimizer = kind.cls(params, lr=0.1, **kind.options)
    inside.use_backend(optimizer, place.backend)
    return params, optimizer


def give(params: list[nn.Parameter], seed: int) -> None:
    for param, grad in zip(params, random_grads(params, seed), strict=True):
        param.grad = grad.to(param)


def plain_step(params: list[nn.Parameter], optimizer: Any, seed: int) -> None:
    give(params, seed)
    optimizer.step()
    optimizer.zero_grad()


def window(params: list[nn.Parameter], optimizer: Any, seed: int, *, last: bool = False) -> None:
    for weight in (3, 5):
        give(params, 10 * seed + weight)
        optimizer.accumulate(weight, last=last and weight == 5)
    optimizer.step()


def closed_window(params: list[nn.Parameter], optimizer: Any, seed: int) -> None:
    window(params, optimizer, seed, last=True)


# What takes seconds in Triton's interpreter: the other kinds own there what they own everywhere.
INTERPRETED = ("split16, 8 bits", "metrics", "clip by a history")
CASES = [
    pytest.param(
        place, kind, loop, marks=pytest.mark.full if place == "interpreted" and kind not in INTERPRETED else []
    )
    for place in PLACES
    for kind in KINDS
    for loop in (plain_step, window, closed_window)
    if loop is window or (kind in ("fp32", "split16, 8 bits") and place != "interpreted")
    if KINDS[kind].is_common or place not in ("emulated", "two devices")
]
every_case = pytest.mark.parametrize(("place", "kind", "loop"), CASES, indirect=["place"])


def storages() -> dict[int, torch.Tensor]:
    """Of all tensors that Python knows, one for each storage."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().nbytes()}


@every_case
def test_no_tensor_is_left_but_states_and_a_few_numbers(place: Place, kind: str, loop: Callable[..., None]) -> None:
    before = storages()
    params, optimizer = made(place, KINDS[kind], strided=kind == "fp32")
    for seed in (1, 2):
        loop(params, optimizer, seed)
    optimizer.release_memory()
    states = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    known = {*before, *(tensor.untyped_storage().data_ptr() for tensor in [*params, *states])}
    left = [tuple(tensor.shape) for address, tensor in storages().items() if address not in known]
    assert {*left} <= NUMBERS | {*KINDS[kind].remembers}


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS[:1], "torch"], indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "split16, 8 bits", "drop"])
def test_the_allocator_has_given_out_states_and_a_few_numbers(place: Place, kind: str) -> None:
    params, optimizer = made(place, KINDS[kind])
    with torch.profiler.profile(profile_memory=True) as profiler:
        window(params, optimizer, 1)
        kept = af.memory_report(optimizer).total.kept
        optimizer.release_memory()
        gc.collect()
    states = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    net = sum(inside.allocations(profiler)) - sum(state.nbytes for state in states)
    assert 0 <= net <= 64
    assert kept == (0 if kind == "fp32" else 4 * sum(param.numel() for param in params))


@every_case
def test_the_steps_that_follow_have_the_same_bits(place: Place, kind: str, loop: Callable[..., None]) -> None:
    """Also where states were elsewhere meanwhile, and the parameters those of an evaluation."""
    (params, optimizer), (twins, twin) = (made(place, KINDS[kind], strided=True) for _ in range(2))
    for seed in (1, 2, 3):
        loop(params, optimizer, seed)
        loop(twins, twin, seed)
        if hasattr(optimizer, "eval"):
            for each in (optimizer, twin):
                each.eval()
        optimizer.release_memory()
        for entries in optimizer.state.values():
            entries.update({name: value.clone() for name, value in entries.items()})
        optimizer.release_memory()  # once more, with nothing to free
        if hasattr(optimizer, "eval"):
            for each in (optimizer, twin):
                each.train()
    assert_all_same_bits(everything(optimizer), everything(twin))
    assert_same_bits(optimizer.grad_norm, twin.grad_norm)
    assert torch.equal(optimizer.skipped_steps, twin.skipped_steps)
    memories, expected = inside.memories(optimizer), inside.memories(twin)
    assert all(memories[name] is None or torch.equal(memories[name], expected[name]) for name in expected)
    if kind == "metrics":
        assert optimizer.metrics().as_dict() == twin.metrics().as_dict()


# ---- refusals ------------------------------------------------------------------------------------------------------


@every_place
def test_it_is_refused_within_a_window_which_goes_on(place: Place) -> None:
    (params, optimizer), (twins, twin) = (made(place, KINDS["split16, 8 bits"]) for _ in range(2))
    for each, own in ((params, optimizer), (twins, twin)):
        give(each, 1)
        own.accumulate(3)
    with refused(optimizer, RuntimeError, r"a window is open; call optimizer.step\(\) or zero_grad\(\) before release"):
        optimizer.release_memory()
    for each, own in ((params, optimizer), (twins, twin)):
        give(each, 2)
        own.accumulate(5, last=True)
    with refused(optimizer, RuntimeError, r"p.grad is a closed window's sum; call step\(\) or zero_grad\(\)"):
        optimizer.release_memory()
    optimizer.step()
    twin.step()
    assert_all_same_bits(everything(optimizer), everything(twin))


@every_place
def test_a_closed_window_ends_whose_gradients_the_model_has_reset(place: Place) -> None:
    params, optimizer = made(place, KINDS["split16, 8 bits"])
    give(params, 1)
    optimizer.accumulate(3, last=True)
    dtypes = [param.grad_dtype for param in params]
    for param in params:
        param.grad = None
    optimizer.release_memory()
    assert af.memory_report(optimizer).total.parts["accumulators"] == 0
    assert (dtypes[0], params[0].grad_dtype) == (None, torch.bfloat16)
    plain_step(params, optimizer, 2)


@every_place
def test_a_broken_window_is_refused(place: Place) -> None:
    members = [made(place, KINDS["fp32"]) for _ in range(2)]
    group = af.ClipGroup([optimizer for _, optimizer in members], max_grad_norm=0.5)
    for params, optimizer in members:
        give(params, 1)
        optimizer.accumulate()
    with inside.fails(members[0][1], "step", after=1), pytest.raises(RuntimeError, match="out of memory"):
        group.step()
    with refused(members[1][1], RuntimeError, r"ended between two .* call optimizer\.zero_grad\(\)"):
        members[1][1].release_memory()
    members[1][1].zero_grad()
    members[1][1].release_memory()


@every_place
def test_handles_that_work_during_backward_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumfused.loop.linears.SMALLEST", 1)
    models = [nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).to(place.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [af.AdamW(model.parameters(), lr=0.1) for model in models]
    x = torch.randn(6, 16).to(place.device)
    handles = []
    for model, optimizer in zip(models, optimizers, strict=True):
        inside.use_backend(optimizer, place.backend)
        handles += [af.release_gradients(optimizer, bucket_bytes=64), af.fuse_linears(model, optimizer)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().sum().backward()
            if step == 1 and optimizer is optimizers[0]:
                with refused(optimizer, RuntimeError, "a window is open"):
                    optimizer.release_memory()
            optimizer.accumulate()
            optimizer.backward(model(x).sum())
            optimizer.step()
        optimizers[0].release_memory()
    assert_all_same_bits(everything(optimizers[0]), everything(optimizers[1]))
    before = len(tensors_alive())
    optimizers[1].release_memory()
    assert len(tensors_alive()) < before


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS[:1], "torch"], indirect=True)
def test_members_of_a_group_release_theirs(place: Place) -> None:
    runs = []
    for releases in (True, False):
        (first, one), (second, other) = (made(place, kind) for kind in (KINDS["fp32"], KINDS["Muon"]))
        group = af.ClipGroup([one, other], max_grad_norm=0.5)
        for seed in (1, 2, 3):
            for params, optimizer in ((first, one), (second, other)):
                give(params, seed)
                optimizer.accumulate(2)
            group.step()
            if releases:
                one.release_memory()
            if releases and seed == 2:
                other.release_memory()
        runs.append((everything(one), everything(other)))
    for released, kept in zip(*runs, strict=True):
        assert_all_same_bits(released, kept)


def test_torchs_own_kernels_note_that_a_graph_has_captured_them(
    devices_apart: tuple[torch.device, torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other backends' notes: test_gpu_graphs.py."""
    for backend in (TorchBackend(), SeveralDevices({device: TorchBackend() for device in devices_apart})):
        params, optimizer = made(Place(backend), KINDS["fp32"])
        plain_step(params, optimizer, 1)
        optimizer.release_memory()
        plain_step(params, optimizer, 2)
        with monkeypatch.context() as patch:
            patch.setattr("accumfused.backends.torch_kernels.is_capturing", lambda device: True)
            plain_step(params, optimizer, 3)
        with refused(optimizer, RuntimeError, "captured a call of this optimizer"):
            optimizer.release_memory()
