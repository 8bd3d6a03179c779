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
from captured_window import Window
from compare import assert_same_bits, everything
from layouts import PIECE, edges
from problems import LOOPS, Loop, Problem, assert_conforms, expected, play
from snapshot import refused
from table import ADAMW_CASE, STATES, WEIGHTS, random_grads, random_params, set_grads
from torch import Tensor

import accumfused.backends.cuda
import accumfused.core.graphs
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.core.plan import build
from accumfused.core.protocol import Scaling
from accumfused.formats.numeric import CHUNK
from accumfused.loop.fusing import NoRule
from accumfused.settings import Settings


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
def test_the_grid_and_the_order_of_threads_change_nothing(
    blocks: int, seed: int, machine: Any, cuda: CudaBackend
) -> None:
    machine.multiprocessors(blocks)
    machine.seed(seed)
    sizes = edges(CHUNK + PIECE + 5, 5000, *[40] * 9)
    for case, weights, states in (("adamw_amsgrad", "fp32", "fp32"), ("adamw", "split8", "int8")):
        problem = Problem(case, torch.bfloat16, weights, states, LOOPS["steps"], edges=sizes)
        assert_conforms(problem, cuda)


# ---- launches and the tables' way to the device ---------------------------------------------------------------------


def two(backend: Any, **options: Any) -> Any:
    """An optimizer of two parameters, with gradients."""
    params = random_params([(CHUNK + 20,), (30,)])
    optimizer = ADAMW_CASE.make(params, backend, **options)
    set_grads(params, [torch.ones_like(p) for p in params])
    return optimizer


def launches(machine: Any, call: Callable[[], Any]) -> int:
    before = machine.launches()
    call()
    return int(machine.launches() - before)


def test_only_what_has_changed_is_sent(cuda: CudaBackend, machine: Any) -> None:
    optimizer = two(cuda, max_grad_norm=1.0)
    param = optimizer.param_groups[0]["params"][0]
    optimizer.step()
    assert launches(machine, optimizer.step) == 2, "norm and step"
    optimizer.param_groups[0]["lr"] = 0.01
    assert launches(machine, optimizer.step) == 3, "and the new lr"
    param.grad = param.grad.clone()
    assert launches(machine, optimizer.step) == 3, "and the new address"


def test_any_mix_of_rules_and_formats_goes_in_one_launch_per_verb(cuda: CudaBackend, machine: Any) -> None:
    optimizer = two(cuda, state_dtype=torch.bfloat16, state_dtype_min_numel=100, rounding_seed=1)
    extra = random_params([(3000,), (60,)], seed=1)
    extra[1] = extra[1].detach().bfloat16().requires_grad_()
    optimizer.add_param_group({"params": extra, "amsgrad": True})
    set_grads(extra, random_grads(extra, 0))
    for _ in range(2):
        optimizer.step()
    assert launches(machine, optimizer.step) == 2, "one for the coefficient, one for the step"


def test_a_table_larger_than_a_launch_can_carry(cuda: CudaBackend) -> None:
    sizes = edges(*[1 + i % 7 for i in range(1300)])
    assert_conforms(Problem("adamw", torch.bfloat16, loop=LOOPS["both kinds"], edges=sizes), cuda)


@pytest.mark.parametrize("count", range(6))
def test_a_launch_that_fails_leaves_the_optimizer_usable(count: int, cuda: CudaBackend, machine: Any) -> None:
    ours, theirs = two(cuda, max_grad_norm=1.0), two(CpuBackend(), max_grad_norm=1.0)
    for _ in range(2):
        machine.fail_after(count)
        try:
            ours.step()
        except RuntimeError as error:
            assert "CUDA, " in str(error)  # noqa: PT017
            assert "too many resources requested for launch" in str(error)  # noqa: PT017
            ours.step()
        machine.fail_after(-1)
        theirs.step()
    for name, value in everything(theirs).items():
        assert_same_bits(everything(ours)[name], value, name)


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


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the current stream."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return lambda number: monkeypatch.setattr(
        accumfused.backends.cuda, "current_stream", lambda device: (0, number), raising=True
    )


