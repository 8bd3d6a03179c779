"""Operations of torch's that fail: memory runs out in the n-th."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Fault(TorchDispatchMode):
    """Within the block the n-th operation of torch's finds no memory; with None all do, and are counted."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_label = str(func).startswith("profiler.")
        self.seen += not is_label
        if self.seen == self.at and not is_label:
            raise MemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))
