"""Several devices in one optimizer: the numbers of a single one.

Here both "devices" are the CPU, told apart by hand, with a backend each; with a GPU, the CPU and the GPU too.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_backends_agree as agree
import torch
from compare import assert_same_bits
from table import ADAMW_CASE, Case, case_named, every_case, random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af
from accumfused import _native, backends
from accumfused.backends import several
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.backends.several import SeveralDevices

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 1)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, emulated: Any) -> SeveralDevices:
    """Every third parameter is "on another device", whose sums are a copy, as they are there."""

    def rows(part: Any) -> list[bool]:
        return [(index % 3 == 1) == (part.device == OTHER) for index in range(len(part.tensors))]

    def elsewhere(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone() if device == OTHER else tensor

    monkeypatch.setattr(several, "_rows", rows)
    monkeypatch.setattr(several, "_to", elsewhere)
    return SeveralDevices({OTHER: CudaBackend(emulated, emulated.Table), CPU: CpuBackend()})


@agree.each_dtype
@every_case
def test_two_devices_give_the_numbers_of_one(
    case: Case, dtype: torch.dtype, two_devices: SeveralDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree.assert_agree(agree.run(case, two_devices, dtype), agree.reference_run(case.name, dtype))


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", agree.WINDOWS.values(), ids=agree.WINDOWS.keys())
def test_windows_over_two_devices(weights: Any, closed: bool, two_devices: SeveralDevices) -> None:
    expected = agree.window(ReferenceBackend(), torch.bfloat16, weights, closed=closed)
    agree.assert_agree(agree.window(two_devices, torch.bfloat16, weights, closed=closed), expected)


def test_released_gradients_over_two_devices(two_devices: SeveralDevices) -> None:
    results = []
    for bucket in (None, 1, 400):
        params = random_params([(3, 5), (33,), (), (70,)])
        optimizer = ADAMW_CASE.make(params, two_devices, max_grad_norm=0.5)
        if bucket is not None:
            af.release_gradients(optimizer, bucket)
        for update in range(3):
            for weight in (2.0, 3.0):
                optimizer.backward(sum((p * p).sum() for p in params), weight, last=update == 1 and weight == 3.0)
            optimizer.step()
        results.append(params)
    for plain, *released in zip(*results, strict=True):
        for param in released:
            assert_same_bits(param, plain)


def test_the_norm_takes_gradients_of_all_devices(two_devices: SeveralDevices) -> None:
    params = random_params([(3,), (4,), (5,)])
    optimizer = ADAMW_CASE.make(params, two_devices, max_grad_norm=1.0)
    set_grads(params, [torch.full_like(p, 2.0) for p in params])
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(4.0 * 12).sqrt())


def test_a_non_finite_gradient_on_one_device_skips_all(two_devices: SeveralDevices) -> None:
    params = random_params([(3,), (4,)])
    before = [p.detach().clone() for p in params]
    optimizer = ADAMW_CASE.make(params, two_devices, max_grad_norm=1.0)
    set_grads(params, [torch.ones(3), torch.full((4,), torch.nan)])
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param, old)


def test_the_plan_lasts_while_nothing_moves(two_devices: SeveralDevices) -> None:
    params = random_params([(3,), (4,)])
    optimizer = ADAMW_CASE.make(params, two_devices, max_grad_norm=1.0)
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    plan = optimizer._runtime.plan
    optimizer.step()
    assert optimizer._runtime.plan is plan
    params[1].data = params[1].data.clone()
    optimizer.step()
    assert optimizer._runtime.plan is not plan


def test_one_backend_for_each_device() -> None:
    chosen = backends.select("torch", [CPU, torch.device("meta")])
    assert isinstance(chosen, ReferenceBackend)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    both = backends.select("auto", [CPU, torch.device("cuda", 0)])
    assert isinstance(both, SeveralDevices)
    assert {device.type: backend.name for device, backend in both.backends.items()} == {"cpu": "cpu", "cuda": "cuda"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["sgd_dampening", "adamw_amsgrad"])
def test_the_cpu_and_a_gpu_give_the_numbers_of_the_cpu(name: str) -> None:
    case = case_named(name)
    found = []
    for places in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")):
        shapes = [(agree.CHUNK + 5,), (70,), (3 * agree.CHUNK,)]
        params = [p.detach().to(place).requires_grad_() for p, place in zip(random_params(shapes), places, strict=True)]
        optimizer = case.make(params, max_grad_norm=0.5)
        for seed in range(4):
            set_grads(params, [g.to(p.device) for g, p in zip(random_grads(params, seed), params, strict=True)])
            if seed < 2:
                optimizer.accumulate(weight=seed + 1.0, last=seed == 1)
            if seed > 0:
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach().cpu() for p in params])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_same_bits(a, b)


def test_a_backend_by_name_must_run_on_every_device() -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.AdamW([param], backend="cpu")
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="backend='cpu' cannot run: parameters are on cuda:0"):
        backends.select("cpu", [CPU, torch.device("cuda", 0)])
