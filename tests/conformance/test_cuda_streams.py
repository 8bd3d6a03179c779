"""Launches that run later, over the emulation: what they read is still there, whatever becomes of the memory around it.

They wait until the test synchronizes, or replays a captured graph. Before that, memory that nobody has any more goes to
others. Only steps from `p.grad`: what torch's own operations write is not put off.
"""

# ruff: noqa: F811  # a fixture of another file is an argument here
from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import test_backends_agree as agree
import torch
from compare import everything
from emulated_memory import DeviceMemory
from table import ADAMW_CASE, random_params
from test_cuda_checked import checked  # noqa: F401  # a fixture
from torch import Tensor

import accumfused.backends.cuda
from accumfused import _native
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

SIDE = 77  # a stream


class Gpu(DeviceMemory):
    """The emulated device, as torch.cuda shows it."""

    def __init__(self, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(machine)
        self.machine = machine
        self.backend = CudaBackend(machine, machine.Table)
        machine.defer(True)
        monkeypatch.setattr(accumfused.backends.cuda, "current_stream", lambda device: (0, self.stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: self.record_stream(tensor, to.cuda_stream))

    def give_away(self) -> None:
        """All memory that nobody has any more, and the current stream's launches do not hold."""
        gc.collect()
        self.poison(self.stream)


@pytest.fixture
def gpu(checked: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    checked.seed(0)
    with Gpu(checked, monkeypatch) as found:
        yield found
    checked.defer(False)
    checked.capture(0)
    checked.forbid()


def new_optimizer(backend: Any) -> Any:
    return ADAMW_CASE.make(random_params([(5000,), (30,)]), backend, max_grad_norm=1.0)


def gradients(optimizer: Any, value: float) -> list[Tensor]:
    return [torch.full_like(p, value) for p in optimizer.param_groups[0]["params"]]


def step(optimizer: Any, grads: list[Tensor]) -> None:
    """One that leaves no gradient behind."""
    for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def expected(*values: float) -> dict[str, Tensor]:
    optimizer = new_optimizer(CpuBackend())
    for value in values:
        step(optimizer, gradients(optimizer, value))
    return everything(optimizer)


def test_a_stream_uses_its_memory_in_order(gpu: Gpu, checked: Any) -> None:
    optimizer = new_optimizer(gpu.backend)
    for value in (1.0, -2.0, 3.0):
        step(optimizer, gradients(optimizer, value))
    assert not everything(optimizer)["exp_avg 0"].any(), "nothing has run"
    gpu.give_away()
    checked.synchronize()
    agree.assert_agree(everything(optimizer), expected(1.0, -2.0, 3.0))


@pytest.mark.parametrize("records", [True, False])
def test_a_side_stream_keeps_what_it_reads(
    records: bool, gpu: Gpu, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not records:  # then the test has to fail
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: None)
    optimizer = new_optimizer(gpu.backend)
    step(optimizer, gradients(optimizer, 1.0))
    checked.synchronize()
    grads = gradients(optimizer, -2.0)
    gpu.stream = SIDE
    step(optimizer, grads)
    grads.clear()
    gpu.give_away()
    checked.synchronize()
    found = everything(optimizer)
    if records:
        agree.assert_agree(found, expected(1.0, -2.0))
    else:
        assert int(optimizer.skipped_steps) == 1, "the gradients are NaN"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_graph_reads_what_it_was_captured_with(keeps: bool, gpu: Gpu, checked: Any) -> None:
    optimizer = new_optimizer(gpu.backend)
    step(optimizer, gradients(optimizer, 1.0))
    checked.synchronize()
    static = gradients(optimizer, -2.0)  # the graph's, as long as the test keeps them
    gpu.stream = SIDE
    checked.capture(7)
    step(optimizer, static)
    checked.capture(0)
    gpu.stream = 0
    if not keeps:
        static.clear()
    optimizer.param_groups[0]["lr"] /= 2
    step(optimizer, gradients(optimizer, 3.0))
    checked.synchronize()
    optimizer.param_groups[0]["lr"] *= 2
    gpu.stream = SIDE
    gpu.give_away()
    for _ in range(2):
        checked.replay()
    gpu.stream = 0
    step(optimizer, gradients(optimizer, 4.0))
    gpu.give_away()
    checked.synchronize()
    if not keeps:
        assert int(optimizer.skipped_steps) == 2, "the gradients are NaN"
        return
    reference = new_optimizer(CpuBackend())
    for value in (1.0, 3.0, -2.0, -2.0, 4.0):
        reference.param_groups[0]["lr"] /= 2 if value == 3.0 else 1
        step(reference, gradients(reference, value))
        reference.param_groups[0]["lr"] *= 2 if value == 3.0 else 1
    agree.assert_agree(everything(optimizer), everything(reference))
