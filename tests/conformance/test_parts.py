"""Parts of a tensor get the bits of the whole: an element's noise depends on its place there, whatever the backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from layouts import edges
from places import INTERPRETED, ON_CPU, ON_GPU, Place
from problems import Loop, Problem, Tail, assert_conforms, expected, play
from torch import Tensor

from accumfused.formats import codecs
from accumfused.formats.numeric import CHUNK

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
SIZES = (CHUNK + 4500, 300)
# Where the parts begin: off every boundary, or at a block of 8-bit states. The second one has two chunks of its own.
CUTS = (0, 1, CHUNK + 3, CHUNK + 4097)
BLOCK_CUTS = (0, codecs.BLOCK, CHUNK + 2 * codecs.BLOCK, CHUNK + 4096 + codecs.BLOCK)
FORMATS = [
    ("split8", "fp32"), ("bf16_stochastic", "fp32"), ("fp32", "bf16"), ("split8", "bf16"),
    ("fp32", "8bit"), ("split8", "8bit"), ("bf16_stochastic", "8bit"),
]  # fmt: skip
# Without clipping: each part would have a norm of its own.
LOOP, TAIL = Loop(((), (), (3.0, 0.7, 5.0)), closed=True), Tail(None)


def problem(weights: str, states: str, sizes: tuple[int, ...] = SIZES, origin: int = 0) -> Problem:
    return Problem(
        "adamw", torch.bfloat16, weights, states, LOOP, TAIL, edges=edges(*sizes), origins=(origin,) * len(sizes)
    )


def assert_parts_conform(whole: Problem, cuts: tuple[int, ...], place: Place) -> None:
    """The parts' numbers, one after the other, are the whole tensors'; each has the step count and the seed."""
    sizes = [layout.shape[0] for layout in whole.layouts]
    found = []
    for begin, end in zip(cuts, (*cuts[1:], max(sizes)), strict=True):
        origins = tuple(origin + min(begin, size) for origin, size in zip(whole.origins, sizes, strict=True))
        part = Problem(**{**vars(whole), "part": (begin, end), "origins": origins})
        found.append(play(part, place.backend, place.device)[0])
    for name, value in expected(whole)[0].items():
        if name.startswith("outcome") or name == "skipped":
            continue
        if value.numel() == 1:
            assert all(torch.equal(part[name], value) for part in found), name
        else:
            assert_same_bits(torch.cat([part[name] for part in found]), value, name)


@pytest.mark.parametrize(("weights", "states"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_parts_are_rounded_as_the_whole(weights: str, states: str, place: Place) -> None:
    assert_parts_conform(problem(weights, states), BLOCK_CUTS if states == "8bit" else CUTS, place)


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_beyond_4g_elements_parts_of_whole_chunks_are_rounded_as_the_whole(states: str, place: Place) -> None:
    """Across the boundary, behind which noise has another key."""
    if not (place.is_slow and states == "fp32"):
        assert_parts_conform(problem("split8", states, (CHUNK + 130,), 2**33 - CHUNK), (0, CHUNK), place)


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize(("states", "origin"), [("bf16", 2**32 - 5), ("8bit", 2**40 + 2**32 - 5 - CHUNK)])
def test_a_chunk_across_4g_elements_is_rounded_as_by_the_reference(states: str, origin: int, place: Place) -> None:
    """It begins with the second element of a pair, which has one hash."""
    size = 300 if place.is_slow else CHUNK + 130
    assert_conforms(problem("split8", states, (size,), origin), place.backend, place.device)


# ---- the noise itself -----------------------------------------------------------------------------------------------


def test_a_chunk_keeps_the_key_of_its_first_element() -> None:
    key = codecs.key(torch.tensor(5), torch.tensor(7), 3)
    found = codecs.noise(key, CHUNK + 100, 2**32 - 5)
    assert torch.equal(found[:5], codecs.noise(key, CHUNK, 2**32 - CHUNK)[-5:])
    assert not torch.equal(found[5:105], codecs.noise(key ^ 1, 100))
    assert torch.equal(found[CHUNK:], codecs.noise(key ^ 1, CHUNK + 95)[CHUNK - 5 :])
    assert torch.equal(codecs.noise(key, 100, 2**32 + 7), codecs.noise(key ^ 1, 107)[7:])


@pytest.mark.parametrize(("weights", "states"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_another_origin_gives_other_bits(weights: str, states: str) -> None:
    found: list[Any] = [expected(problem(weights, states, (3000,), origin))[0] for origin in (1, codecs.BLOCK + 1)]
    assert any(not torch.equal(value, found[1][name]) for name, value in found[0].items())


def deviations(counts: Tensor) -> float:
    """Of chi-square from what it is where all cases are as frequent, in standard deviations."""
    mean, freedom = float(counts.double().mean()), counts.numel() - 1
    return (float(((counts - mean) ** 2 / mean).sum()) - freedom) / (2 * freedom) ** 0.5


def along_a_tensor() -> Tensor:
    return codecs.noise(codecs.key(torch.tensor(5), torch.tensor(7), 3), 1 << 21).view(-1, 8)


def along_steps() -> Tensor:
    """An element is 8 behind itself in the step before, and 9 behind its neighbour."""
    keys = [codecs.key(torch.tensor(5), torch.tensor(step), 3) for step in range(1, 1 << 13)]
    return torch.stack([codecs.noise(key, 8) for key in keys])


@pytest.mark.parametrize("draw", [along_a_tensor, along_steps])
def test_each_element_has_uniform_noise_that_knows_of_no_other(draw: Callable[[], Tensor]) -> None:
    """The leading bits of all streams, for both elements of a pair: alone, and beside those of other elements."""
    found = draw()
    leading = [((codecs.stream(found, number) >> 28) & 15).long() for number in range(3)]
    for first, second in itertools.product(leading, leading):
        for element, distance in itertools.product((0, 1), (0, 1, 2, 3, 8, 9, 128, 1024)):
            if distance == 0 and first is second:
                continue
            others = second.flatten()[element + distance :: 8]
            pairs = 16 * first[: len(others), element] + others
            counts = torch.bincount(pairs, minlength=256)
            assert abs(deviations(counts)) < 6, (element, distance)
            assert abs(deviations(counts.view(16, 16).sum(1))) < 6, element
    finer = (codecs.stream(found, 0) >> 20) & 0xFFF
    for element in (0, 1):
        assert abs(deviations(torch.bincount(finer[:, element].long(), minlength=4096))) < 6, element


def test_no_key_has_noise_like_that_of_another() -> None:
    """Of steps, seeds and tensors. Some multipliers, as keys could be, resemble each other: a few pairs show it."""
    own = (
        {(1, step, 0) for step in range(256)}
        | {(seed, 1, 0) for seed in range(64)}
        | {(1, 1, row) for row in range(64)}
    )
    keys = [codecs.key(torch.tensor(seed), torch.tensor(step), row) for seed, step, row in sorted(own)]
    signs = torch.stack([1.0 - 2 * (codecs.noise(key, 1 << 16) < 0) for key in keys])
    found = (signs @ signs.T / 2**8).triu(1)  # in standard deviations, each of 2^16 elements
    assert float(found.abs().max()) < 5.5
