"""The one door of the tests to what is private in the package."""

from __future__ import annotations

from typing import Any

import accumfused as af


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


def plan_of(optimizer: af.FusedOptimizer) -> Any:
    """The plan for the parameters and states of now: another object where something has changed."""
    return optimizer._plan()
