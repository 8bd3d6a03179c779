"""The CUDA kernels over the emulation, every access checked: it lies in a tensor, on its boundary."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulation
import numpy as np
import pytest
import test_backends_agree as agree
import test_formats as formats
import torch
from emulated_memory import DeviceMemory
from table import ADAMW_CASE, Case, case_named, every_case, random_params, set_grads

from accumfused import _native
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

SIZES = (0, 3, 129, 4096 + 130)


@pytest.fixture(scope="module")
def checked() -> Any:
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    return emulation.load(checked=True)


@pytest.fixture
def memory(checked: Any) -> Iterator[DeviceMemory]:
    yield DeviceMemory(checked)
    checked.forbid()


@pytest.fixture
def cuda(checked: Any) -> CudaBackend:
    return CudaBackend(checked, checked.Table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_every_rule_stays_in_its_tensors(
    case: Case, dtype: torch.dtype, cuda: CudaBackend, memory: DeviceMemory
) -> None:
    with memory:
        found = agree.run(case, cuda, dtype, SIZES)
    agree.assert_agree(found, agree.run(case, CpuBackend(), dtype, SIZES))


@pytest.mark.parametrize("states", formats.STATES)
@pytest.mark.parametrize("weights", formats.WEIGHTS)
def test_every_format_stays_in_its_tensors(weights: str, states: str, cuda: CudaBackend, memory: DeviceMemory) -> None:
    with memory:
        found = formats.run(case_named("adamw"), cuda, weights, states, torch.bfloat16, SIZES)
    formats.assert_agree(found, formats.reference_run("adamw", weights, states, torch.bfloat16, SIZES))


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_windows_stay_in_their_tensors(closed: bool, cuda: CudaBackend, memory: DeviceMemory) -> None:
    weights = (2.0, 3.0, torch.tensor(4.0))
    for tensor in weights[2:]:
        memory.add(tensor)
    with memory:
        agree.window(cuda, torch.bfloat16, weights, closed=closed)


def on_the_device(memory: DeviceMemory, backend: CudaBackend, **options: Any) -> Any:
    with memory:
        params = random_params([(20,), (30,)])
        optimizer = ADAMW_CASE.make(params, backend, **options)
        set_grads(params, [torch.ones_like(p) for p in params])
        optimizer.step()
    return optimizer


def test_memory_of_the_host_is_refused(cuda: CudaBackend, memory: DeviceMemory) -> None:
    optimizer = on_the_device(memory, cuda)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.from_numpy(np.ones(20, np.float32))
    with pytest.raises(
        RuntimeError, match=r"CUDA, norm|CUDA, step: it reads \d+ bytes at 0x\w+, outside of the device"
    ):
        optimizer.step()


def test_what_lies_behind_a_tensor_is_refused(cuda: CudaBackend, memory: DeviceMemory, checked: Any) -> None:
    optimizer = on_the_device(memory, cuda)
    for param in optimizer.param_groups[0]["params"]:
        checked.allow(param.grad.data_ptr(), param.grad.nbytes - 1)
    with (
        pytest.raises(RuntimeError, match=r"CUDA, step: it reads \d+ bytes at 0x\w+, outside of the device's memory"),
        memory,
    ):
        optimizer.step()


def test_an_access_off_its_boundary_is_refused(cuda: CudaBackend, memory: DeviceMemory) -> None:
    optimizer = on_the_device(memory, cuda)
    plan = optimizer._runtime.plan
    (kept, _, stream) = plan.device_tables[0]
    with memory:
        shifted = torch.empty(len(kept) + 16, dtype=torch.uint8)
    table = cuda._c.DeviceTable(0, shifted.data_ptr() + 4, 1, 7)
    plan.device_tables[0] = shifted, table, stream
    with pytest.raises(RuntimeError, match=r"CUDA, table: it takes 0x\w+, line \d+, for a multiple of 16"):
        optimizer.step()


def test_a_launch_carries_no_more_than_a_gpu_takes(tmp_path: Path) -> None:
    source = tmp_path / "launch.cpp"
    for size, fits in ((32764, True), (32768, False)):
        source.write_text(f"""#include <cuda_runtime.h>
            struct Large {{ int words[{size} / 4]; }};
            void kernel(Large) {{}}
            auto launched = cudaLaunchKernelEx(nullptr, kernel, Large());""")
        command = ["g++", *emulation.FLAGS, f"-I{emulation.HERE}", "-fsyntax-only", str(source)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (found.returncode == 0) == fits
        assert ("a launch carries no more" in found.stderr) != fits
