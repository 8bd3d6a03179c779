"""GPUs on a GPU, beyond the bits that test_bits.py compares: large tensors, streams, and that nothing waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_close, assert_same_bits, everything
from gpu_runs import DEVICE, Card, Scaled, Windows, backend_named
from reference import ReferenceBackend
from table import ADAMW_CASE, STATES, WEIGHTS, case_named, random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af
from accumfused import backends
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.several import SeveralDevices
from accumfused.formats.numeric import CHUNK

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


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
    found = []
    for places in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")):
        shapes = [(CHUNK + 5,), (70,), (3 * CHUNK,)]
        params = [p.detach().to(place).requires_grad_() for p, place in zip(random_params(shapes), places, strict=True)]
        optimizer = case_named(name).make(params, max_grad_norm=0.5)
        for seed in range(4):
            set_grads(params, [g.to(p.device) for g, p in zip(random_grads(params, seed), params, strict=True)])
            if seed < 2:
                optimizer.accumulate(weight=seed + 1.0, last=seed == 1)
            if seed > 0:
                optimizer.step()
                optimizer.zero_grad()
        found.append({str(index): param.detach().cpu() for index, param in enumerate(params)})
    for other in found[1:]:
        assert_all_same_bits(other, found[0])


# ---- large tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_chunks_than_blocks_fit(dtype: torch.dtype, gpu: str) -> None:
    """The bits of the native kernels on the CPU: the reference would take half a minute."""
    drawn = [torch.randn(n, device=DEVICE) for n in (3000 * CHUNK + 77, 5 * CHUNK, 3)]
    found = []
    for backend, device in ((backend_named(gpu), "cuda"), (CpuBackend(), "cpu")):
        params = [values.to(device, copy=True).requires_grad_() for values in drawn]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
        for weight in (3.0, 0.7):
            for param, values in zip(params, drawn, strict=True):
                param.grad_dtype = dtype
                param.grad = values.to(device, dtype) * weight
            optimizer.accumulate(weight)
        optimizer.step()
        found.append({name: value.cpu() for name, value in everything(optimizer).items()})
    assert_all_same_bits(found[0], found[1])


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
        assert_same_bits(param.detach()[place].cpu(), -lr)
    assert_same_bits(param.detach()[-1].cpu(), -(lr * 3))
    assert int((param.detach() != -lr.item()).sum()) == 1
    assert_close(optimizer.grad_norm, torch.tensor(count + 8.0).double().sqrt(), "norm")


@pytest.mark.skipif(backends.why_not("cuda", DEVICE) is not None, reason="needs the CUDA kernels")
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
def test_root_and_quotient_are_ieee_over_many_numbers(weights: str) -> None:
    """Where the loops for packed formats compute them without a test of each: 2^22 moments of all sizes."""
    dtype, settings = WEIGHTS[weights]
    exponents = torch.arange(2**22, device="cpu") // 128 % 50 - 25
    powers = (exponents + 127 << 23).int().view(torch.float32)  # a GPU's 2.0 ** n may be off by a bit
    found = []
    for backend, device in ((CudaBackend(), "cuda"), (ReferenceBackend(), "cpu")):
        (param,) = (p.detach().to(device, dtype).requires_grad_() for p in random_params([(2**22,)]))
        optimizer = ADAMW_CASE.make([param], backend, state_dtype=STATES["8bit"], rounding_seed=17, **settings)
        for step in range(3):
            param.grad = (random_grads([param], step)[0] * powers).bfloat16().to(device)
            optimizer.step()
        found.append({name: value.cpu() for name, value in everything(optimizer).items()})
    assert_all_same_bits(found[0], found[1])


def test_fused_linears_in_16_bits_have_the_sums_of_autograd(gpu: str) -> None:
    """Numbers are so small that every sum is exact; cuBLAS adds products to fp32 sums."""
    width, found = 1024, []  # fuse_linears leaves smaller layers alone
    for fuses in (False, True):
        generator = torch.Generator().manual_seed(8)
        layer = torch.nn.Linear(width, width, bias=False, device=DEVICE, dtype=torch.bfloat16)
        layer.weight.data.copy_(torch.randn(width, width, generator=generator))
        optimizer: Any = af.AdamW(layer.parameters(), backend=gpu)
        handle = af.fuse_linears(layer, optimizer) if fuses else None
        assert handle is None or handle.fused, handle
        for last in (False, True):
            x, grad = (torch.randint(-2, 3, (4, width), generator=generator).to(DEVICE, torch.bfloat16) for _ in "xg")
            optimizer.backward((layer(x) * grad).sum(), 1, last)
        optimizer.step()
        found.append(everything(optimizer))
    assert_all_same_bits(found[1], found[0])


# ---- streams, threads, devices --------------------------------------------------------------------------------------


def on_a_side_stream(call: Callable[[], None]) -> None:
    with Card("cuda").on_side_stream():
        call()


def in_another_thread(call: Callable[[], None]) -> None:
    worker = threading.Thread(target=call)
    worker.start()
    worker.join()


@pytest.mark.parametrize(
    ("where", "options"),
    [
        (on_a_side_stream, {}),
        (in_another_thread, {}),
        (lambda call: call(), {"device": torch.device("cuda", 1)}),
        *[(lambda call: call(), {"bucket": size, "streams": 3 * many}) for size in (1, 2000, 2**30) for many in (0, 1)],
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_no_stream_thread_or_device_changes_a_bit(where: Any, options: dict[str, Any], gpu: str) -> None:
    """Nor do gradients that are released, of losses on three streams."""
    if "device" in options and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected, found = Windows(gpu), list[dict[str, Tensor]]()

    def train() -> None:
        run = Windows(gpu, **options)
        for _ in range(4):
            run.window()
        found.append(run.everything())

    where(train)
    for _ in range(4):
        expected.window()
    assert_all_same_bits(found[0], expected.everything())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "options",
    [{"weights": None}, {"weights": (2.0, 3.0)}, {"weights": "device"}, {"bucket": 2000}, {"kind": af.GradScaler}],
    ids=str,
)
def test_the_host_never_waits(options: dict[str, Any], gpu: str, never_waits: Any) -> None:
    run = (Scaled if "kind" in options else Windows)(gpu, **options)
    run.window()
    torch.cuda.synchronize(DEVICE)
    with never_waits():
        for _ in range(70):  # beyond two looks at the count of skipped steps
            run.window()
            for optimizer in run.optimizers:
                optimizer.zero_grad()
    assert [int(optimizer.skipped_steps) for optimizer in run.optimizers] == [0] * len(run.optimizers)


# ---- other processes ------------------------------------------------------------------------------------------------

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
