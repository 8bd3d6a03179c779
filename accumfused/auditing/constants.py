"""Numbers without a graph that one micro-batch computes of all its samples, and that enter its loss.

To a graph they are constants: the mean of the rewards, for instance, that advantages are measured from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_REDUCTIONS = {
    "mean", "sum", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min", "median", "norm", "quantile",
    "nanmean", "nansum",
}  # fmt: skip


class Constants:
    """Follows such numbers through the calls of torch; `sizes` has the lengths of what was reduced, if they entered."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self.sizes: set[int] = set()

    def see(self, name: str, given: Sequence[Any], result: Any) -> None:
        """A call of torch, and what it has returned."""
        tensors = [each for each in given if isinstance(each, Tensor)]
        size = max((self._known.get(each, 0) for each in tensors), default=0)
        first = tensors[0] if name in _REDUCTIONS and tensors else None
        if first is not None and not first.requires_grad and first.ndim and len(first) > 1:
            size = size or -len(first)  # if the result has lost these rows
        if not size:
            return
        for each in result if isinstance(result, list | tuple) else [result]:
            if not isinstance(each, Tensor) or not each.is_floating_point():
                continue
            if each.requires_grad:
                self.sizes |= {size} if size > 0 and each.numel() > 1 and torch.is_grad_enabled() else set()
            elif size > 0 or not each.ndim or len(each) != -size:
                self._known[each] = abs(size)
