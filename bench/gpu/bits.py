"""Where the bits of two sets of tensors differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Of each tensor whose bits differ: the first index, both values and their bits, and how many differ."""
    several: list[dict[str, Any]] = []
    for name, right in expected.items():
        left = found.get(name)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            several.append({"tensor": name, "found": str(left if left is None else (left.shape, left.dtype))})
            continue
        left, right = left.detach().cpu().flatten(), right.detach().cpu().flatten()
        differ = (bits(left) != bits(right)).nonzero().flatten()
        if len(differ):
            at = int(differ[0])
            several.append(
                {"tensor": name, "differ": len(differ), "of": len(left), "first": at, "last": int(differ[-1])}
                | {"found": left[at].item(), "expected": right[at].item()}
                | {"found_bits": _hex(left[at]), "expected_bits": _hex(right[at])}
            )
    return several


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that zeros of different sign differ; every NaN is one NaN."""
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _hex(value: Tensor) -> str:
    width = 8 * value.element_size()
    return f"0x{int(bits(value.reshape(1))[0]) & (1 << width) - 1:0{width // 4}x}"
