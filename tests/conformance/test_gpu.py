"""The backends for GPUs on a GPU: the same bits as on the CPU, on any stream, in graphs, without waiting."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import test_backends_agree as agree
import test_sum_partials
import torch
from compare import assert_same_bits, everything
from table import ADAMW_CASE, CASES, Case, case_named, random_grads, random_params
from torch import Tensor

import accumfused as af
from accumfused import _native, backends
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.numeric import sum_partials

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
CHUNK = agree.CHUNK
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    """The name of each backend for GPUs that runs here."""
    reason = backends.why_not(request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def make(name: str) -> Any:
    if name == "triton":
        return importlib.import_module("accumfused.backends.triton").TritonBackend()
    return CudaBackend()


def test_auto_takes_the_cuda_kernels() -> None:
    param = torch.zeros(3, device=DEVICE, requires_grad=True)
    optimizer = af.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer._runtime.backend.name == "cuda", backends.why_not("cuda", DEVICE)


# ---- the same bits --------------------------------------------------------------------------------------------------


@agree.each_dtype
@every_case
def test_every_rule_and_dtype_gives_the_cpu_bits(case: Case, dtype: torch.dtype, gpu: str) -> None:
    found = agree.run(case, make(gpu), dtype, device="cuda")
    agree.assert_agree(found, agree.reference_run(case.name, dtype))


def test_uneven_step_counts_agree(gpu: str) -> None:
    agree.assert_agree(agree.uneven_steps(make(gpu), "cuda"), agree.uneven_steps(ReferenceBackend()))


@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_nesterov", "lion_weight_decay"])
def test_the_reference_gives_the_same_bits_on_a_gpu(name: str) -> None:
    found = agree.run(case_named(name), ReferenceBackend(), torch.float32, device="cuda")
    agree.assert_agree(found, agree.reference_run(name, torch.float32))


@agree.each_dtype
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", agree.WINDOWS.values(), ids=agree.WINDOWS.keys())
def test_windows_agree(weights: Sequence[Any], closed: bool, dtype: torch.dtype, gpu: str) -> None:
    expected = agree.window(ReferenceBackend(), dtype, weights, closed=closed)
    agree.assert_agree(agree.window(make(gpu), dtype, weights, closed=closed, device="cuda"), expected)


@agree.each_dtype
def test_many_chunks_in_every_block(dtype: torch.dtype, gpu: str) -> None:
    sizes = (3000 * CHUNK + 77, 5 * CHUNK, 3)
    grads = [g.to(DEVICE) for g in random_grads([torch.empty(size) for size in sizes], 0, dtype)]
    found = []
    for backend in (make(gpu), ReferenceBackend()):
        params = [p.detach().to(DEVICE).requires_grad_() for p in random_params([(size,) for size in sizes])]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
        for param, grad in zip(params, grads, strict=True):
            param.grad_dtype = dtype
            param.grad = grad
        optimizer.step()
        optimizer.step()
        found.append(everything(optimizer) | {"norm": optimizer.grad_norm})
    agree.assert_agree(found[0], found[1])


@test_sum_partials.every_size
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sum_over_chunks_that_processes_add_up_has_the_cpu_bits(size: int, deterministic: bool) -> None:
    partials = test_sum_partials.random_partials(size)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = sum_partials(partials.to(DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.cpu(), sum_partials(partials))


def test_more_than_two_to_the_31_elements(gpu: str) -> None:
    count = 2**31 + CHUNK + 5
    if torch.cuda.mem_get_info(DEVICE)[0] < 5 * 4 * count:
        pytest.skip("needs 43 GB of free memory on the GPU")
    param = torch.zeros(count, device=DEVICE, requires_grad=True)
    param.grad = torch.ones_like(param)
    param.grad[-1] = 3.0
    optimizer = case_named("sgd").make([param], gpu, max_grad_norm=1e9)
    optimizer.step()
    lr = torch.tensor(0.3)
    for place in (0, 2**31 - 1, 2**31, count - 2):
        assert_same_bits(param.detach()[place], -lr)
    assert_same_bits(param.detach()[-1], -(lr * 3))
    assert int((param.detach() != -lr.item()).sum()) == 1
    torch.testing.assert_close(
        optimizer.grad_norm.double().cpu(), torch.tensor(count + 8.0).double().sqrt(), rtol=2e-6, atol=0
    )


# ---- streams and devices --------------------------------------------------------------------------------------------


def train(backend: Any, steps: int = 5, *, device: torch.device = DEVICE) -> dict[str, Tensor]:
    """Windows of two micro-batches, gradients written just before they are read."""
    params = [p.detach().to(device).requires_grad_() for p in random_params([(300, 7), (CHUNK + 3,), (5,)])]
    optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
    for step in range(steps):
        for micro in range(2):
            for p in params:
                p.grad = torch.full_like(p, 0.1).mul_(step + micro + 1.0)
            optimizer.accumulate(weight=micro + 1.0)
        optimizer.step()
    return everything(optimizer)


def test_a_side_stream(gpu: str) -> None:
    expected = train(make(gpu))
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # so that kernels on another stream would run first
        found = train(make(gpu))
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    agree.assert_agree(found, expected)


def test_a_device_that_is_not_the_current_one(gpu: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    agree.assert_agree(train(make(gpu), device=torch.device("cuda", 1)), train(make(gpu)))
    assert torch.cuda.current_device() == 0


def test_another_thread(gpu: str) -> None:
    import threading

    found: list[dict[str, Tensor]] = []
    worker = threading.Thread(target=lambda: found.append(train(make(gpu))))
    worker.start()
    worker.join()
    agree.assert_agree(found[0], train(make(gpu)))


# ---- nothing waits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(None, None), (2.0, 3.0), "device"], ids=str)
def test_the_host_never_waits(weights: Any, gpu: str, never_waits: Any) -> None:
    if weights == "device":
        weights = (torch.tensor(2.0, device=DEVICE), torch.tensor(3.0, device=DEVICE))
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3)).to(DEVICE)
    lr = torch.tensor(0.01, device=DEVICE)
    optimizer = af.AdamW(model.parameters(), lr=lr, max_grad_norm=1.0, backend=gpu)
    x, scale = torch.randn(8, 30, device=DEVICE), torch.tensor(4.0, device=DEVICE)

    def one_window() -> None:
        for weight in weights:
            (model(x).square().mean() * scale).backward()
            optimizer.accumulate(weight)
        optimizer.grad_scale = scale
        optimizer.step(normalizer=scale)
        del optimizer.grad_scale

    one_window()
    torch.cuda.synchronize()
    with never_waits():
        for _ in range(70):  # beyond two looks at the count of skipped steps
            one_window()
            optimizer.zero_grad()
    assert int(optimizer.skipped_steps) == 0


# ---- graphs ---------------------------------------------------------------------------------------------------------


def problem(gpu: str) -> tuple[list[Tensor], Any, Tensor, list[Tensor], Callable[[], None]]:
    """Parameters, optimizer, lr, what backward reads, and one window of three micro-batches."""
    params = [p.detach().to(DEVICE).requires_grad_() for p in random_params([(40, 7), (CHUNK + 3,), (5,)])]
    lr = torch.tensor(0.05, device=DEVICE)
    optimizer = af.AdamW(params, lr=lr, betas=(0.5, 0.7), weight_decay=0.3, max_grad_norm=0.5, backend=gpu)
    targets = [torch.zeros_like(p) for p in params]

    def one_window() -> None:
        for micro in range(3):
            loss = sum(((p - t) * (micro + 1)).square().sum() for p, t in zip(params, targets, strict=True))
            loss.backward()
            optimizer.accumulate(weight=micro + 1.0)
        optimizer.step()

    return params, optimizer, lr, targets, one_window


def warm_up(one_window: Callable[[], None]) -> None:
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        for _ in range(2):
            one_window()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)


def needs_capture(gpu: str) -> None:
    if gpu == "triton" and _native._C is None:
        pytest.skip("without the native module's table a plan cannot be known to be unchanged")


def test_a_captured_window_gives_the_bits_of_eager_ones(gpu: str) -> None:
    needs_capture(gpu)
    found = []
    for captured in (True, False):
        params, optimizer, lr, targets, one_window = problem(gpu)
        warm_up(one_window)
        run = one_window
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one_window()
            run = graph.replay
        for step in range(4):
            lr.fill_(0.05 / (step + 1))
            for target in targets:
                target.fill_(0.1 * step)
            run()
        found.append(everything(optimizer) | {"norm": optimizer.grad_norm.clone()})
        assert optimizer.state[params[0]]["step"].item() == 6
    agree.assert_agree(found[0], found[1])


def test_eager_calls_between_replays_leave_the_graph_alone(gpu: str) -> None:
    needs_capture(gpu)
    found = []
    for captured in (True, False):
        _, optimizer, _, targets, one_window = problem(gpu)
        warm_up(one_window)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                one_window()
        for step in range(6):
            for target in targets:
                target.fill_(0.1 * step)
            if captured and step % 2 == 0:
                graph.replay()
            else:
                one_window()
        found.append(everything(optimizer))
    agree.assert_agree(found[0], found[1])


def test_a_capture_before_the_first_step_is_refused(gpu: str) -> None:
    needs_capture(gpu)
    params, optimizer, _, _, one_window = problem(gpu)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="make one whole step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        one_window()
    optimizer.zero_grad()
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param, old)


def test_a_tensor_that_moved_since_the_warm_up_is_refused(gpu: str) -> None:
    needs_capture(gpu)
    params, optimizer, _, _, one_window = problem(gpu)
    warm_up(one_window)
    params[1].data = params[1].data.clone()
    with pytest.raises(RuntimeError, match="make one whole step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        one_window()
    optimizer.zero_grad()


def test_gradients_in_the_memory_of_compiled_graphs_are_copied(gpu: str) -> None:
    """With reduce-overhead each backward pass writes the same memory again."""
    found = []
    for mode in (None, "reduce-overhead"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(DEVICE)
        forward: Any = net if mode is None else torch.compile(net, mode=mode)
        optimizer = af.SGD(net.parameters(), lr=0.1, backend=gpu)
        data = torch.randn(3, 16, 64, device=DEVICE)
        for _ in range(6):  # some to warm up, some recorded, some replayed
            for x in data:
                torch.compiler.cudagraph_mark_step_begin()
                forward(x).square().mean().backward()
                optimizer.accumulate()
            optimizer.step()
        found.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


# ---- a forked process -----------------------------------------------------------------------------------------------

FORKED = """
import multiprocessing, torch, accumfused as af

def child(param, answers):
    answer = "no error"
    try:
        af.AdamW([param], backend="cuda")
    except Exception as error:
        answer = str(error)
    answers.put(answer)

torch.zeros(1, device="cuda")
answers = multiprocessing.get_context("fork").SimpleQueue()
process = multiprocessing.get_context("fork").Process(target=child, args=(torch.zeros(1, requires_grad=True), answers))
process.start()
print(answers.get())
process.join()
"""


def test_a_fork_after_cuda_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert "start it with the spawn method" in done.stdout, done.stderr
