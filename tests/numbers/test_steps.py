"""What a window adds up to, and what a step takes: numbers that a reader can check by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accumfused as af

LR = 0.5


def one_parameter(backend: str, **options: float) -> tuple[nn.Parameter, af.SGD]:
    param = nn.Parameter(torch.full((4,), 8.0))
    return param, af.SGD([param], lr=LR, backend=backend, **options)


# ---- accumulators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closed_window_of_16_bit_gradients_is_fp32_and_the_next_backward_16_bit_again(
    backend: str, dtype: torch.dtype
) -> None:
    param, optimizer = one_parameter(backend)
    param.grad_dtype = dtype
    # Each is a bfloat16 and a float16. Their sum has too many bits for both, and is too large for a float16.
    slopes = (49152.0, 49152.0, 1 + 2**-7)
    for update in (1, 2):
        for number, slope in enumerate(slopes):
            (param * slope).sum().backward()
            assert param.grad.dtype == dtype
            optimizer.accumulate(last=number == 2)
        assert param.grad.dtype == torch.float32
        assert param.grad.tolist() == [sum(slopes)] * 4
        optimizer.step()
        assert param.grad is None
        assert param.grad_dtype == dtype
        assert param.tolist() == [8.0 - LR * update * sum(slopes)] * 4


def test_a_gradient_that_is_a_part_of_larger_memory_is_copied(backend: str) -> None:
    """An accumulator would keep all of that memory, which nobody else has."""
    param, optimizer = one_parameter(backend)
    param.grad = torch.empty(0).set_(torch.ones(8).untyped_storage(), 0, (4,))
    address = param.grad.data_ptr()
    optimizer.accumulate(last=True)
    assert param.grad.data_ptr() != address
    assert param.grad.tolist() == [1.0] * 4


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_each_step_has_its_own_norm_and_leaves_gradients_outside_of_windows_as_they_are(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    assert optimizer.grad_norm.isnan()
    norms: list[Any] = []
    for slope in (3.0, 4.0):
        grad = param.grad = torch.full((4,), slope)
        optimizer.step(normalizer=2)
        norms.append(optimizer.grad_norm)
        assert param.grad is grad
        assert grad.tolist() == [slope] * 4
    assert [(norm.item(), norm.shape, norm.dtype) for norm in norms] == [
        (value, (), torch.float32)
        for value in (3.0, 4.0)  # after normalization, before clipping
    ]
    torch.testing.assert_close(param.detach(), torch.full((4,), 8 - LR * (0.5 + 0.5)), rtol=1e-6, atol=0)


def test_no_norm_is_taken_where_none_is_wanted(backend: str) -> None:
    param, optimizer = one_parameter(backend)
    param.grad = torch.full((4,), torch.inf)
    optimizer.step()
    assert optimizer.grad_norm.isnan()
    assert not optimizer.step_was_skipped
    assert param.tolist() == [-torch.inf] * 4  # as in torch


def test_a_closure_may_fold_whole_windows(backend: str) -> None:
    param, optimizer = one_parameter(backend)

    def closure() -> Tensor:
        optimizer.zero_grad()
        for weight, slope in ((1, 2.0), (3, 6.0)):
            loss = (param * slope).sum()
            loss.backward()
            optimizer.accumulate(weight)
        return loss.detach()

    assert float(optimizer.step(closure)) == 4 * 8.0 * 6.0
    assert param.tolist() == [8 - LR * 5.0] * 4
    assert param.grad is None
