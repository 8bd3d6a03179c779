"""Sums in bf16: every backend rounds them to the reference's bits, without bias, and with new noise each time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits
from device import NoReads
from layouts import PIECE, edges, shifted
from places import INSTRUCTION_SETS, INTERPRETED, ON_GPU, Place
from problems import GRADS, LOOPS, TAILS, Problem, assert_conforms, bare_plan, expected, play, problems
from reference import ReferenceBackend
from torch import Tensor

from accumfused.backends import TorchBackend, torch_kernels
from accumfused.backends.cpu import CpuBackend, address
from accumfused.backends.several import SeveralDevices
from accumfused.core.protocol import Fold
from accumfused.core.rounding import begin
from accumfused.core.rows import Grads
from accumfused.formats.numeric import CHUNK

# Triton 3.6 makes numbers of numpy's arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

COMPILED = [*INSTRUCTION_SETS, "emulated", *ON_GPU]
EVERYWHERE = ["reference", *COMPILED, *INTERPRETED, "torch"]
BF16 = torch.bfloat16


# ---- folds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way to fold."""

    factor: float
    before: float | None = None
    overwrites: bool = False
    in_place: bool = False  # the sums are the gradients
    on_device: bool = False
    rounds: bool = True  # by noise


KINDS = {
    "added": Kind(1.0),
    "added with a weight": Kind(0.7),
    "added with a weight on the device": Kind(0.7, 3.0, on_device=True),
    "the first with weights on the device": Kind(0.7, 0.0, on_device=True),
    "the first, of weight 0": Kind(0.0, 0.0, on_device=True),
    "of weight 0": Kind(0.0),
    "of weight 0 on the device": Kind(0.0, 3.0, on_device=True),
    "copied": Kind(1.0, overwrites=True),
    "copied with a weight": Kind(0.7, overwrites=True),
    "copied with a weight on the device": Kind(1.0, overwrites=True, on_device=True),
    "zeroed": Kind(0.0, overwrites=True),
    "multiplied where it lies": Kind(0.7, overwrites=True, in_place=True),
    "divided": Kind(0.75, overwrites=True, in_place=True, rounds=False),  # of which one in four is a tie
    "divided on the device": Kind(0.75, overwrites=True, in_place=True, on_device=True, rounds=False),
}
SIZES = (0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 500, 40)
SMALL = (0, 1, 15, 16, 17, PIECE - 1, PIECE, CHUNK + PIECE + 1, 500, 40)
ORIGINS = (0, 5, 0, 2**33 + 1, 3, CHUNK + 1, 0, 7)
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 3.3895e38, -3.4e38, 2.0**-133)


