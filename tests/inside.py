"""The one door of the tests to what is private in the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

import torch

import accumfused as af
from accumfused import _native


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


def native() -> Any:
    """The native module."""
    return _native._C


def negated(values: torch.Tensor) -> torch.Tensor:
    """torch negates it lazily."""
    return torch._neg_view(values)


def efficient_zeros() -> torch.Tensor:
    """Three zeros without memory, as torch makes them for gradients that are none."""
    return torch._efficientzerotensor(3, device=torch.get_default_device())


def plan(optimizer: af.FusedOptimizer) -> Any:
    """The plan of the last step."""
    return optimizer._runtime.plan
