"""The CUDA kernels and their launches over the emulation in tests/emulation, and that the emulation would notice.

The threads of a block run in an order that is shuffled between any two barriers, and blocks take turns.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulation
import inside
import pytest
import torch
from compare import assert_all_same_bits, everything
from layouts import PIECE, edges
from problems import LOOPS, Loop, Problem, assert_conforms, expected, play
from table import ADAMW_CASE, set_grads
from torch import Tensor

from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.core.plan import build
from accumfused.core.protocol import Scaling
from accumfused.formats.numeric import CHUNK
from accumfused.loop.fusing import NoRule
from accumfused.settings import Settings


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 64])  # 0: so few that units are whole chunks
def test_the_grid_and_the_order_of_threads_change_nothing(
    blocks: int, seed: int, machine: Any, cuda: CudaBackend
) -> None:
    machine.multiprocessors(blocks)
    machine.seed(seed)
    machine.cooperates(seed == 0)
    sizes = edges(CHUNK + PIECE + 5, 5000, *[40] * 9)
    for case, weights, states in (("adamw_amsgrad", "fp32", "fp32"), ("adamw", "split8", "int8")):
        problem = Problem(case, torch.bfloat16, weights, states, LOOPS["steps"], edges=sizes)
        assert_conforms(problem, cuda)


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


# ---- the emulation bites --------------------------------------------------------------------------------------------


def without_barrier(cuda: CudaBackend, machine: Any, verb: str, index: int) -> CudaBackend:
    """The backend, one barrier of one verb's kernel taken away; "both": of the step that takes its norm."""
    machine.cooperates(verb == "both")
    verb = "step" if verb == "both" else verb
    inner = getattr(cuda, verb)

    def call(*arguments: Any) -> Any:
        machine.skip_barrier(index)
        try:
            return inner(*arguments)
        finally:
            machine.skip_barrier(-1)

    setattr(cuda, verb, call)
    return cuda


def differs(run: Callable[[], Any], wanted: Any, machine: Any) -> bool:
    """Whether some order of threads gives other bits, or never ends."""
    for seed in range(40):
        machine.seed(seed)
        try:
            assert_all_same_bits(run(), wanted)
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "threads wait for others at a barrier" not in str(error):
                raise
            return True
    return False


# Those that a block of several chunks comes to, but for two that nobody needs yet: the one before a block's first sum,
# which nobody has read, and the one before a norm's ticket, which the thread takes that has written the sums.
BARRIERS = [*(("accumulate", index) for index in (1, 2, 3)), *(("norm", index) for index in (1, 2, 3, 7))]
BARRIERS += [("step", index) for index in range(3)]
# In one launch: the sums; the barrier of all blocks; the outcome, which thread 0 computes for the others.
BARRIERS += [("both", index) for index in (1, 2, 3, 7, 8, 17)]


@pytest.mark.parametrize(("verb", "index"), [(None, 0), *BARRIERS])
def test_a_missing_barrier_is_seen(verb: str | None, index: int, machine: Any, cuda: CudaBackend) -> None:
    machine.multiprocessors(2)
    machine.allow(queue=False)  # else a block has one chunk
    problem = Problem("adamw", loop=Loop(((), (3.0, 0.7, 5.0), (2.0, 1.0))), edges=edges(3 * CHUNK + 5, 70, 5), seed=1)
    backend = cuda if verb is None else without_barrier(cuda, machine, verb, index)
    wanted = expected(problem)[0]
    assert differs(lambda: play(problem, backend)[0], wanted, machine) == (verb is not None)


def test_every_kernel_waits_for_the_launch_in_front_before_all_else() -> None:
    first = [
        body.split(";")[0].strip()
        for path in (emulation.ROOT / "csrc" / "cuda").glob("*.cu*")
        for body in re.findall(r"__global__ void[^{]*\{([^}]*)", path.read_text())
    ]
    assert len(first) == 8
    assert set(first) == {"wait_for_launches_in_front()"}


def norms(backend: Any, sizes: list[int], partials: Tensor, *reads: float | Tensor) -> dict[str, Tensor]:
    """Of parameters of these sizes: with these values in all gradients, or of sums that are there already."""
    params = [torch.zeros(size) for size in sizes]
    plan = build([{"params": params}], {}, [NoRule], Settings())
    backend.prepare(plan, [{"params": params}], {})
    scaling, found = Scaling(plan.device), {}
    for number, read in enumerate(reads):
        grads = None if isinstance(read, Tensor) else [torch.full_like(p, read) for p in params]
        sums = read if isinstance(read, Tensor) else partials
        found[str(number)] = backend.norm(plan, grads, sums, scaling).values
    return found


@pytest.mark.parametrize("fence", [-1, 0])
def test_a_missing_fence_before_the_ticket_is_seen(fence: int, machine: Any, cuda: CudaBackend) -> None:
    sizes, partials = [3 * CHUNK + 5, 70, 5], torch.empty(6)
    wanted = norms(CpuBackend(), sizes, partials, 1.0, 3.0)
    machine.watch(partials.data_ptr(), partials.nbytes)
    machine.skip_fence(fence)
    assert differs(lambda: norms(cuda, sizes, partials, 1.0, 3.0), wanted, machine) == (fence == 0)


@pytest.mark.parametrize("missing", [None, "skip_fence", "skip_ticket"])
def test_a_missing_barrier_of_all_blocks_is_seen(missing: str | None, machine: Any, cuda: CudaBackend) -> None:
    """In a step that takes its norm: the fence before its ticket, or the wait for the others."""
    machine.multiprocessors(2)

    def run(backend: Any) -> dict[str, Tensor]:
        params = [torch.ones(size, requires_grad=True) for size in (3 * CHUNK + 5, 70, 5)]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=1.0)
        for value in (1.0, 3.0):
            set_grads(params, [torch.full_like(p, value) for p in params])
            optimizer.step()
            if backend is cuda and missing is not None and value == 1.0:  # then sums of the step before lie there
                machine.watch(inside.partials(optimizer).data_ptr(), inside.partials(optimizer).nbytes)
                getattr(machine, missing)(0)
        machine.skip_fence(-1)
        machine.skip_ticket(-1)
        machine.unwatch()
        return everything(optimizer)

    wanted = run(CpuBackend())
    assert differs(lambda: run(cuda), wanted, machine) == (missing is not None)


@pytest.mark.parametrize("index", [None, *range(2, 10)])  # after those by which a block finds that it is the last
def test_a_missing_barrier_of_the_final_sum_is_seen(index: int | None, machine: Any, cuda: CudaBackend) -> None:
    # As many chunks as the tree has lanes, so that all its levels have something to add. Others first, or shared
    # memory would still hold the right sums.
    partials, others = torch.rand(2, 1030, generator=torch.Generator().manual_seed(0))
    run = [[1] * 1030, partials, others, partials]
    wanted = norms(CpuBackend(), *run)
    backend = cuda if index is None else without_barrier(cuda, machine, "norm", index)
    assert differs(lambda: norms(backend, *run), wanted, machine) == (index is not None)


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
