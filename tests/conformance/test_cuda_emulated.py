"""The CUDA kernels and their launches on the CPU, over the emulation in tests/emulation: the same bits as the CPU's.

The threads of a block run in an order that is shuffled between any two barriers, and blocks take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_backends_agree as agree
import torch
from compare import assert_same_bits, everything
from snapshot import refused
from table import ADAMW_CASE, Case, case_named, every_case, random_params, set_grads
from torch import Tensor

import accumfused as af
import accumfused.backends.cuda
import accumfused.graphs
from accumfused import _native
from accumfused.backends.base import Scaling
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.fuse import NoRule
from accumfused.plan import build
from accumfused.settings import Settings

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

CHUNK = agree.CHUNK


@pytest.fixture
def machine(emulated: Any) -> Iterator[Any]:
    """The emulation, given back as it was."""
    yield emulated
    emulated.multiprocessors(3)
    emulated.skip_barrier(-1)
    emulated.skip_fence(-1)
    emulated.unwatch()
    emulated.fail_after(-1)
    emulated.capture(0)


@pytest.fixture
def cuda(machine: Any) -> CudaBackend:
    return CudaBackend(machine, machine.Table)


@agree.each_dtype
@every_case
def test_every_rule_and_dtype_gives_the_cpu_bits(case: Case, dtype: torch.dtype, cuda: CudaBackend) -> None:
    agree.assert_agree(agree.run(case, cuda, dtype), agree.reference_run(case.name, dtype))


@agree.each_dtype
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", agree.WINDOWS.values(), ids=agree.WINDOWS.keys())
def test_windows_agree(weights: Sequence[Any], closed: bool, dtype: torch.dtype, cuda: CudaBackend) -> None:
    expected = agree.window(CpuBackend(), dtype, weights, closed=closed)
    agree.assert_agree(agree.window(cuda, dtype, weights, closed=closed), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
def test_the_grid_and_the_order_of_threads_change_nothing(
    blocks: int, seed: int, machine: Any, cuda: CudaBackend
) -> None:
    machine.multiprocessors(blocks)
    machine.seed(seed)
    expected = agree.reference_run("adamw_amsgrad", torch.bfloat16)
    agree.assert_agree(agree.run(case_named("adamw_amsgrad"), cuda, torch.bfloat16), expected)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@agree.each_dtype
def test_memory_off_the_16_byte_boundaries_gives_the_same_bits(
    offset: int, dtype: torch.dtype, cuda: CudaBackend
) -> None:
    found = []
    for backend in (cuda, CpuBackend()):
        memory = [torch.randn(n + offset, generator=torch.Generator().manual_seed(n)) for n in (CHUNK + 9, 4, 1023)]
        params = [m[offset:].requires_grad_() for m in memory]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
        for k in range(3):
            for p in params:
                p.grad_dtype = dtype
                grad = torch.randn(p.numel() + k, generator=torch.Generator().manual_seed(k))
                p.grad = grad.to(dtype)[k:]
            optimizer.accumulate()
        optimizer.step()
        found.append(everything(optimizer) | {"norm": optimizer.grad_norm})
    agree.assert_agree(found[0], found[1])


@pytest.mark.parametrize("blocks", [1, 2])
def test_uneven_step_counts_agree(blocks: int, machine: Any, cuda: CudaBackend) -> None:
    machine.multiprocessors(blocks)
    agree.assert_agree(agree.uneven_steps(cuda), agree.uneven_steps(CpuBackend()))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("position", [0, 1023, CHUNK, CHUNK + 8])
def test_a_non_finite_gradient_anywhere_writes_nothing(position: int, value: float, cuda: CudaBackend) -> None:
    params = random_params([(3,), (CHUNK + 9,), (5,)])
    optimizer = ADAMW_CASE.make(params, cuda, max_grad_norm=0.5)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    before = everything(optimizer)
    params[1].grad[position] = value
    optimizer.step()
    agree.assert_agree(everything(optimizer), before)
    assert optimizer.step_was_skipped
    assert int(optimizer.skipped_steps) == 1


def test_groups_of_different_rules_go_in_one_launch(cuda: CudaBackend, machine: Any) -> None:
    found = []
    for backend in (cuda, CpuBackend()):
        params = random_params([(CHUNK + 3,), (40,), (50,)])
        groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:2], "lr": 0.3}, {"params": params[2:]}]
        optimizer = af.AdamW(groups, lr=0.1)
        optimizer._runtime.backend = backend
        set_grads(params, [torch.ones_like(p) for p in params])
        for _ in range(3):
            before = machine.launches()
            optimizer.step()
        found.append(everything(optimizer))
        launches = machine.launches() - before
        assert launches == (2 if backend is cuda else 0), "one for the coefficient, one for the step"
    agree.assert_agree(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_lr_is_read_where_it_lies(dtype: torch.dtype, cuda: CudaBackend) -> None:
    lr = torch.tensor(0.25, dtype=dtype)
    (param,), (expected,) = random_params([(50,)]), random_params([(50,)])
    ours = af.AdamW([param], lr=lr)
    ours._runtime.backend = cuda
    theirs = af.AdamW([expected], lr=0.25, backend="cpu")
    for step in range(3):
        for p in (param, expected):
            p.grad = torch.full_like(p, step - 0.5)
        ours.step()
        theirs.step()
        lr /= 2  # in place, as a scheduler or a graph's owner would
        theirs.param_groups[0]["lr"] /= 2
        assert_same_bits(param, expected, f"step {step}")


# ---- the tables' way to the device ----------------------------------------------------------------------------------


def test_a_table_larger_than_a_launch_can_carry(cuda: CudaBackend) -> None:
    sizes = tuple(1 + i % 7 for i in range(1300))
    expected = agree.run(ADAMW_CASE, CpuBackend(), torch.bfloat16, sizes)
    agree.assert_agree(agree.run(ADAMW_CASE, cuda, torch.bfloat16, sizes), expected)


def test_only_what_has_changed_is_sent(cuda: CudaBackend, machine: Any) -> None:
    params = random_params([(20,), (30,)])
    optimizer = ADAMW_CASE.make(params, cuda, max_grad_norm=1.0)
    set_grads(params, [torch.ones_like(p) for p in params])

    def launches() -> int:
        before = machine.launches()
        optimizer.step()
        return machine.launches() - before

    launches()
    assert launches() == 2, "norm and step"
    optimizer.param_groups[0]["lr"] = 0.01
    assert launches() == 3, "and the new lr"
    params[0].grad = params[0].grad.clone()
    assert launches() == 3, "and the new address"


@pytest.mark.parametrize("launches", range(6))
def test_a_launch_that_fails_leaves_the_optimizer_usable(launches: int, cuda: CudaBackend, machine: Any) -> None:
    found = []
    for backend in (cuda, CpuBackend()):
        params = random_params([(CHUNK + 5,), (30,)])
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=1.0)
        for seed in range(2):
            set_grads(params, [torch.full_like(p, seed - 0.5) for p in params])
            if backend is cuda:
                machine.fail_after(launches)
                for _ in range(2):
                    try:
                        optimizer.step()
                    except RuntimeError as error:
                        assert "CUDA, " in str(error)  # noqa: PT017
                        assert "too many resources requested for launch" in str(error)  # noqa: PT017
                    else:
                        break
                machine.fail_after(-1)
            else:
                optimizer.step()
        found.append(everything(optimizer))
    agree.assert_agree(found[0], found[1])


def test_a_capture_has_a_table_of_its_own(cuda: CudaBackend, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = random_params([(20,), (30,)])
    optimizer = ADAMW_CASE.make(params, cuda)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    plan = optimizer._runtime.plan
    eager = plan.device_tables[0][0]
    before = eager.clone()
    monkeypatch.setattr(accumfused.backends.cuda, "current_stream", lambda device: (0, 77))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    machine.capture(7)
    set_grads(params, [torch.full_like(p, 2.0) for p in params])  # other addresses
    launches = machine.launches()
    optimizer.step()
    optimizer.step()
    assert machine.launches() - launches == 8, "rows, operands, numbers; norm, hyper-parameters, step; norm and step"
    assert sorted(plan.device_tables) == [0, 7]
    assert torch.equal(eager, before), "a replay at any later time leaves eager calls alone"
    machine.capture(8)
    optimizer.step()
    assert sorted(plan.device_tables) == [0, 8]


def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumfused.graphs, "is_capturing", lambda device: True)


def test_a_capture_before_the_first_step_is_refused(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = random_params([(20,), (30,)])
    optimizer = ADAMW_CASE.make(params, cuda)
    set_grads(params, [torch.ones_like(p) for p in params])
    capturing(monkeypatch)
    with refused(optimizer, RuntimeError, "make one whole step"):
        optimizer.step()
    with refused(optimizer, RuntimeError, "make one whole step"):
        optimizer.accumulate()
    assert optimizer.state == {}


def test_a_capture_that_would_make_states_is_refused(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = random_params([(20,), (30,)])
    optimizer = ADAMW_CASE.make(params, cuda)
    set_grads(params, [torch.ones(20), None])
    optimizer.step()  # there is a plan; the second parameter has no state yet
    set_grads(params, [torch.ones(20), torch.ones(30)])
    capturing(monkeypatch)
    with refused(optimizer, RuntimeError, "make one whole step"):
        optimizer.step()
    assert params[1] not in optimizer.state


def test_a_tensor_that_moved_before_a_capture_is_refused(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = random_params([(20,), (30,)])
    optimizer = ADAMW_CASE.make(params, cuda)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    capturing(monkeypatch)
    optimizer.step()
    params[0].data = params[0].data.clone()
    with refused(optimizer, RuntimeError, "make one whole step"):
        optimizer.step()


# ---- the emulation bites --------------------------------------------------------------------------------------------


class WithoutBarrier:
    """The backend, one barrier of one verb's kernel taken away."""

    def __init__(self, inner: CudaBackend, machine: Any, verb: str, index: int) -> None:
        self._inner, self._machine, self._verb, self._index = inner, machine, verb, index

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name != self._verb:
            return attribute

        def call(*arguments: Any) -> Any:
            self._machine.skip_barrier(self._index)
            try:
                return attribute(*arguments)
            finally:
                self._machine.skip_barrier(-1)

        return call