def test_a_capture_has_a_table_of_its_own(cuda: CudaBackend, machine: Any, stream: Any) -> None:
    optimizer = two(cuda)
    params = optimizer.param_groups[0]["params"]
    optimizer.step()
    tables = inside.device_tables(optimizer)
    eager = tables[0][0]
    before = eager.clone()
    stream(77)
    machine.capture(7)
    set_grads(params, [torch.full_like(p, 2.0) for p in params])  # other addresses
    assert launches(machine, optimizer.step) == 6, "rows, operands, numbers; norm, hyper-parameters, step"
    assert launches(machine, optimizer.step) == 2
    assert sorted(tables) == [0, 7]
    assert torch.equal(eager, before), "a replay at any later time leaves eager calls alone"
    machine.capture(8)
    optimizer.step()
    assert sorted(tables) == [0, 8]


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split8"])
def test_a_replay_rounds_with_new_noise(
    weights: str, states: str, cuda: CudaBackend, machine: Any, stream: Any
) -> None:
    """A captured window that is replayed twice gives the bits of three eager ones."""
    found = []
    dtype, options = WEIGHTS[weights]
    for captured in (True, False):
        params = [p.detach().to(dtype).requires_grad_() for p in random_params([(5000,), (70,)])]
        optimizer = ADAMW_CASE.make(
            params, cuda, state_dtype=STATES[states], state_dtype_min_numel=2, rounding_seed=17, **options
        )
        window = Window(optimizer, params, random_grads(params, 0, dtype), random_grads(params, 1, dtype))
        window()
        if captured:
            stream(77)
            machine.capture(7)
        window()
        for _ in range(2):
            window.write_grads()
            machine.replay() if captured else window()
        machine.capture(0)
        stream(0)
        found.append(everything(optimizer))
    for name, value in found[1].items():
        assert_same_bits(found[0][name], value, name)
    assert int(optimizer.state[params[0]]["step"]) == 4


def moved(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.data = param.data.clone()


def without_state(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


@pytest.mark.parametrize("change", [None, moved, without_state])
@pytest.mark.parametrize("verb", ["step", "accumulate"])
def test_a_capture_that_would_build_a_plan_or_states_is_refused(
    change: Any, verb: str, cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = two(cuda)
    if change is not None:
        optimizer.step()
        change(optimizer)
    monkeypatch.setattr(accumfused.graphs, "is_capturing", lambda device: True)
    if change is without_state and verb == "accumulate":
        pytest.skip("a fold needs no state")
    with refused(optimizer, RuntimeError, "make one whole step"):
        getattr(optimizer, verb)()


# ---- the emulation bites --------------------------------------------------------------------------------------------


class WithoutBarrier:
    """The backend, one barrier of one verb's kernel taken away."""

    def __init__(self, inner: CudaBackend, machine: Any, verb: str, index: int) -> None:
        self._inner, self._machine, self._verb, self._index = inner, machine, verb, index

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            self._machine.skip_barrier(self._index)
            try:
                return attribute(*arguments)
            finally:
                self._machine.skip_barrier(-1)

        return call if name == self._verb else attribute


def differs(run: Callable[[], Any], wanted: Any, machine: Any) -> bool:
    """Whether some order of threads gives other bits, or never ends."""
    for seed in range(20):
        machine.seed(seed)
        try:
            found = run()
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_same_bits(found[name], value, name)
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "threads wait for others at a barrier" not in str(error):
                raise
            return True
    return False


# Those that a block of several chunks comes to, but for two that nobody needs yet: the one before a block's first sum,
# which nobody has read, and the one before a norm's ticket, which the thread takes that has written the sums.
BARRIERS = [*(("accumulate", index) for index in (1, 2, 3)), *(("norm", index) for index in (1, 2, 3, 7))]
BARRIERS += [("step", index) for index in range(5)]


@pytest.mark.parametrize(("verb", "index"), [(None, 0), *BARRIERS])
def test_a_missing_barrier_is_seen(verb: str | None, index: int, machine: Any, cuda: CudaBackend) -> None:
    machine.multiprocessors(2)
    problem = Problem("adamw", loop=Loop(((), (3.0, 0.7, 5.0), (2.0, 1.0))), edges=edges(3 * CHUNK + 5, 70, 5), seed=1)
    backend: Any = cuda if verb is None else WithoutBarrier(cuda, machine, verb, index)
    wanted = expected(problem)[0]
    assert differs(lambda: play(problem, backend)[0], wanted, machine) == (verb is not None)


def norms(backend: Any, sizes: list[int], partials: Tensor, *reads: float | Tensor) -> dict[str, Tensor]:
    """Of parameters of these sizes: with these values in all gradients, or of sums that are there already."""
    params = [torch.zeros(size) for size in sizes]
    plan = build([{"params": params}], {}, [NoRule], Settings())
    backend.prepare(plan, [{"params": params}], {})
    scaling, found = Scaling(plan.device, takes_norm=True), {}
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


@pytest.mark.parametrize("index", range(2, 10))  # after those by which a block finds out that it is the last
def test_a_missing_barrier_of_the_final_sum_is_seen(index: int, machine: Any, cuda: CudaBackend) -> None:
    # As many chunks as the tree has lanes, so that all its levels have something to add. Others first, or shared
    # memory would still hold the right sums.
    partials, others = torch.rand(2, 1030, generator=torch.Generator().manual_seed(0))
    run = [[1] * 1030, partials, others, partials]
    wanted = norms(CpuBackend(), *run)
    assert not differs(lambda: norms(cuda, *run), wanted, machine)
    assert differs(lambda: norms(WithoutBarrier(cuda, machine, "norm", index), *run), wanted, machine)


# ---- root and quotient of the loops for packed formats --------------------------------------------------------------

# From all approximations that NVIDIA documents for the hardware, csrc/cuda/packed_adam.cuh computes those of IEEE but
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
