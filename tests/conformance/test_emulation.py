"""The CUDA kernels and their launches over the emulation in tests/emulation, and that the emulation would notice.

The threads of a block run in an order that is shuffled between any two barriers, and blocks take turns.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulation
import inside
import pytest
import torch
from compare import assert_all_same_bits
from device import DeviceMemory
from layouts import PIECE, edges
from problems import LOOPS, Loop, Problem, assert_conforms, bare_plan, play
from table import ADAMW_CASE, random_params, set_grads
from torch import Tensor

from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.core.protocol import Scaling
from accumfused.core.rows import Grads
from accumfused.formats.numeric import CHUNK


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 64])  # 0: so few that units are whole chunks
def test_the_grid_and_the_order_of_threads_change_nothing(
    blocks: int, seed: int, machine: Any, cuda: CudaBackend
) -> None:
    machine.multiprocessors(blocks)
    machine.seed(seed)
    sizes = edges(CHUNK + PIECE + 5, 5000, *[40] * 9)
    for case, weights, states in (("adamw_amsgrad", "fp32", "fp32"), ("adamw", "split8", "8bit")):
        problem = Problem(case, torch.bfloat16, weights, states, LOOPS["steps"], edges=sizes)
        assert_conforms(problem, cuda)


def test_a_launch_carries_no_more_than_a_gpu_takes(tmp_path: Path) -> None:
    source = tmp_path / "launch.cpp"
    source.write_text("""#include <cuda_runtime.h>
        template <int kBytes> struct Large { int words[kBytes / 4]; };
        template <int kBytes> void kernel(Large<kBytes>) {}
        auto fits = cudaLaunchKernelEx(nullptr, kernel<32764>, Large<32764>());
        auto does_not = cudaLaunchKernelEx(nullptr, kernel<32768>, Large<32768>());""")
    command = ["g++", *emulation.FLAGS, f"-I{emulation.HERE}", "-fsyntax-only", str(source)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in found.stderr.splitlines() if "error:" in line]
    assert ["a launch carries no more" in error for error in errors] == [True]
    assert "Large<32768>" in found.stderr


# ---- the emulation bites --------------------------------------------------------------------------------------------


def windows(backend: Any) -> dict[str, Tensor]:
    """A step from `p.grad`, and two windows: of chunks that fill all lanes of the norm's order, and of others."""
    loop = Loop(((), (3.0, 0.7, 5.0), (2.0, 1.0)))
    return play(Problem("adamw", loop=loop, edges=edges(1029, 1029, 1029, 70, 5), seed=1), backend)[0]


def packed_steps(backend: Any) -> dict[str, Tensor]:
    sizes = edges(2 * PIECE + 5, PIECE, PIECE + 70)
    return play(Problem("adamw", torch.bfloat16, "split8", "8bit", LOOPS["steps"], edges=sizes, seed=1), backend)[0]


def sums(backend: Any) -> dict[str, Tensor]:
    """As many chunks as the tree has lanes, so that all its levels have something to add.

    Others first, or shared memory would still hold the right sums.
    """
    partials, others = torch.rand(2, 1030, generator=torch.Generator().manual_seed(0))
    return norms(backend, [1] * 1030, partials, others, partials)


def norms(backend: Any, sizes: list[int], partials: Tensor, *reads: float | Tensor) -> dict[str, Tensor]:
    """Of parameters of these sizes: with these values in all gradients, or of sums that are there already."""
    params = [torch.zeros(size) for size in sizes]
    plan = bare_plan(backend, params)
    scaling, found = Scaling(plan.device), {}
    for number, read in enumerate(reads):
        grads = None if isinstance(read, Tensor) else Grads(torch.full_like(p, read) for p in params)
        sums = read if isinstance(read, Tensor) else partials
        found[str(number)] = backend.norm(plan, grads, sums, scaling).values
    return found


def differs(run: Callable[[], Any], wanted: Any, machine: Any, missing: Any, seeds: int = 20) -> bool:
    """Whether some order of threads gives other bits without something, never ends, or leaves the device's memory."""
    for seed in range(seeds):
        machine.seed(seed)
        try:
            with missing, DeviceMemory(machine):
                found = run()
            assert_all_same_bits(found, wanted)
        except AssertionError:
            return True
        except RuntimeError as error:
            assert "CUDA, " in str(error)  # noqa: PT017
            return True
        finally:
            machine.forbid()
            machine.unwatch()
    return False


# Kernels, by a type that their own parameters have.
FOLD, NORM, STEP = "Fold", "Scaling", "Hypers"
THREADS, CHUNK_SUM = range(0, 256, 51), range(21)  # 21 shuffles: the search for the chunk, and its sum


