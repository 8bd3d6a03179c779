"""Parameters and states in fewer bits through the CUDA kernels, over the emulation: the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import random_params
from test_cuda_emulated import cuda, machine  # noqa: F401  # fixtures
from test_formats import assert_agree, each_rule, each_states, each_weights, reference_run, run

from accumfused import _native
from accumfused.backends.cuda import CudaBackend

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

SIZES = (0, 3, 129, 2 * 2048 + 130)  # a few blocks, and two rows of the loops for packed formats

each_grad = pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@each_grad
@each_states
@each_weights
@each_rule
def test_every_format_gives_the_reference_bits(
    rule: str, weights: str, states: str, grad_dtype: torch.dtype, cuda: CudaBackend
) -> None:
    from cases import case_named

    actual = run(case_named(rule), cuda, weights, states, grad_dtype, SIZES)
    assert_agree(actual, reference_run(rule, weights, states, grad_dtype, SIZES))
