"""Numbers without a graph that one micro-batch computes of all its samples, and that enter its loss.

To a graph they are constants: the mean of the rewards, for instance, that advantages are measured from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_REDUCTIONS = {
    "mean", "sum", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min", "median", "norm", "quantile",
    "nanmean", "nansum", "bincount", "histc",
}  # fmt: skip


class Constants:
    """Follows such numbers through the calls of torch; `sizes` has the lengths of what was reduced, if they entered."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self.sizes: set[int] = set()

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call of torch, and what it has returned."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        size = max((self._known.get(each, 0) for each in tensors), default=0)
        if not size and name in _REDUCTIONS and len(tensors) == 1 and not tensors[0].requires_grad:
            size = _lost(name, tensors[0], args, kwargs)
        for each in (result if isinstance(result, list | tuple) else [result]) if size else ():
            if isinstance(each, Tensor) and each.requires_grad:
                self.sizes |= {size} if each.numel() > 1 and torch.is_grad_enabled() else set()
            elif isinstance(each, Tensor):
                self._known[each] = size


def _lost(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The length of the first dimension, if a reduction is along it; else 0."""
    place = 2 if name in ("norm", "quantile") else 1
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    is_first = not isinstance(dims, list | tuple) or 0 in dims or -tensor.ndim in dims or name in ("bincount", "histc")
    return len(tensor) if tensor.ndim and len(tensor) > 1 and is_first else 0
