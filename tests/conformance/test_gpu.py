"""GPUs on a GPU, beyond the bits that test_bits.py compares: large tensors, streams, graphs, and that nothing waits."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from captured_window import Window
from compare import assert_same_bits, everything
from layouts import edges
from problems import Problem, assert_conforms
from table import ADAMW_CASE, STATES, WEIGHTS, case_named, random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af
from accumfused import backends, compiled
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.backends.several import SeveralDevices
from accumfused.formats.numeric import CHUNK

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    """The name of each backend for GPUs that runs here."""
    reason = backends.why_not(request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def make(name: str) -> Any:
    if name == "triton":
        return importlib.import_module("accumfused.backends.triton.backend").TritonBackend()
    return CudaBackend()


def assert_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def test_auto_takes_the_cuda_kernels_and_each_devices_own() -> None:
    param = torch.zeros(3, device=DEVICE, requires_grad=True)
    optimizer = af.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert inside.backend(optimizer).name == "cuda", backends.why_not("cuda", DEVICE)
    both = backends.select("auto", [torch.device("cpu"), DEVICE])
    assert isinstance(both, SeveralDevices)
    assert {device.type: backend.name for device, backend in both.backends.items()} == {"cpu": "cpu", "cuda": "cuda"}


@pytest.mark.parametrize("name", ["sgd_dampening", "adamw_amsgrad"])
def test_the_cpu_and_a_gpu_give_the_numbers_of_the_cpu(name: str) -> None:
    case = case_named(name)
    found = []
    for places in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")):
        shapes = [(CHUNK + 5,), (70,), (3 * CHUNK,)]
        params = [p.detach().to(place).requires_grad_() for p, place in zip(random_params(shapes), places, strict=True)]
        optimizer = case.make(params, max_grad_norm=0.5)
        for seed in range(4):
            set_grads(params, [g.to(p.device) for g, p in zip(random_grads(params, seed), params, strict=True)])
            if seed < 2:
                optimizer.accumulate(weight=seed + 1.0, last=seed == 1)
            if seed > 0:
                optimizer.step()
                optimizer.zero_grad()
        found.append({str(index): param.detach().cpu() for index, param in enumerate(params)})
    for other in found[1:]:
        assert_agree(other, found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_chunks_in_every_block(dtype: torch.dtype, gpu: str) -> None:
    problem = Problem("adamw", dtype, edges=edges(3000 * CHUNK + 77, 5 * CHUNK, 3))
    assert_conforms(problem, make(gpu), "cuda")


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
        inside.sleep_on_the_gpu(50_000_000)  # so that kernels on another stream would run first
        found = train(make(gpu))
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    assert_agree(found, expected)


def test_a_device_that_is_not_the_current_one(gpu: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert_agree(train(make(gpu), device=torch.device("cuda", 1)), train(make(gpu)))
    assert torch.cuda.current_device() == 0


def test_another_thread(gpu: str) -> None:
    found: list[dict[str, Tensor]] = []
    worker = threading.Thread(target=lambda: found.append(train(make(gpu))))
    worker.start()
    worker.join()
    assert_agree(found[0], train(make(gpu)))


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


def warm_up(one_window: Callable[[], None], times: int = 2) -> None:
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        for _ in range(times):
            one_window()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)


def needs_capture(gpu: str) -> None:
    if gpu == "triton" and compiled.unavailable is not None:
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
    assert_agree(found[0], found[1])


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
    assert_agree(found[0], found[1])


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


needs_cuda = pytest.mark.skipif(backends.why_not("cuda", DEVICE) is not None, reason="needs the CUDA kernels")


def in_bits(weights: str, states: str, sizes: tuple[int, ...], backend: Any) -> tuple[Any, list[Tensor]]:
    dtype, options = WEIGHTS[weights]
    params = [p.detach().to(dtype).requires_grad_() for p in random_params([(size,) for size in sizes])]
    known = {"state_dtype": STATES[states], "state_dtype_min_numel": 2, "rounding_seed": 17}
    return ADAMW_CASE.make(params, backend, **known, **options), params


@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
@needs_cuda
def test_root_and_quotient_are_ieee_over_many_numbers(weights: str) -> None:
    """Where the loops for packed formats compute them without a test of each: 2^22 moments of all sizes."""
    exponents = torch.arange(2**22, device="cpu") // 128 % 50 - 25
    powers = (exponents + 127 << 23).int().view(torch.float32)  # a GPU's 2.0 ** n may be off by a bit
    found = []
    for backend, device in ((CudaBackend(), "cuda"), (ReferenceBackend(), "cpu")):
        with torch.device(device):
            optimizer, params = in_bits(weights, "int8", (2**22,), backend)
            scale = powers.to(device)
            for step in range(3):
                params[0].grad = (random_grads(params, step)[0] * scale).bfloat16()
                optimizer.step()
            found.append({name: value.cpu() for name, value in everything(optimizer).items()})
    assert_agree(found[0], found[1])


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
@needs_cuda
def test_each_replay_rounds_with_the_noise_of_its_own_step(weights: str, states: str) -> None:
    found = []
    for captured in (True, False):
        with torch.device("cuda"):
            optimizer, params = in_bits(weights, states, (CHUNK + 5000, 70), CudaBackend())
            window = Window(optimizer, params, *(random_grads(params, micro, torch.bfloat16) for micro in range(2)))
        warm_up(window, 1)
        again = window
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                window()
            again = graph.replay
        for _ in range(2):
            again()
        found.append(everything(optimizer))
        assert int(optimizer.state[params[0]]["step"]) == 3
    assert_agree(found[0], found[1])


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
