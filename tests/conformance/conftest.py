"""The fixtures of what runs here: `place`, each of places.py in turn, and the emulation of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch
from device import DeviceMemory
from harness import need_native
from places import CPU, INSTRUCTION_SETS, ON_CPU, ON_GPU, OTHER, Place, interpreted
from reference import ReferenceBackend
from torch import Tensor

from accumfused import backends
from accumfused.backends import several
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.several import SeveralDevices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = [str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")]
    chosen = "problem" in metafunc.fixturenames  # by the test's module
    if "place" in metafunc.fixturenames and not chosen and not any("place" in names for names in marks):
        metafunc.parametrize("place", [*ON_CPU, *ON_GPU], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    name = request.param
    if name == "reference":
        yield Place(ReferenceBackend())
    elif name in INSTRUCTION_SETS:
        yield Place(CpuBackend(name))
    elif name == "emulated":
        yield Place(request.getfixturevalue("cuda"))
    elif name == "checked":
        with request.getfixturevalue("memory"):
            yield Place(request.getfixturevalue("checked_cuda"))
    elif name == "two devices":
        yield Place(request.getfixturevalue("two_devices"))
    elif name == "torch":
        yield Place(backends.select("torch", [CPU]))
    elif name == "interpreted":
        yield from interpreted()
    elif name == "torch on a GPU":
        yield Place(ReferenceBackend(), "cuda")
    else:
        reason = backends.why_not(name, torch.device("cuda", 0))
        if reason is not None:
            pytest.skip(reason)
        yield Place(backends.select(name, [torch.device("cuda", 0)]), "cuda")


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    """The name of each backend for GPUs that runs here."""
    reason = backends.why_not(request.param, torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def tensors_there(place: Place) -> Iterator[None]:
    """New tensors lie on the place's device."""
    with torch.device(place.device) if place.device != "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def machine(emulated: Any) -> Iterator[Any]:
    """The emulation of a GPU, given back as it was."""
    need_native()
    emulated.reset()
    yield emulated
    emulated.reset()


@pytest.fixture
def cuda(machine: Any) -> CudaBackend:
    """The CUDA kernels over the emulation."""
    return CudaBackend(machine, machine.Table)


@pytest.fixture(scope="session")
def _checked() -> Any:
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    return emulation.load(checked=True)


@pytest.fixture
def checked(_checked: Any) -> Iterator[Any]:
    """The emulation whose kernels' accesses are checked."""
    need_native()
    _checked.reset()
    yield _checked
    _checked.reset()


@pytest.fixture
def memory(checked: Any) -> DeviceMemory:
    return DeviceMemory(checked)


@pytest.fixture
def checked_cuda(checked: Any) -> CudaBackend:
    return CudaBackend(checked, checked.Table)


@pytest.fixture
def devices_apart(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.device, torch.device]:
    """Two, of which the first has every third parameter, and copies of sums, as if it were another than the CPU."""

    def rows(part: Any) -> list[bool]:
        return [(index % 3 == 1) == (part.device == OTHER) for index in range(len(part.rows))]

    def elsewhere(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone() if device == OTHER else tensor

    monkeypatch.setattr(several, "_rows", rows)
    monkeypatch.setattr(several, "moved", elsewhere)
    return OTHER, CPU


@pytest.fixture
def two_devices(cuda: CudaBackend, devices_apart: tuple[torch.device, torch.device]) -> SeveralDevices:
    return SeveralDevices(dict(zip(devices_apart, (cuda, CpuBackend()), strict=True)))
