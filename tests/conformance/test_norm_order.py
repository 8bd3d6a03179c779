"""The sums of squares, in a chunk and over chunks, have one order of additions, in whatever number of kernels."""

from __future__ import annotations

import pytest
import torch
from compare import assert_same_bits
from device import Kernels
from harness import GPU
from places import INTERPRETED, ON_CPU, ON_GPU, Place
from problems import bare_plan
from reference import ReferenceBackend
from torch import Tensor

from accumfused.core.protocol import Fold, Scaling
from accumfused.core.rows import Grads
from accumfused.formats.numeric import CHUNK, LANES, sum_partials

SIZES = [0, 1, 5, *(n + off for n in (LANES, 2 * LANES, 32 * LANES) for off in (-1, 0, 1)), 200_000]
every_size = pytest.mark.parametrize("size", SIZES)


def random_partials(size: int) -> Tensor:
    """Of so many sizes that each other order of additions gives another sum."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-60, 60, (size,), generator=generator)
    return torch.rand(size, generator=generator).mul(torch.ldexp(torch.ones(size), exponents))


def one_after_the_other(partials: Tensor) -> Tensor:
    """As docs/internals/arithmetic.md says it."""
    lanes = [0.0] * LANES
    for index, value in enumerate(partials.tolist()):
        lanes[index % LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[lane] + lanes[lane + half] for lane in range(half)]
    return torch.tensor(lanes[0], dtype=torch.float64)


@every_size
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpus_few_kernels_make_the_additions_of_the_arithmetic(
    size: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through torch's operators for a GPU too, on the CPU; where torch must be deterministic it refuses cumsum."""
    partials = random_partials(size)
    wanted = one_after_the_other(partials)
    assert torch.equal(sum_partials(partials), wanted)
    if GPU:
        assert torch.equal(sum_partials(partials.to("cuda")).cpu(), wanted)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if deterministic:
        monkeypatch.setattr(torch.Tensor, "cumsum", None)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with Kernels() as torchs:
        assert torch.equal(sum_partials(partials), wanted)
    assert deterministic or len(torchs.seen) < 20
    for bad in (torch.nan, torch.inf):
        if size:
            partials[-1] = bad
            assert_same_bits(sum_partials(partials).float(), torch.tensor(bad))


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
def test_the_sum_over_more_chunks_than_lanes(place: Place) -> None:
    """2 and half a unit of fp32; which way it is rounded small ones decide, each of which vanishes beside 2."""
    partials, found = torch.zeros(2500), []
    partials[:LANES], partials[0], partials[LANES] = 2.0**-53, 2.0, 2.0**-23
    for backend, device in ((ReferenceBackend(), "cpu"), (place.backend, place.device)):
        built = bare_plan(backend, [torch.empty(CHUNK * len(partials), device=device)])  # which nobody reads
        scaling = Scaling(built.device, normalization=0.3, max_grad_norm=0.7)
        found.append(backend.norm(built, None, partials.to(device), scaling).values.cpu())
    assert float(found[0][1]) * 0.3 > 2.0**0.5
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize("divisor", [2.0**-51, 2.0**-50])
def test_the_sum_below_which_a_small_divisor_has_no_norm(divisor: float, place: Place) -> None:
    found = []
    for backend, device in ((ReferenceBackend(), "cpu"), (place.backend, place.device)):
        built = bare_plan(backend, [torch.empty(1, device=device)])
        scaling = Scaling(built.device, normalization=divisor)
        sums = [torch.tensor([2.0**-100 * factor], device=device) for factor in (0.5, 0.99, 1.0, 1.5)]
        found.append([bool(backend.norm(built, None, each, scaling).values[1].isnan()) for each in sums])
    assert found == [[divisor < 2.0**-50] * 2 + [False] * 2] * 2


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
def test_the_sum_within_a_chunk(place: Place) -> None:
    """Of few lanes, or of few sizes that matter: in the norm of most gradients another order would not show."""
    generator, found = torch.Generator().manual_seed(0), []
    size, apart = 6 * LANES + 5, [2**power for power in range(11)]
    values = torch.randn(len(apart), size, generator=generator)
    for every, value in zip(apart, values, strict=True):
        value[torch.arange(size) % every != 0] = 0.0
    for backend, device in ((ReferenceBackend(), "cpu"), (place.backend, place.device)):
        built = bare_plan(backend, [torch.empty(size, device=device) for _ in apart])
        grads = Grads(values.to(device, copy=True))
        zeros = Grads(torch.zeros(size, device=device) for _ in apart)
        read, folded = torch.zeros(2, len(apart), device=device)
        backend.norm(built, grads, read, Scaling(built.device))
        backend.accumulate(built, Fold(grads, zeros, 1.0), folded)
        found.append(torch.stack([read, folded]).cpu())
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[0][0], found[0][1])