def drawn(sizes: Sequence[int], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Values of every size, and special ones."""
    made = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(100 * seed + index)
        values = torch.randn(size, generator=generator) * torch.exp2(torch.arange(size) % 11 - 6.0)
        special = torch.tensor(SPECIAL)[: max(0, size - 8)]
        values[3 : 3 + len(special)] = special.roll(seed)
        made.append(values.to(dtype))
    return made


def folded(
    place: Place, kind: Kind, grads: torch.dtype, sizes: Sequence[int], offset: int = 0, parts: int = 1
) -> dict[str, Tensor]:
    """Sums, words and partials after two folds. The last but one row has no gradient, the last one a sum in fp32.

    Args:
        offset: elements by which sums and gradients lie off the boundaries.
        parts: launches in which each fold is made.
    """

    def placed(values: list[Tensor], off: int) -> list[Tensor]:
        return [shifted(value.to(place.device), off) for value in values]

    params = placed([torch.zeros(size) for size in sizes], 0)
    plan = bare_plan(place.backend, params, ORIGINS)
    sums = placed(drawn(sizes, 0, BF16)[:-1] + drawn(sizes, 0, torch.float32)[-1:], offset)
    words = torch.cat([begin(index, 1).repeat(-(-size // CHUNK)) for index, size in enumerate(sizes)]).to(place.device)
    partials = torch.full((plan.chunks,), 7.0, device=place.device)
    factor: Any = torch.tensor(kind.factor, dtype=torch.float64).to(place.device) if kind.on_device else kind.factor
    before = None if kind.before is None else torch.tensor(kind.before, dtype=torch.float64).to(place.device)
    lacking, rows = len(sizes) - 2, list(enumerate(sums))
    for number in range(2):
        given = sums if kind.in_place else placed(drawn(sizes, number + 1, grads), 3 * offset)
        for part in range(parts):
            here = range(part, len(sizes), parts)
            own = Grads([given[i] if i in here and i != lacking else None for i in range(len(sizes))])
            into = Grads([s if i in here and (own[i] is not None or not kind.overwrites) else None for i, s in rows])
            fold = Fold(own, into, factor, before, kind.overwrites, words if kind.rounds else None, salt=3)
            place.backend.accumulate(plan, fold, partials)
    found = {f"sum {index}": value for index, value in enumerate(sums)} | {"words": words, "partials": partials}
    if not place.backend.measures_folds:  # torch's own kernels, which contract what they add to fp32
        del found["partials"], found[f"sum {len(sums) - 1}"]
    return found


@functools.cache
def wanted(kind: Kind, grads: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    return folded(Place(ReferenceBackend()), kind, grads, sizes)


def assert_folds(place: Place, kind: Kind, grads: torch.dtype, **how: int) -> None:
    sizes = SMALL if place.is_slow else SIZES
    of_reference = wanted(kind, grads, sizes)
    found = folded(place, kind, grads, sizes, **how)
    assert_all_same_bits(found, {name: value for name, value in of_reference.items() if name in found})


each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_grads = pytest.mark.parametrize("grads", GRADS, ids=str)
# Triton's interpreter, which is slow, takes the gradients' dtypes in turn; all with --full.
FOLDS = [
    pytest.param(
        place, kind, grads, id=f"{place}-{name}-{grads}",
        marks=pytest.mark.full if place in INTERPRETED and grads != GRADS[number % 3] else [],
    )
    for place in EVERYWHERE
    for number, (name, kind) in enumerate(KINDS.items())
    for grads in GRADS
]  # fmt: skip
OFF_BOUNDARIES = [
    pytest.param(
        place, kind, id=f"{place}-{name}", marks=pytest.mark.full if place in INTERPRETED and number % 3 else []
    )
    for place in EVERYWHERE
    for number, (name, kind) in enumerate(KINDS.items())
]


@pytest.mark.parametrize(("place", "kind", "grads"), FOLDS, indirect=["place"])
def test_folds_have_the_reference_bits(kind: Kind, grads: torch.dtype, place: Place) -> None:
    assert_folds(place, kind, grads)


@pytest.mark.parametrize(("place", "kind"), OFF_BOUNDARIES, indirect=["place"])
def test_off_the_boundaries_too(kind: Kind, place: Place) -> None:
    assert_folds(place, kind, BF16, offset=1)


@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
@each_grads
def test_in_however_many_launches(grads: torch.dtype, place: Place) -> None:
    assert_folds(place, KINDS["added with a weight"], grads, parts=3)


@each_kind
@each_grads
def test_torchs_kernels_read_no_number(kind: Kind, grads: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadsNothing(TorchBackend):
        def accumulate(self, *args: Any) -> None:
            with NoReads():
                super().accumulate(*args)

    monkeypatch.setattr(torch_kernels, "_can_read", lambda plan: False)
    assert_folds(Place(ReadsNothing()), kind, grads)


def test_torchs_kernels_round_tensors_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_CACHED", 4 * CHUNK)  # a fourth of it for these
    assert_folds(Place(TorchBackend()), KINDS["added with a weight"], BF16)


@pytest.mark.parametrize("others", [CpuBackend, TorchBackend])
def test_words_come_back_from_several_devices(others: Any, native: None, devices_apart: Any) -> None:
    two = SeveralDevices(dict(zip(devices_apart, (ReferenceBackend(), others()), strict=True)))
    for kind in KINDS.values():
        assert_folds(Place(two), kind, torch.float32)


def test_each_device_has_a_copy_of_the_words(devices_apart: Any) -> None:
    seen = set[int]()

    class Watched(ReferenceBackend):
        def accumulate(self, plan: Any, fold: Fold, *args: Any) -> None:
            seen.add(address(fold.words))
            super().accumulate(plan, fold, *args)

    assert_folds(Place(SeveralDevices(dict.fromkeys(devices_apart, Watched()))), KINDS["added"], BF16)
    assert len(seen) > 1


@each_kind
def test_what_needs_no_rounding_has_no_noise(kind: Kind) -> None:
    """Then a word is as it was: it counts what rounds."""
    is_copy = kind.before == 0 or (kind.overwrites and kind.factor == 1)
    rounds = kind.rounds and (kind.before == 0 or kind.factor != 0)
    for grads, count in ((BF16, 2 * (rounds and not is_copy)), (torch.float32, 2 * rounds)):
        assert int(wanted(kind, grads, SMALL)["words"][0] - begin(1, 1)) == count


# ---- windows --------------------------------------------------------------------------------------------------------

AXES: dict[str, Sequence[Any]] = {
    "loop": [*LOOPS.values()], "grads": GRADS, "weights": ["fp32", "bf16_stochastic", "split16", "fp16_master"],
    "tensors": ["edges", "off the boundaries", "any layout"], "case": ["adamw", "sgd_momentum"], "sums": [BF16],
    "tail": [TAILS[name] for name in ("clip", "scaled", "inf", "propagate")], "groups": (1, 2),
}  # fmt: skip
CLOSED = AXES | {"loop": [loop for loop in LOOPS.values() if loop.closed], "weights": ["fp32", "split16"]}
FEW = AXES | {"loop": [LOOPS[name] for name in ("closed mean", "empty on the device")], "weights": ["bf16_stochastic"]}


@pytest.mark.parametrize("place", COMPILED, indirect=True)
@pytest.mark.parametrize("problem", problems(AXES), ids=str)
def test_windows_have_the_reference_bits(problem: Problem, place: Place) -> None:
    assert "words" in expected(problem)[0] or problem.weights == "fp16_master" or not any(problem.loop.updates)
    assert_conforms(problem, place.backend, place.device)


@pytest.mark.parametrize("place", INTERPRETED, indirect=True)
@pytest.mark.parametrize("problem", problems(FEW)[:3], ids=str)
def test_interpreted_windows_have_the_reference_bits(problem: Problem, place: Place) -> None:
    assert_conforms(replace(problem, edges=edges(0, 17, PIECE + 129)), place.backend, place.device)


@pytest.mark.parametrize("problem", problems(CLOSED), ids=str)
def test_torchs_kernels_have_the_bits_of_the_sums(problem: Problem) -> None:
    both = [found[0] for found in (play(problem, TorchBackend()), expected(problem))]
    found, of_reference = ({n: v for n, v in each.items() if n.startswith(("p.grad", "words"))} for each in both)
    assert found
    assert_all_same_bits(found, of_reference)


# ---- noise ----------------------------------------------------------------------------------------------------------


def summed(place: Place, grads: Sequence[Tensor]) -> Tensor:
    """The sum of gradients of one parameter in bf16, in fp64; the first is adopted."""
    plan = bare_plan(place.backend, [torch.zeros(len(grads[0]), device=place.device)])
    total, *others = (grad.to(place.device, BF16, copy=True) for grad in grads)
    words, partials = begin(1, 1).repeat(plan.chunks).to(place.device), torch.zeros(plan.chunks, device=place.device)
    for grad in others:
        place.backend.accumulate(plan, Fold(Grads([grad]), Grads([total]), 1.0, words=words), partials)
    return total.cpu().double()


# The interpreter takes a minute for these, and has the reference's bits, of which noise and error are looked at.
QUICK = [pytest.param(place, marks=pytest.mark.full if place in INTERPRETED else []) for place in EVERYWHERE]


@pytest.mark.parametrize("place", QUICK, indirect=True)
def test_small_gradients_are_not_lost(place: Place) -> None:
    """Rounding to the nearest leaves 256 + 100 x 0.5 at 256."""
    count = 4_000 if place.is_slow else 100_000
    found = summed(place, [torch.full((count,), 256.0), *[torch.full((count,), 0.5)] * 100])
    # Between 256 and 512 the neighbours are 2 apart, so one addition has the variance 2^2 * 1/4 * 3/4.
    deviation = math.sqrt(100 * 0.75)
    assert abs(float(found.mean()) - 306) < 5 * deviation / math.sqrt(count)
    assert abs(float(found.std()) / deviation - 1) < 5 / math.sqrt(2 * count), "each addition has noise of its own"


@pytest.mark.parametrize("place", QUICK, indirect=True)
@pytest.mark.parametrize("signal", [0.03, 0.3, 3.0])
def test_the_error_of_a_sum_of_16_is_small_and_not_along_the_sum(signal: float, place: Place) -> None:
    count = 60_000 if place.is_slow else 200_000
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(count, generator=generator) * signal
    grads = [(mean + torch.randn(count, generator=generator)).to(BF16) for _ in range(16)]
    exact = torch.stack(grads).double().sum(0)
    error, size = summed(place, grads) - exact, exact.norm()
    assert 4e-3 < float(error.norm() / size) < 8e-3
    assert abs(float(error @ exact / size / size)) < 2e-4