# Those that a block of several chunks comes to, but for two that nobody needs yet: the one before a block's first sum,
# which nobody has read, and the one before a norm's ticket, which the thread takes that has written the sums.
BARRIERS = [*(("accumulate", index) for index in (1, 2, 3)), *(("norm", index) for index in (1, 2, 3, 7))]
BARRIERS += [("step", index) for index in range(5)]


def differs(run: Callable[[], dict[str, Tensor]], expected: dict[str, Tensor], machine: Any) -> bool:
    """Whether some order of threads gives other bits, or never ends."""
    for seed in range(20):
        machine.seed(seed)
        try:
            if not matches(run(), expected):
                return True
        except RuntimeError as error:
            assert "threads wait for others at a barrier" in str(error)  # noqa: PT017
            return True
    return False


@pytest.mark.parametrize(("verb", "index"), BARRIERS)
def test_a_missing_barrier_is_seen(verb: str, index: int, machine: Any, cuda: CudaBackend) -> None:
    machine.multiprocessors(2)
    sizes = (3 * CHUNK + 5, 70, 5)
    expected = agree.run(ADAMW_CASE, CpuBackend(), torch.float32, sizes)
    broken = WithoutBarrier(cuda, machine, verb, index)
    assert not differs(lambda: agree.run(ADAMW_CASE, cuda, torch.float32, sizes), expected, machine)
    assert differs(lambda: agree.run(ADAMW_CASE, broken, torch.float32, sizes), expected, machine)


