"""Parameters and states in fewer bits on a GPU: the bits of the reference on the CPU, in graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import everything
from table import ADAMW_CASE, case_named, random_grads
from test_cuda_formats import Window
from test_formats import CHUNK, GRADS, assert_agree, each_rule, each_states, each_weights, make, reference_run, run
from torch import Tensor

from accumfused import backends
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SIZES = (0, 1, 129, 3 * CHUNK + 2048 + 130)


@pytest.fixture(autouse=True)
def on_gpu() -> Any:
    """The kernels, and tensors made on the GPU from here on."""
    reason = backends.why_not("cuda", DEVICE)
    if reason is not None:
        pytest.skip(reason)
    with torch.device("cuda"):
        yield


def on_cpu(rule: str, weights: str, states: str, grad_dtype: torch.dtype, **settings: Any) -> dict[str, Tensor]:
    with torch.device("cpu"):
        return reference_run(rule, weights, states, grad_dtype, SIZES, **settings)


@each_rule
@each_weights
@each_states
def test_every_format_gives_the_reference_bits(rule: str, weights: str, states: str) -> None:
    for grad_dtype in GRADS:
        actual = run(case_named(rule), CudaBackend(), weights, states, grad_dtype, SIZES)
        assert_agree(actual, on_cpu(rule, weights, states, grad_dtype))


@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
def test_root_and_quotient_are_ieee_over_many_numbers(weights: str) -> None:
    """Where the loops for packed formats compute them without a test of each: 2^22 moments of all sizes."""
    exponents = torch.arange(2**22, device="cpu") // 128 % 50 - 25
    powers = (exponents + 127 << 23).int().view(torch.float32)  # a GPU's 2.0 ** n may be off by a bit
    found = []
    for backend, device in ((CudaBackend(), "cuda"), (ReferenceBackend(), "cpu")):
        with torch.device(device):
            optimizer, params = make(ADAMW_CASE, backend, weights, "int8", (2**22,), max_grad_norm=None)
            scale = powers.to(device)
            for step in range(3):
                params[0].grad = (random_grads(params, step)[0] * scale).bfloat16()
                optimizer.step()
            found.append({name: value.cpu() for name, value in everything(optimizer).items()})
    assert_agree(found[0], found[1])


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])
def test_a_captured_window_gives_the_bits_of_eager_ones(weights: str, states: str) -> None:
    """Each replay with the noise of its own step."""
    found = []
    for captured in (True, False):
        optimizer, params = make(ADAMW_CASE, CudaBackend(), weights, states, (CHUNK + 5000, 70))
        window = Window(optimizer, params)
        stream = torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            window()
        torch.cuda.current_stream(DEVICE).wait_stream(stream)
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
