"""Policies of clipping, metrics and the noise scale have the same bits everywhere.

Norms of tensors and groups, coefficients of rows, histories; and what kernels sum beside their work.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from layouts import EDGES, PIECE, edges
from places import INSTRUCTION_SETS, INTERPRETED, ON_CPU, ON_GPU, Place
from problems import GRADS, INF, Loop, Problem, Tail, assert_conforms, bare_plan, expected

import accumfused as af
from accumfused.formats.numeric import CHUNK, LANES, sum_partials, sum_segments

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
EVERYWHERE = [*ON_CPU, "two devices", *INTERPRETED, *ON_GPU]
LONG = Loop(((), (2.0, 0.7), (), (), ()))
PACKED = edges(0, 3, 129, 8 * PIECE + 130)
PER_TENSOR = af.PerTensor(0.3)
PROBLEMS = {
    "per group": Problem("adamw", groups=2, tail=Tail(of_groups=0.4, normalizer=1.7)),
    "per tensor": Problem("sgd_momentum", torch.bfloat16, "split16", tail=Tail(None, clip=PER_TENSOR)),
    "per tensor, packed": Problem("adamw", GRADS[0], "split8", "8bit", tail=Tail(None, clip=PER_TENSOR), edges=PACKED),
    "one infinite tensor": Problem("sgd", tail=Tail(None, bad=(INF,), nonfinite="propagate", clip=PER_TENSOR)),
    "in fp16": Problem("adamw", torch.float16, "fp16_master", tail=Tail(None, clip=PER_TENSOR, grad_scale="4")),
    "per tensor, any layout": Problem("lion", tail=Tail(None, clip=PER_TENSOR), tensors="any layout"),
    "z-score": Problem("sgd", loop=LONG, tail=Tail(None, clip=af.ZScore(0.1, 0.8, 2))),
    "skip above a mean": Problem("sgd", loop=LONG, tail=Tail(0.5, skip_above=af.RunningMean(1.001, 0.8, 1))),
    "skip above": Problem("sgd", loop=LONG, tail=Tail(None, grad_scale="0.5", clip=PER_TENSOR, skip_above=330.0)),
}  # fmt: skip
# Of the second update a gradient is not finite; in the third a parameter has none.
OVERFLOWS = Tail(bad=(INF,))
MEASURED = {
    "sums": Problem("adamw", loop=Loop(((None,) * 3, (None,) * 3, (None,))), tail=OVERFLOWS, groups=2),
    "means": Problem(
        "sgd_momentum", GRADS[0], "split16", "bf16", Loop(((3.0, 0.7), (2.0, 1.0), (2.0,))), OVERFLOWS, groups=2
    ),
    "means, closed and packed": Problem(
        "adamw", GRADS[0], "split8", "8bit", Loop(((3.0, 0.7, 5.0), (2.0, 1.0), (2.0,)), closed=True), Tail(1e6)
    ),
    "on the device": Problem("lion", weights="bf16_stochastic", loop=Loop((("3", "0", "0.7"), ("5", "2"), ("2",)))),
}
PROBLEMS |= {f"measured {name}": replace(problem, is_measured=True) for name, problem in MEASURED.items()}
NOT_FOR_CUDA = {
    "sums of groups": Problem("adamw_schedule_free", groups=2, tail=Tail(None, clip=PER_TENSOR)),
}


# Policies over five steps: torch computes them, for every backend; Triton's interpreter is slow.
BY_TORCH = ("z-score", "skip above a mean", "skip above")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(place, name, marks=pytest.mark.full if place in INTERPRETED and name in BY_TORCH else [])
        for place in EVERYWHERE
        for name in PROBLEMS
    ],
    indirect=["place"],
)
def test_every_place_gives_the_reference_bits(name: str, place: Place) -> None:
    assert_conforms(smaller(PROBLEMS[name], place), place.backend, place.device)


@pytest.mark.parametrize("place", ["reference", *INSTRUCTION_SETS, *INTERPRETED], indirect=True)
@pytest.mark.parametrize("name", NOT_FOR_CUDA)
def test_rules_without_a_cuda_kernel_do_too(name: str, place: Place) -> None:
    assert_conforms(smaller(NOT_FOR_CUDA[name], place), place.backend, place.device)


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_is_neither_nothing_nor_lost(name: str) -> None:
    found, _ = expected(PROBLEMS[f"measured {name}"])
    assert bool(found["metrics 0"].isfinite().all())
    assert bool((found["noise 0"] != 0).all())


def smaller(problem: Problem, place: Place) -> Problem:
    options: dict[str, Any] = {"edges": EDGES["tiny"]} if place.is_slow and problem.edges is EDGES["usual"] else {}
    return Problem(**{**vars(problem), **options})


@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
def test_each_segment_is_added_up_like_all_chunks(place: Place) -> None:
    """Segments without a chunk, with more than there are lanes, and of so many sizes that another order would show."""
    generator = torch.Generator().manual_seed(0)
    counts = [0, 1, 3, 0, LANES, 700, 2 * LANES + 5, 0]
    total = sum(counts)
    partials = torch.ldexp(
        torch.rand(total, generator=generator), torch.randint(-60, 60, (total,), generator=generator)
    )
    bounds = torch.tensor([0, *itertools.accumulate(counts)])
    built = bare_plan(place.backend, [torch.empty(CHUNK * total, device=place.device)])  # which nobody reads
    found = place.backend.segment_norms(built, partials.to(place.device), bounds.to(place.device)).cpu()
    wanted = torch.stack([sum_partials(part) for part in partials.split(counts)])
    assert_same_bits(found, wanted)
    assert_same_bits(sum_segments(partials, bounds), wanted)