@pytest.mark.parametrize(
    ("kernel", "program", "what", "indices", "redundant"),
    [
        # Before a block's first sum, whose lanes nobody has read yet.
        (FOLD, windows, "barrier", range(6), [0]), (NORM, windows, "barrier", range(6), [0]),
        # Before the ticket, which the thread takes that has written the sums.
        (NORM, sums, "barrier", range(11), [0]),
        (STEP, windows, "barrier", range(5), []),
        (FOLD, windows, "shuffle", CHUNK_SUM, []), (NORM, windows, "shuffle", CHUNK_SUM, []),
        (STEP, windows, "shuffle", range(2), []),
        # All lanes have these two numbers: they are shuffled for the compiler.
        (STEP, packed_steps, "shuffle", range(19), [2, 3]),
        (STEP, packed_steps, "barrier", range(9), []),
        *[(kernel, windows, "thread", THREADS, []) for kernel in (FOLD, NORM, STEP)],
        (STEP, packed_steps, "thread", THREADS, []),
    ],
)  # fmt: skip
def test_what_a_kernel_goes_without_is_seen(
    kernel: str, program: Any, what: str, indices: Any, redundant: list[int], checked: Any, checked_cuda: CudaBackend,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Every second one, the first of those that are needed and the last; with --full all, and that the others are not.

    What is redundant takes longest: no order of threads shows that it is missing.
    """
    if not request.config.getoption("--full"):
        needed = [index for index in indices if index not in redundant]
        indices, redundant = sorted({*needed[::2], needed[-1]}), []
    checked.multiprocessors(2)
    checked.allow(queue=False)  # else a block has one chunk
    wanted, seen = program(CpuBackend()), []
    for index in indices:
        missing = checked.without(kernel, **{what: index})
        if differs(lambda: program(checked_cuda), wanted, checked, missing):
            seen.append(index)
        assert missing.was_met
    assert seen == [index for index in indices if index not in redundant]


def test_a_race_is_seen_where_no_number_can_be_wrong(checked: Any, checked_cuda: CudaBackend) -> None:
    """All threads load a sum that thread 0 writes, and all but thread 0 throw it away."""
    checked.multiprocessors(2)
    last = checked.without(NORM, barrier=10)
    with last, pytest.raises(RuntimeError, match=r"norm: a race: thread \d+ (reads|writes) shared memory"):
        sums(checked_cuda)
    assert last.was_met


@pytest.mark.parametrize("fence", [-1, 0])
def test_a_missing_fence_before_the_ticket_is_seen(fence: int, machine: Any, cuda: CudaBackend) -> None:
    partials = torch.empty(6)

    def run(backend: Any) -> dict[str, Tensor]:
        machine.watch(partials.data_ptr(), partials.nbytes)
        return norms(backend, [3 * CHUNK + 5, 70, 5], partials, 1.0, 3.0)

    assert differs(lambda: run(cuda), run(CpuBackend()), machine, machine.without(fence=fence)) == (fence == 0)


# ---- accesses -------------------------------------------------------------------------------------------------------

OUTSIDE = r"CUDA, (norm|step): it reads \d+ bytes at 0x\w+, outside of the device's memory"
OFF = r"CUDA, table: it takes 0x\w+, line \d+, for a multiple of 8"


def memory_of_the_host(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad = torch.ones(30)


def what_lies_behind_a_tensor(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        checked.allow(param.grad.data_ptr(), param.grad.nbytes - 1)


def an_address_off_its_boundary(optimizer: Any, memory: DeviceMemory, checked: Any) -> None:
    with memory:
        shifted = torch.empty(5000, dtype=torch.uint8)
    checked.DeviceTable(0, shifted.data_ptr() + 4, inside.plan(optimizer).table_reader.table, 0, lambda size: (0, 0))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [(memory_of_the_host, OUTSIDE), (what_lies_behind_a_tensor, OUTSIDE), (an_address_off_its_boundary, OFF)],
)
def test_a_kernel_is_refused(
    spoil: Any, text: str, checked_cuda: CudaBackend, memory: DeviceMemory, checked: Any
) -> None:
    with memory:
        params = random_params([(5000,), (30,)])
        optimizer = ADAMW_CASE.make(params, checked_cuda, max_grad_norm=1.0)
        set_grads(params, [torch.ones_like(p) for p in params])
        optimizer.step()

    def go_on() -> None:
        spoil(optimizer, memory, checked)
        with memory:
            optimizer.step()

    with pytest.raises(RuntimeError, match=text):
        go_on()


# ---- root and quotient of the loops for packed formats --------------------------------------------------------------

# From all approximations that NVIDIA documents for the hardware, csrc/cuda/step_packed.cuh computes those of IEEE but
# for these, up to powers of four, or two: no GPU gives them, or sqrtf and the division that the compiler makes of the
# same instructions would not be those of IEEE there. test_machine_code.py compares the instructions.
RESTS_ON_THE_HARDWARE = {
    "root of 0x1.dd26e4p+1 from 0x1.092fp+0",
    "root of 0x1.f82294p+0 from 0x1.6cda12p+0",
    "0x1p+0 / 0x1.fffffep+0 from 0x1p+0",
}


def test_every_approximation_leads_to_the_root_and_the_quotient_of_ieee(tmp_path: Path) -> None:
    if emulation.why_not() is not None:
        pytest.skip(emulation.why_not())
    program = str(emulation.build_program("arithmetic.cpp", tmp_path))

    def found(*arguments: str) -> set[str]:
        run = subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
        return {*run.stdout.splitlines()}

    assert found() == RESTS_ON_THE_HARDWARE
    assert len(found("2") - RESTS_ON_THE_HARDWARE) > 10, "worse approximations spoil some"
