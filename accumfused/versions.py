"""Refuses a torch that is too old, on import."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

OLDEST_TORCH = (2, 11)  # as in pyproject.toml

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"accumfused needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and {torch.__version__} is installed; "
        "pip install --upgrade torch"
    )


def incrementing(tensors: Iterable[Tensor]) -> partial[Any]:
    """The call of a C function that does what `torch.autograd.graph.increment_version` does in Python."""
    return partial(torch._C._increment_version, tensors)  # noqa: SLF001
