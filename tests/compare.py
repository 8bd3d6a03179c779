"""How two tensors, or all that two optimizers hold, are compared: within one row of TOLERANCES, or bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# One rounding of fp32 is 6e-8 of the number that it hits.
TOLERANCES = {
    # Some ten roundings an element and step, over at most eight steps; an update is a difference of numbers around 1,
    # and where the moments' terms cancel only the absolute error is bounded.
    "fp64 oracle": {"rtol": 5e-6, "atol": 2e-6},
    # Both sides round in fp32, in different orders.
    "torch.optim": {"rtol": 1e-5, "atol": 4e-6},
    # A sum of squares in fp32: 32 rows in sequence, then ten halvings, so some 40 roundings at the very most.
    "norm": {"rtol": 2e-6, "atol": 0.0},
    # A sum of micro-batches in fp32: one multiplication and one addition each.
    "window": {"rtol": 2e-6, "atol": 1e-6},
    # Two ways through the same small model in fp32: autograd sums a batch in another order than its parts.
    "model": {"rtol": 2e-5, "atol": 2e-6},
    # Of a whole matrix: |error| / |matrix|. Fifteen products of bf16 matrices, where each number is rounded by up to
    # 2^-9, and a b of -4.8 multiplies a Gram matrix's error. torch's own Muon errs by 0.011 to 0.025 for Gaussian ones.
    "bf16 Newton-Schulz": {"rtol": 0.0, "atol": 0.03},
}


def assert_close(actual: Tensor, expected: Tensor, tolerance: str, what: str = "") -> None:
    """Compares in float64 within one row of TOLERANCES."""
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().cpu().double(), **TOLERANCES[tolerance],
        msg=lambda text: f"{what} against {tolerance}: {text}",
    )  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that zeros of different sign differ; every NaN is one NaN (which one is not
    specified).
    """
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
        tensor = tensor.detach().contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor.detach().cpu()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} {expected.dtype}"
    differ = bits(actual) != bits(expected)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first "
        f"{actual[differ].flatten()[0].item()!r} against {expected[differ].flatten()[0].item()!r}"
    )


def assert_all_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and tensors of the same bits under them."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters, states and step counts, by name."""
    found = {}
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"param {index}"] = param.detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            found[f"{name} {index}"] = value.detach().clone()
    return found