@pytest.mark.parametrize("fence", [-1, 0])
def test_a_missing_fence_before_the_ticket_is_seen(fence: int, machine: Any, cuda: CudaBackend) -> None:
    params = random_params([(3 * CHUNK + 5,), (70,), (5,)])
    partials = torch.empty(6)

    def norms(backend: Any) -> dict[str, Tensor]:
        plan = build([{"params": params}], {}, [NoRule], Settings())
        backend.prepare(plan, [{"params": params}], {})
        scaling = Scaling(plan.device, takes_norm=True)
        grads = [[torch.full_like(p, value) for p in params] for value in (1.0, 3.0)]
        return {str(k): backend.norm(plan, each, partials, scaling).values for k, each in enumerate(grads)}

    expected = norms(CpuBackend())
    machine.watch(partials.data_ptr(), partials.nbytes)
    machine.skip_fence(fence)
    assert differs(lambda: norms(cuda), expected, machine) == (fence == 0)


@pytest.mark.parametrize("index", range(2, 10))  # after those by which a block finds out that it is the last
def test_a_missing_barrier_of_the_final_sum_is_seen(index: int, machine: Any, cuda: CudaBackend) -> None:
    # As many chunks as the tree has lanes, so that all its levels have something to add.
    params = [torch.zeros(1) for _ in range(1030)]
    partials, others = torch.rand(2, len(params), generator=torch.Generator().manual_seed(0))

    def norm(backend: Any) -> dict[str, Tensor]:
        plan = build([{"params": params}], {}, [NoRule], Settings())
        backend.prepare(plan, [{"params": params}], {})
        scaling = Scaling(plan.device, takes_norm=True)
        backend.norm(plan, None, others, scaling)  # or shared memory would still hold the right sums
        return {"outcome": backend.norm(plan, None, partials, scaling).values}

    expected = norm(CpuBackend())
    assert not differs(lambda: norm(cuda), expected, machine)
    assert differs(lambda: norm(WithoutBarrier(cuda, machine, "norm", index)), expected, machine)


def matches(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    try:
        agree.assert_agree(found, expected)
    except AssertionError:
        return False
    return True


def test_the_comparison_sees_a_wrong_coefficient(cuda: CudaBackend) -> None:
    from test_mutations import DoesNothing, WrongCoefficient

    expected = agree.reference_run("adamw", torch.float32)
    for mutant in (DoesNothing, WrongCoefficient):
        with pytest.raises((AssertionError, KeyError)):
            agree.assert_agree(agree.run(ADAMW_CASE, mutant(cuda), torch.float32), expected)
    agree.assert_agree(agree.run(ADAMW_CASE, ReferenceBackend(), torch.float32), expected)
