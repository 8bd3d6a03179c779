"""The one door of the tests to what is private in the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

import accumfused as af
from accumfused import distributed


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._runtime.backend = backend


@contextlib.contextmanager
def sizes_on_the_way(bundled_bytes: int, bucket_bytes: int) -> Iterator[None]:
    """Accumulators below the one size travel together, and larger ones in pieces of the other."""
    with (
        mock.patch.object(distributed, "BUNDLED_BYTES", bundled_bytes),
        mock.patch("accumfused.transport.BUCKET_BYTES", bucket_bytes),
    ):
        yield


def norm_fails(optimizer: af.FusedOptimizer) -> contextlib.AbstractContextManager[Any]:
    """A block in which the backend has no memory to take a norm."""
    backend = optimizer._runtime.backend
    return mock.patch.object(backend, "norm", side_effect=RuntimeError("out of memory"))
