"""The one door of the tests to what is private in the package."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import accumfused as af
from accumfused import _native, backends
from accumfused.accumulation import Phase


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


def version(tensor: Tensor | None) -> int:
    """How often it was written, as torch counts; nothing public tells it."""
    return -1 if tensor is None else tensor._version
