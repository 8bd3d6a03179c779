"""What every test shares: a seed, torch's number of threads given back, and the backends of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accumfused import _native


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The same random numbers in every run, and no thread count or float mode left behind.

    One thread unless a test asks for more: over small tensors, on a busy machine, threads mostly wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend that can run here."""
    if request.param == "cpu":
        need_native()
    return request.param


@pytest.fixture
def native() -> None:
    """Skips the test where there is no native module."""
    need_native()


def need_native() -> None:
    if _native.unavailable is not None:
        pytest.skip(_native.unavailable)
