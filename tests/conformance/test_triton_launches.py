"""How the Triton backend launches: as many programs as a GPU holds at once, over tables that are sent when they change.

With stand-ins for a GPU and for what is known of a loaded kernel; the kernels themselves are interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits, everything
from device import Launches
from places import INTERPRETED, interpreted
from table import ADAMW_CASE, random_params
from torch import Tensor

from accumfused.backends.cpu import CpuBackend

if not INTERPRETED:
    pytest.skip("kernels are not interpreted where there is a GPU", allow_module_level=True)
pytest.importorskip("triton")

H200 = SimpleNamespace(
    multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    max_threads_per_multi_processor=2048, warp_size=32,
)  # fmt: skip
RTX_5090 = SimpleNamespace(
    multi_processor_count=170, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=102400,
    max_threads_per_multi_processor=1536, warp_size=32,
)  # fmt: skip


@pytest.fixture
def triton() -> Iterator[Any]:
    """The backend over interpreted kernels."""
    for place in interpreted():
        yield place.backend


@pytest.fixture
def module(triton: Any) -> Any:
    """The backend's, with interpreted kernels."""
    return sys.modules[type(triton).__module__]


@pytest.fixture
def launches(module: Any, monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(module, "resident_programs", lambda device, kernel=None: kernel.fits if kernel else 3)
    return Launches(module, monkeypatch, wait=False)


def grids(launches: Launches, verb: str) -> list[int]:
    return [grid for grid, _ in launches.made[verb]]


def sent(launches: Launches, verb: str, argument: int = 0) -> list[bool]:
    """Whether each launch's table was another one than the last launch's of this verb."""
    return [new[argument] is not old[argument] for (_, old), (_, new) in pairwise(launches.made[verb])]


SHAPES = [(300,), (30,), (7,), (65,)]  # a chunk each


def gradients(value: float) -> list[Tensor]:
    return [torch.full(shape, value, dtype=torch.bfloat16) for shape in SHAPES]


def stepped(
    backend: Any, grads: list[list[Tensor]], lrs: list[float], folds: int = 0, sums: torch.dtype | None = None
) -> Any:
    """An optimizer after plain steps, or windows that fold the same gradients so many times."""
    params = random_params(SHAPES)
    optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=1.0, sum_dtype=sums)
    for given, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        for _ in range(max(folds, 1)):
            for param, grad in zip(params, given, strict=True):
                param.grad_dtype = None
                param.grad = grad
            if folds:
                optimizer.accumulate()
        optimizer.step()
    return optimizer


# ---- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "programs"),
    [
        (H200, 255, 0, 1), (H200, 129, 0, 1), (H200, 128, 0, 2), (H200, 93, 0, 2), (H200, 81, 0, 2), (H200, 80, 0, 3),
        (H200, 65, 0, 3), (H200, 64, 0, 4), (H200, 56, 0, 4), (H200, 48, 0, 5), (H200, 40, 0, 6), (H200, 32, 0, 8),
        (H200, 16, 0, 8), (H200, 32, 32 * 1024, 6), (H200, 32, 113 * 1024, 2), (H200, 32, 115 * 1024, 1),
        (H200, 200, 227 * 1024, 1), (RTX_5090, 32, 0, 6), (RTX_5090, 80, 0, 3), (RTX_5090, 40, 20 * 1024, 4),
    ],
)  # fmt: skip
def test_a_gpu_holds_as_many_programs_as_its_registers_memory_and_threads_allow(
    gpu: Any, registers: int, shared: int, programs: int, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of 256 threads: the numbers are those of CUDA's occupancy calculator."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    kernel = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(num_warps=8, shared=shared))
    assert module.resident_programs(torch.device("cuda", 0), kernel) == programs * gpu.multi_processor_count


@pytest.mark.parametrize("fits", [1, 2, 100])
@pytest.mark.parametrize("sums", [None, torch.bfloat16])
def test_a_grid_is_what_fits_and_changes_no_bit(
    sums: torch.dtype | None, fits: int, triton: Any, launches: Launches
) -> None:
    """That is known from a kernel's second launch on, because the first one loads it. No program is idle."""
    launches.fits = fits
    grads, lrs = [gradients(value) for value in (1.0, -3.0, 2.0)], [0.1, 0.2, 0.3]
    found = stepped(triton, grads, lrs, folds=2, sums=sums)
    assert grids(launches, "accumulate") == [3, *[min(fits, 4)] * 5]
    assert grids(launches, "step") == [3, *[min(fits, 4)] * 2]
    assert grids(launches, "norm") == [1] * 3, "the folds have measured"
    assert_all_same_bits(everything(found), everything(stepped(CpuBackend(), grads, lrs, folds=2, sums=sums)))


@pytest.mark.parametrize(("lanes", "warps"), [(32, 8), (64, 4)])
def test_a_program_has_256_threads_whatever_a_warp_has(
    lanes: int, warps: int, triton: Any, module: Any, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each thread has four neighbours of a row, 16 bytes."""
    monkeypatch.setattr(module, "lanes", lambda device: lanes)
    stepped(triton, [gradients(1.0)], [0.1], folds=2)
    assert [options["num_warps"] for options in launches.options] == [warps] * 4
    assert not any(options["enable_fp_fusion"] for options in launches.options)


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_folds_and_steps_have_tables_of_their_own_and_learning_rates_travel_alone(
    triton: Any, launches: Launches
) -> None:
    same, other = gradients(1.0), gradients(2.0)
    stepped(triton, [same, same, same, other, same], [0.1, 0.1, 0.2, 0.2, 0.2], folds=1)
    assert sent(launches, "accumulate") == [True, False, True, True], "the first step makes states, and another plan"
    assert sent(launches, "norm") == sent(launches, "step") == [False] * 4, "the sums have not moved"
    assert sent(launches, "step", 3) == [False, True, False, False]


def test_a_norm_and_its_step_share_a_table(triton: Any, launches: Launches) -> None:
    same, other = gradients(1.0), gradients(2.0)
    stepped(triton, [same, same, other, same], [0.1] * 4)
    assert sent(launches, "step") == sent(launches, "norm") == [False, True, True]
    assert launches.made["step"][-1][1][0] is launches.made["norm"][-1][1][0]


def test_an_address_with_another_dtype_is_sent(triton: Any, launches: Launches) -> None:
    halves = gradients(1.0)
    grads = [halves, [grad.view(torch.float16) for grad in halves]]
    found = stepped(triton, grads, [0.1] * 2)
    assert sent(launches, "step") == [True]
    assert_all_same_bits(everything(found), everything(stepped(CpuBackend(), grads, [0.1] * 2)))
