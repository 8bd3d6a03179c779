"""The sum over chunks has one order of additions, in whatever number of kernels a device makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accumfused.numeric import LANES, sum_partials

SIZES = [0, 1, 5, *(n + off for n in (LANES, 2 * LANES, 32 * LANES) for off in (-1, 0, 1)), 200_000]
every_size = pytest.mark.parametrize("size", SIZES)


class Operators(TorchDispatchMode):
    """Counts what would be kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def random_partials(size: int) -> Tensor:
    """Of so many sizes that each other order of additions gives another sum."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-60, 60, (size,), generator=generator)
    return torch.rand(size, generator=generator).mul(torch.ldexp(torch.ones(size), exponents))


def one_after_the_other(partials: Tensor) -> Tensor:
    """As docs/arithmetic.md says it."""
    lanes = [0.0] * LANES
    for index, value in enumerate(partials.tolist()):
        lanes[index % LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[lane] + lanes[lane + half] for lane in range(half)]
    return torch.tensor(lanes[0], dtype=torch.float64)


@every_size
def test_the_order_is_that_of_the_arithmetic(size: int) -> None:
    partials = random_partials(size)
    assert torch.equal(sum_partials(partials), one_after_the_other(partials))


@every_size
def test_a_gpus_few_kernels_make_the_same_additions(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's operators for a GPU, on the CPU."""
    partials = random_partials(size)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with Operators() as seen:
        found = sum_partials(partials)
    assert torch.equal(found, one_after_the_other(partials))
    assert seen.count < 20
    for bad in (torch.nan, torch.inf):
        if size:
            partials[-1] = bad
            assert_same_bits(sum_partials(partials).float(), torch.tensor(bad))


def test_where_torch_must_be_deterministic_it_does_not_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses cumsum on GPUs then."""
    partials = random_partials(3 * LANES)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(sum_partials(partials), one_after_the_other(partials))
