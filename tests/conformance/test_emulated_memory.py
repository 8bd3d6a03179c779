"""The CUDA kernels over the emulation, every access checked, and launches that run later, Triton's too.

An access lies in a tensor, on its boundary. Launches wait until the test synchronizes, or replays a captured graph;
before that, memory that nobody has any more goes to others. What torch's own operations write is not put off, so there
are steps from `p.grad`, and windows that need none.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything
from device import DeviceMemory, Launches
from places import INTERPRETED, interpreted
from table import ADAMW_CASE, random_params
from torch import Tensor

import accumfused.backends.cuda
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend

SIDE = 77  # a stream


def new_optimizer(backend: Any) -> Any:
    return ADAMW_CASE.make(random_params([(5000,), (30,)]), backend, max_grad_norm=1.0)


def gradients(optimizer: Any, value: float) -> list[Tensor]:
    return [torch.full_like(p, value) for p in optimizer.param_groups[0]["params"]]


def give(optimizer: Any, grads: list[Tensor]) -> None:
    for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        param.grad = grad


def step(optimizer: Any, grads: list[Tensor], lr: float = 0.1) -> None:
    """One that leaves no gradient behind."""
    optimizer.param_groups[0]["lr"] = lr
    give(optimizer, grads)
    optimizer.step()
    optimizer.zero_grad()


# ---- accesses -------------------------------------------------------------------------------------------------------

OUTSIDE = r"CUDA, (norm|step): it reads \d+ bytes at 0x\w+, outside of the device's memory"
OFF = r"CUDA, table: it takes 0x\w+, line \d+, for a multiple of 16"


def memory_of_the_host(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad = torch.ones(30)


def what_lies_behind_a_tensor(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        checked.allow(param.grad.data_ptr(), param.grad.nbytes - 1)


def an_address_off_its_boundary(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    tables = inside.device_tables(optimizer)
    kept, _, stream = tables[0]
    with memory:
        shifted = torch.empty(len(kept) + 16, dtype=torch.uint8)
    tables[0] = shifted, checked.DeviceTable(0, shifted.data_ptr() + 4, 1, 7), stream


@pytest.mark.parametrize(
    ("spoil", "text"),
    [(memory_of_the_host, OUTSIDE), (what_lies_behind_a_tensor, OUTSIDE), (an_address_off_its_boundary, OFF)],
)
def test_a_kernel_is_refused(
    spoil: Any, text: str, checked_cuda: CudaBackend, memory: DeviceMemory, checked: Any
) -> None:
    with memory:
        optimizer = new_optimizer(checked_cuda)
        for param, grad in zip(optimizer.param_groups[0]["params"], gradients(optimizer, 1.0), strict=True):
            param.grad = grad
        optimizer.step()
    spoil(optimizer, memory, checked)
    with pytest.raises(RuntimeError, match=text), memory:
        optimizer.step()


# ---- launches that run later ----------------------------------------------------------------------------------------


class Gpu(DeviceMemory):
    """The emulated device, as torch.cuda shows it."""

    def __init__(self, machine: Any, backend: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(machine)
        self.backend = backend
        self.synchronize, self.capture, self.replay = machine.synchronize, machine.capture, machine.replay
        monkeypatch.setattr(module, "current_stream", lambda device: (0, self.stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: self.record_stream(tensor, to.cuda_stream))

    def give_away(self) -> None:
        """All memory that nobody has any more, and the current stream's launches do not hold."""
        gc.collect()
        self.poison(self.stream)


@pytest.fixture(params=["emulated", *INTERPRETED])
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    if request.param == "emulated":
        checked = request.getfixturevalue("checked")
        checked.defer(True)
        with Gpu(checked, CudaBackend(checked, checked.Table), accumfused.backends.cuda, monkeypatch) as found:
            yield found
    else:
        for place in interpreted():
            module, launches = sys.modules[type(place.backend).__module__], Launches()
            monkeypatch.setattr(module, "is_capturing", launches.is_capturing)
            for owner, name in (
                (module.kernels, "norm_kernel"), (module.kernels, "accumulate_kernel"), (module, "step_kernel"),
            ):  # fmt: skip
                monkeypatch.setattr(owner, name, launches.put_off(getattr(owner, name)))
            with Gpu(launches, place.backend, module, monkeypatch) as found:
                yield found


