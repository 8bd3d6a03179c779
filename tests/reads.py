"""A watch over reads of tensors' values, for the tests that say that the host never waits.

On a CPU a waiting call costs nothing and changes nothing, so the calls themselves are watched: every one that reads a
tensor's value goes through one of a few operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten
NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
READS = {getattr(aten, name).default for name in NAMES}
LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # tensor[i] = 2.0 makes a tensor of the CPU of it


class NoReads(TorchDispatchMode):
    """Refuses to read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self._literals: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device"
        result = func(*args, **(kwargs or {}))
        if func in LITERALS:
            self._literals.append(result)
        copies_one = func is aten.copy_.default and any(args[1] is literal for literal in self._literals)
        assert not copies_one, "a number that is assigned to an element goes through the CPU's memory, and waits"
        return result
