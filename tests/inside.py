"""The one door of the tests to what is private in the package."""

from __future__ import annotations

from typing import Any

import accumfused as af
from accumfused import _native, backends
from accumfused.accumulation import Phase


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


def accumulators(optimizer: af.FusedOptimizer) -> list[Any]:
    """The tensors of its window's sums, None where a parameter has none."""
    return optimizer._runtime.window.accumulators


def writes(tensor: Any) -> int:
    """How often it was written."""
    return int(tensor._version)
