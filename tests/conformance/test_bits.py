"""Every backend gives the reference's bits: for any rule, gradient, format, layout, window and values.

One program for all of them. What there is in the end, norms and coefficients included, is compared bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import EDGES, PIECE, edges
from places import INSTRUCTION_SETS, INTERPRETED, ON_CPU, ON_GPU, Place
from problems import AXES, COMMON, GRADS, LOOPS, TAILS, VALUES, Loop, Problem, Tail, assert_conforms, problems
from reference import ReferenceBackend
from table import CASES, EACH_RULE, WEIGHTS, Case

from accumfused.backends.cpu import CpuBackend
from accumfused.core.protocol import ALONE, Commit
from accumfused.formats.numeric import CHUNK, LANES

# Triton 3.6 makes numbers of numpy's arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

SIZES = {"emulated": "small", "checked": "small", "two devices": "small", "interpreted": "tiny"}
EVERYWHERE = [*ON_CPU, *INTERPRETED, *ON_GPU]
OF_CUDA = ("emulated", "checked", "two devices", "cuda")  # which have not all rules

# Triton's interpreter has no time for more: every format with some of the rest.
FEW = {key: values[:3] for key, values in AXES.items() if key not in ("case", "lr")}
FEW |= {
    "weights": [*WEIGHTS], "tail": [TAILS[name] for name in ("scaled", "inf", "propagate")],
    "loop": [LOOPS[name] for name in ("mean", "empty on the device", "steps")],
}  # fmt: skip
# States in 8 or 16 bits beside bf16 parameters, for which GPUs have loops of their own.
ODD = ({"lr": 0.0}, {"lr": 1e-20}, {"eps": 1e30}, {"eps": 0.0}, {"betas": (0.9, 0.9999999)}, {"weight_decay": 20.0})
PACKED: dict[str, Any] = {
    "case": [case.name for case in CASES if case.rule == "adam"],
    "options": [(), *(tuple(options.items()) for options in ODD)], "values": [*VALUES],
    "weights": ["bf16_stochastic", "split16", "split8"], "grads": GRADS, "tail": [TAILS["none"], TAILS["clip"]],
    "states": ["8bit", "bf16"], "special_params": [(), ((77, float("nan")), (3000, float("inf")), (4000, -0.0))],
    "loop": [LOOPS["steps"], LOOPS["mean"]], "edges": [edges(0, 3, 129, 8 * PIECE + 130)],
    "tensors": ["edges", "off the boundaries"],
}  # fmt: skip
PACKED_FIRST = PACKED | {
    "case": ["sgd_momentum", "sgd_nesterov", "lion"], "options": [()],
}  # fmt: skip
UNCHECKED = Tail(None, nonfinite="propagate")
PACKED_SIZES: dict[str, Any] = {"states": "bf16", "values": "every size", "tail": TAILS["propagate"]}
PACKED_SIZES |= {"special": ((2, math.inf),)}
CORNERS = {
    "a coefficient of zero": Problem("sgd", tail=Tail(1e-50), special_params=((0, 0.0), (1, -0.0))),
    "one of -0": Problem("sgd_maximize", tail=Tail(1e-50), special_params=((0, 0.0), (1, -0.0))),
    "a bad normalizer": Problem("adamw", tail=Tail(normalizer="inf")),
    "no elements": Problem("adamw", tail=Tail(1.0, normalizer="nan"), edges=edges(0)),
    "lost squares": Problem("sgd", values="tiny", tail=Tail(1.0, normalizer=1e-20)),
    "a subnormal sum of squares": Problem("adamw", tail=Tail(1e-22, normalizer=1e22)),
    "codes of 0": Problem("adamw", weights="split8", states="8bit", values="far apart", reads_all=True),
    "lr in 16 bits": Problem("adamw", lr=torch.bfloat16),
    "states of every size": Problem("sgd_nesterov", states="8bit", values="every size", tail=UNCHECKED),
    "16-bit states of every size": Problem("sgd_nesterov", states="bf16", values="every size", tail=UNCHECKED),
    "second moments of every size": Problem("adamw", states="8bit", values="every size", tail=UNCHECKED),
    "packed 16-bit moments of every size": Problem("adamw", weights="split16", **PACKED_SIZES),
    "a packed 16-bit moment of every size": Problem("lion", weights="bf16_stochastic", **PACKED_SIZES),
    "far below the smallest fp16": Problem("sgd", weights="fp16_master", values="tiny", special=((5, 2.0**-30),)),
}
OF_PACKED_LOOPS = ("packed 16-bit moments of every size", "a packed 16-bit moment of every size")  # CUDA's own


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "problem" not in metafunc.fixturenames or "place" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--full")
    rows = [*(_corners() if "corner" in metafunc.function.__name__ else _rows(full))]
    ids = [f"{place}-{name}" for place, name, _ in rows]
    params = [(place, problem) for place, _, problem in rows]
    metafunc.parametrize(("place", "problem"), params, indirect=["place"], ids=ids)


def _rows(full: bool) -> Iterator[tuple[str, str, Problem]]:
    every = problems(AXES | {"case": [case.name for case in CASES]} if full else AXES)
    common = [case.name for case in CASES if case.is_common] if full else COMMON
    of_cuda = problems(AXES | {"case": common})
    for place in [*ON_CPU, "two devices", "checked", *INTERPRETED, *ON_GPU]:
        chosen = problems(FEW) if place in INTERPRETED and not full else of_cuda if place in OF_CUDA else every
        if not full:
            chosen = chosen[:: {"reference": 4, "checked": 4, "two devices": 4, "interpreted": 2}.get(place, 1)]
        for problem in chosen:
            yield place, str(problem), replace(problem, edges=EDGES[SIZES.get(place, "usual")])
        if place not in ("reference", "two devices", *INTERPRETED):
            packed = [*problems(PACKED), *(problems(PACKED_FIRST) if place in OF_CUDA else [])]
            if place == "checked" and not full:  # no address depends on values and options
                packed = problems(PACKED_FIRST | {"case": [*PACKED_FIRST["case"], "adam"]})
            yield from ((place, f"packed-{problem}", problem) for problem in packed)


def _corners() -> Iterator[tuple[str, str, Problem]]:
    for place, (name, problem) in itertools.product(EVERYWHERE, CORNERS.items()):
        if place in INTERPRETED and name in OF_PACKED_LOOPS:
            continue
        if problem.edges is EDGES["usual"]:
            yield place, name, replace(problem, edges=(*EDGES[SIZES.get(place, "usual")], *edges(24 * 128)))
        else:
            yield place, name, problem


def test_every_place_gives_the_reference_bits(place: Place, problem: Problem) -> None:
    assert_conforms(problem, place.backend, place.device)


def test_every_place_gives_the_reference_bits_in_a_corner(place: Place, problem: Problem) -> None:
    assert_conforms(problem, place.backend, place.device)


@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    ("name", "weights", "states"), [("adamw_amsgrad", "fp32", "bf16"), ("adamw", "split8", "8bit")]
)
def test_around_the_edges_of_chunks(name: str, weights: str, states: str, place: Place) -> None:
    sizes = edges(5, CHUNK + 1) if place.is_slow else EDGES["chunks"]
    loop = Loop(((None, None),)) if place.is_slow else LOOPS["sum"]
    assert_conforms(Problem(name, GRADS[2], weights, states, loop, edges=sizes), place.backend, place.device)


@pytest.mark.parametrize("place", [*INSTRUCTION_SETS, "emulated", *ON_GPU], indirect=True)
def test_more_chunks_than_the_norm_has_lanes_or_a_launch_can_carry(place: Place) -> None:
    sizes = edges(*[1 + i % 7 for i in range(LANES + 6)])
    problem = Problem("adamw", torch.bfloat16, loop=Loop(((3.0, "0.7"), ())), edges=sizes)
    assert_conforms(problem, place.backend, place.device)


@pytest.mark.parametrize("place", INSTRUCTION_SETS, indirect=True)
@pytest.mark.parametrize(("weights", "states", "threads"), [("fp32", "fp32", 2), ("split8", "8bit", 3)])
def test_any_number_of_threads(weights: str, states: str, threads: int, place: Place) -> None:
    # All other rules take the loop of these two, of which one counts for its group. Each rule has one of the formats.
    cases = [case for case in EACH_RULE if case.is_common or case.rule in ("sgd_schedule_free", "adan")]
    for number, case in enumerate(cases[threads % 2 :: 2]):
        problem = Problem(case.name, GRADS[number % 3], weights, states, edges=EDGES["large"])
        assert_conforms(problem, place.backend, threads=threads)


@pytest.mark.parametrize("place", INSTRUCTION_SETS, indirect=True)
def test_a_tensor_beyond_the_caches(place: Place) -> None:
    """Beyond 8 MB the first fold of a 16-bit gradient is written around them."""
    problem = Problem("adamw", torch.bfloat16, loop=LOOPS["closed mean"], edges=edges(80 * CHUNK + 11, 3, 5))
    assert_conforms(problem, place.backend, threads=2)


def test_another_thread_of_python(native: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(assert_conforms, Problem("adamw"), CpuBackend()).result()


@pytest.mark.parametrize("place", ["reference", *INSTRUCTION_SETS, *INTERPRETED], indirect=True)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_float_mode_of_no_thread_matters(threads: int, place: Place) -> None:
    for name, dtype in zip(("sgd_momentum", "adamw_amsgrad", "lion_weight_decay"), GRADS, strict=True):
        sizes = edges(PIECE + 5 if place.is_slow else 5 * CHUNK)
        loop, tail = LOOPS["both kinds"], TAILS["none"]
        problem = Problem(name, dtype, values="tiny", edges=sizes, loop=loop, tail=tail, flushes=True)
        assert_conforms(problem, place.backend, threads=threads)


# ---- any values and options -----------------------------------------------------------------------------------------

SPECIAL = (
    0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 2.0**-126, 3e38, -3e38, 1e-20,
    65504.0,
)  # fmt: skip
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-10, 10, width=32))
PLACES_OF = st.lists(st.tuples(st.integers(0, CHUNK), NUMBERS), max_size=3).map(tuple)
SIZES_OF = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 1023, 1025, PIECE + 1]), min_size=1, max_size=4)


@st.composite
def any_problem(draw: st.DrawFn, cases: Sequence[Case]) -> Problem:
    axes = {name: draw(st.sampled_from([*values])) for name, values in AXES.items() if name != "tail"}
    tail = Tail(
        draw(st.sampled_from([None, 1e-30, 0.5, 1e30])),
        draw(st.sampled_from([None, 3.0, 1e-30, 1e38, "nan", "0", "-2", "3"])),
        nonfinite=draw(st.sampled_from([None, "skip", "propagate", "raise"])),
    )
    axes["case"] = draw(st.sampled_from(cases)).name
    return Problem(
        **axes, tail=tail, edges=edges(*draw(SIZES_OF)), seed=draw(st.integers(0, 2**16)), special=draw(PLACES_OF),
        special_params=draw(PLACES_OF),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:two accumulation windows in a row were dropped")
@pytest.mark.parametrize(
    "place",
    # Triton's interpreter has no time for more than a few, which tell little beyond the problems above.
    [pytest.param(place, marks=pytest.mark.full if place in INTERPRETED else []) for place in EVERYWHERE],
    indirect=True,
)
def test_any_values_and_options(place: Place, request: pytest.FixtureRequest) -> None:
    name, is_full = request.node.callspec.params["place"], request.config.getoption("--full")
    is_cuda, count = name in OF_CUDA, 200 if is_full else 5 if name == "reference" else 20  # which has other tests

    @settings(
        max_examples=3 if place.is_slow else count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(problem=any_problem([case for case in CASES if case.is_common or not is_cuda]))
    def agree(problem: Problem) -> None:
        assert_conforms(problem, place.backend, place.device)

    agree()


# ---- these tests bite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kernels", "coefficient"])
def test_every_problem_tells_a_wrong_backend(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose step writes nothing, and one whose coefficient is one in a thousand too large."""
    backend = CpuBackend() if INSTRUCTION_SETS else ReferenceBackend()
    right = backend.step

    def step(plan: Any, grads: Any, hypers: Any, outcome: Any, commit: Commit = ALONE) -> None:
        if how == "coefficient":
            outcome.values[0] *= 1.001
            right(plan, grads, hypers, outcome, commit)
        else:
            commit.end()

    monkeypatch.setattr(backend, "step", step)
    # Others make NaN of nearly everything.
    telling = [each for each in problems(AXES) if each.values == "usual" and each.tail.nonfinite != "propagate"]
    for problem in telling:
        with pytest.raises(AssertionError):
            assert_conforms(problem, backend)
    assert len(telling) > 10
