"""An offloaded run has the bits of one that is not: for any rule, gradient, format, layout, window and values.

The card is the CPU here; runs are small, so that each problem has several. tests/behaviour/test_offload.py has the
order of calls and of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import EDGES
from problems import AXES, GRADS, LOOPS, Problem, Tail, assert_conforms, problems
from table import CASES, WEIGHTS

from accumfused import clip
from accumfused.backends import offload
from accumfused.backends.offload import Offload

SUMS: dict[str, Sequence[Any]] = {
    "loop": [*LOOPS.values()], "grads": GRADS, "weights": ["fp32", "bf16_stochastic", "split16", "fp16_master"],
    "case": ["adamw", "sgd_momentum"], "sums": [torch.bfloat16], "groups": (1, 2),
    "tensors": ["edges", "off the boundaries", "any layout"],
}  # fmt: skip
CLIPS = [Tail(None, clip=clip.PerTensor(0.4)), Tail(None, clip=clip.ZScore(0.1, 0.5, 2)), Tail(of_groups=0.3)]
CLIPS += [Tail(None, skip_above=clip.RunningMean(1.5)), Tail(None, bad=(float("nan"),), nonfinite="raise")]
MEASURED: dict[str, Sequence[Any]] = {
    "tail": CLIPS, "weights": [*WEIGHTS], "loop": [LOOPS["mean"], LOOPS["device weights"]], "groups": (2,),
    "case": ["adamw", "lion"], "is_measured": (False, True),
}  # fmt: skip
EVERY_RULE = [Problem(case.name, states="8bit", weights="split8", loop=LOOPS["steps"]) for case in CASES]


@pytest.fixture(autouse=True)
def small_runs(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "RUN_BYTES", 3000)


def _problems(axes: dict[str, Sequence[Any]], every: int = 1) -> list[Problem]:
    return [replace(problem, edges=EDGES["small"], offload=True) for problem in problems(axes)[::every]]


@pytest.mark.parametrize("problem", _problems(AXES, 3), ids=str)
def test_windows_and_steps(problem: Problem) -> None:
    assert_conforms(problem, Offload())


@pytest.mark.parametrize("problem", _problems(SUMS, 2), ids=str)
def test_sums_in_bf16(problem: Problem) -> None:
    assert_conforms(problem, Offload())


@pytest.mark.parametrize("problem", _problems(MEASURED), ids=str)
def test_clip_policies_metrics_and_the_noise_scale(problem: Problem) -> None:
    assert_conforms(problem, Offload())


@pytest.mark.parametrize("problem", EVERY_RULE, ids=str)
def test_every_rule_rounds_with_the_noise_of_the_whole_optimizer(problem: Problem) -> None:
    assert_conforms(replace(problem, offload=True), Offload(), threads=2)


def test_rows_larger_than_a_slot_and_many_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 10**9):
        monkeypatch.setattr(offload, "RUN_BYTES", size)
        assert_conforms(Problem("adamw", offload=True, weights="bf16_stochastic"), Offload())


def test_the_loops_float_mode_does_not_matter() -> None:
    assert_conforms(Problem("adamw", offload=True, values="tiny", flushes=True), Offload())
