"""The one door of the tests to what is private in the package."""

from __future__ import annotations

from typing import Any

import accumfused as af
from accumfused import _native, backends
from accumfused.accumulation import Phase


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


def open_window(optimizer: Any) -> dict[str, Any]:
    """What the open window holds, by name: the accumulators, and what it knows of the weights; of none: nothing."""
    runtime = getattr(optimizer, "_runtime", None)
    if runtime is None or runtime.window.phase is not Phase.OPEN:
        return {}
    window = runtime.window
    held = {f"accumulator {row}": value for row, value in enumerate(window.accumulators)}
    return held | {"total": window.total, "micro-batches": window.micro_batches, "held": tuple(window._held)}


def native() -> Any:
    """The native module, or None."""
    return _native._C


def forget_what_loads() -> None:
    """The CUDA kernels are asked again whether they load on a GPU."""
    backends._loads_on.cache_clear()