def assert_made(optimizer: Any, *steps: tuple[float, float]) -> None:
    """These steps (gradient, lr), and no others."""
    other = new_optimizer(CpuBackend())
    for value, lr in steps:
        step(other, gradients(other, value), lr)
    assert_all_same_bits(everything(optimizer), everything(other))


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(("first", "micro_batches"), [(0, 1), (SIDE, 1), (0, 2)])
def test_a_side_stream_keeps_what_it_reads(
    first: int, micro_batches: int, records: bool, later: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the stream of all steps. Gradients come from the default stream."""
    if not records:  # then the test has to fail
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: None)
    optimizer = new_optimizer(later.backend)
    later.stream = first
    step(optimizer, gradients(optimizer, 1.0))
    later.synchronize()
    later.stream = 0
    grads = [gradients(optimizer, -2.0) for _ in range(micro_batches)]
    later.stream = SIDE
    while grads:
        give(optimizer, grads.pop())
        if micro_batches > 1:
            optimizer.accumulate()
            later.give_away()
            later.synchronize()
    optimizer.step()
    optimizer.zero_grad()
    later.give_away()
    later.synchronize()
    if records:
        assert_made(optimizer, (1.0, 0.1), (-2.0 * micro_batches, 0.1))
    else:
        assert int(optimizer.skipped_steps) == 1, "the gradients are NaN"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_graph_reads_what_it_was_captured_with(keeps: bool, later: Gpu) -> None:
    optimizer = new_optimizer(later.backend)
    step(optimizer, gradients(optimizer, 1.0))
    later.synchronize()
    static = gradients(optimizer, -2.0)  # the graph's, as long as the test keeps them
    later.stream = SIDE
    later.capture(7)
    step(optimizer, static)
    later.capture(0)
    later.stream = 0
    if not keeps:
        static.clear()
    step(optimizer, gradients(optimizer, 3.0), lr=0.05)
    later.synchronize()
    later.stream = SIDE
    later.give_away()
    for _ in range(2):
        later.replay()
    later.stream = 0
    step(optimizer, gradients(optimizer, 4.0))
    later.give_away()
    later.synchronize()
    if keeps:
        assert_made(optimizer, (1.0, 0.1), (3.0, 0.05), (-2.0, 0.1), (-2.0, 0.1), (4.0, 0.1))
    else:
        assert int(optimizer.skipped_steps) == 2, "the gradients are NaN"


def window(optimizer: Any, grads: list[list[Tensor]], lr: float) -> None:
    """One of gradients that others hold, so that torch has nothing to do beside the launches."""
    optimizer.param_groups[0]["lr"] = lr
    for micro, weight in zip(grads, (3.0, 1.0, 2.0), strict=True):
        for param, grad in zip(optimizer.param_groups[0]["params"], micro, strict=True):
            param.grad = grad
        optimizer.accumulate(weight)
    optimizer.step()


def windows(later: Gpu, checked: Any) -> list[dict[str, Tensor]]:
    """What five windows make of an optimizer, the last two replayed by a graph; and what they should."""
    found = []
    for backend in (later.backend, CpuBackend()):
        optimizer = new_optimizer(backend)
        grads = [gradients(optimizer, value) for value in (1.0, -2.0, 0.5)]
        for lr in (0.1, 0.2, 0.3):
            window(optimizer, grads, lr)
        if backend is later.backend:
            checked.synchronize()
            later.stream = SIDE
            checked.capture(7)
            window(optimizer, grads, 0.4)
            checked.capture(0)
            for _ in range(2):
                checked.replay()
            later.stream = 0
        else:
            for _ in range(2):
                window(optimizer, grads, 0.4)
        found.append(everything(optimizer))
    return found


@pytest.mark.parametrize("later", ["emulated"], indirect=True)
@pytest.mark.parametrize("waits", [True, False])
def test_a_launch_may_begin_before_the_one_in_front_has_run(waits: bool, later: Gpu, checked: Any) -> None:
    checked.cooperates(False)  # such a launch takes the norm, and does not begin early
    with checked.without(wait=-1 if waits else 0):
        if waits:
            assert_all_same_bits(*windows(later, checked))
        else:  # then the test has to fail: other bits, or addresses that are not there yet
            with pytest.raises((AssertionError, RuntimeError)):
                assert_all_same_bits(*windows(later, checked))
