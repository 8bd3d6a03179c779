"""What `make gpu` compares and measures, without a GPU: bits, rates, launches, and which tests it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import checks, counters, journal, probe, smoke, versus
from bench.gpu import test as gpu_tests
from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, LAUNCHES, ROOT
from bench.gpu.target import MECHANISMS, Target

Lines = list[dict[str, Any]]


@pytest.fixture
def target(emulated: Any, native: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setenv(DRY, "1")
    yield Target()
    emulated.allow()


@pytest.fixture
def own(tmp_path: Path) -> Journal:
    return Journal("x", tmp_path / "lines")


def of(own: Journal, kind: str) -> Lines:
    assert own.path is not None
    return [line for line in journal.read(own.path) if line["kind"] == kind]


# ---- smoke ----------------------------------------------------------------------------------------------------------


class Off:
    """A backend whose norm has another last bit."""

    name = "off"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def norm(self, *args: Any) -> Any:
        outcome = self._inner.norm(*args)
        outcome.values[1] = torch.nextafter(outcome.values[1], torch.tensor(torch.inf))
        return outcome


def test_every_check_finds_the_bits_of_the_reference(target: Target, own: Journal) -> None:
    several = [check for check in checks.checks() if not check.needs_gpu]
    assert smoke.compare_all(own, target, target.backend, several)
    assert len({line["check"] for line in of(own, "bits")}) == len(several)


def test_what_differs_or_raises_is_said_and_survived(target: Target, own: Journal) -> None:
    def fails(place: checks.Place) -> checks.Found:
        raise RuntimeError("CUDA error: no")

    several = [checks.checks()[0], checks.Check("fails", fails), checks.Check("empty", lambda place: {})]
    assert not smoke.compare_all(own, target, Off(target.backend), several)
    wrong, failed, right = of(own, "bits")
    assert [line["ok"] for line in (wrong, failed, right)] == [False, False, True]
    assert (wrong["tensors"], wrong["tensor"], wrong["first"], wrong["differ"], wrong["of"]) == (1, "norm", 0, 1, 1)
    assert wrong["found bits"] == wrong["expected bits"] + 1
    assert failed["error"] == "RuntimeError: CUDA error: no"


def test_a_step_that_is_not_skipped_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.Check("skip", checks.skip)
    assert smoke.compare(target, target.backend, check)["ok"]
    monkeypatch.setattr(checks.torch, "inf", 3.0)
    assert not smoke.compare(target, target.backend, check)["ok"]


def test_a_difference_names_the_first_place_and_both_bits() -> None:
    right = torch.tensor([1.0, 0.0, torch.nan, 2.0], dtype=torch.bfloat16)
    left = torch.tensor([1.0, -0.0, torch.nan, 3.0], dtype=torch.bfloat16)
    assert checks.differences({"x": right.clone()}, {"x": right}) == []
    (found,) = checks.differences({"x": left}, {"x": right})
    assert (found["differ"], found["of"], found["first"], found["last"]) == (2, 4, 1, 3)
    assert (found["found bits"], found["expected bits"]) == (-(2**15), 0)
    assert checks.differences({}, {"x": right})[0]["found"] == "None"


# ---- versus and probe -----------------------------------------------------------------------------------------------


def test_ours_and_torchs_recipes_are_timed_once_they_are_right(target: Target, own: Journal) -> None:
    versus.measure(target, own, "some", [(300,), (7,)], 1e9)
    lines = of(own, "versus")
    assert [(line["how"], line["by"]) for line in lines] == [
        (how, by)
        for how in ("eager", "captured")
        for by in (versus.FUSED, "grad_scale trick", "clip + AdamW(foreach)", "accumfused")
    ]
    assert all(line["us"] > 0 and line["host us"] > 0 for line in lines)
    assert lines[3]["of copy"] == pytest.approx(32 * 307 / lines[3]["us"] * 1e6 / 1e9)
    assert lines[-1]["launches"] in (1, 2)


def test_what_is_wrong_is_not_timed(target: Target, own: Journal) -> None:
    target.backend = Off(target.backend)
    target.backend.step = lambda *args: None
    versus.measure(target, own, "some", [(300,)], 1e9)
    wrong = [line for line in of(own, "versus") if line.get("ok") is False]
    assert [line["by"] for line in wrong] == ["accumfused", "accumfused"]
    assert "WrongError: the step did nothing" in wrong[0]["error"]


def test_the_probe_measures_all_formats_by_their_bytes_and_goes_on_after_an_error(
    target: Target, own: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "elements", lambda wanted, each: 3000)
    works = probe.Probe(target, own)
    monkeypatch.setattr(works, "folds", lambda dtype: 1 / 0)
    works.run()
    assert [line["error"] for line in of(own, "probe")] == ["ZeroDivisionError: division by zero"] * 3
    steps = {line["what"]: round(line["B/el"]) for line in of(own, "step")}
    assert list(steps.values()) == [28, 12, 14, 26, 14, 26, 10, 18, 20, 36, 20, 10, 28, 28]
    assert len(steps) == 14


def test_a_replay_is_timed_without_each_mechanism(target: Target, own: Journal) -> None:
    probe.Probe(target, own).replay("some", [(9,)])
    assert [line["what"] for line in of(own, "replay")] == ["some", *(f"some, no {name}" for name in MECHANISMS)]
    assert {line["launches"] for line in of(own, "replay")} == {2}


def test_a_stage_uses_the_mechanisms_that_it_was_started_with(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("queue,another", MECHANISMS), ("", ())):
        monkeypatch.setenv(LAUNCHES, value)
        assert Target().mechanisms == expected


def test_the_counters_are_those_of_one_step_an_element(target: Target) -> None:
    assert counters.counted("==ERROR== no permission", 1000) == {}
    values = {metric: 1000 * (place + 1) for place, metric in enumerate(counters._METRICS)}
    rows = [f'"0","step_kernel","{metric}","{value:,}"' for metric, value in values.items()]
    facts = counters.counted("\n".join(["==PROF==", '"ID","Kernel Name","Metric Name","Metric Value"', *rows]), 1000)
    assert [facts[name] for name in ("read, B/el", "written, B/el", "into L2, B/el", "instructions/el")] == [
        1,
        2,
        96,
        128,
    ]
    assert facts["issuing, %"] == 5000
    assert facts["warps wait for"]["long_scoreboard"] == 7000
    counters.step_once(target, counters.CASES[1], 3000)  # what ncu runs


def _work(target: Target) -> versus.Workload:
    work = versus.Workload([(9,)], target.device)
    work.set_grads()
    return work


# ---- the tests that run on a GPU ------------------------------------------------------------------------------------

CONFTEST = """
import pytest
@pytest.fixture(params=["torch", "cuda", "triton"])
def backend(request):
    return request.param
@pytest.fixture
def emulated():
    pass
"""
ORDERED = """
import pytest
class Case:
    is_common = False
@pytest.mark.parametrize("case", [Case()], ids=["rare"])
def test_compiles(backend, case): pass
def test_for_all(backend): pass
def test_for_cpus(): pass
"""
ABOUT_GPUS = f"""
# {gpu_tests.ASKS}
import pytest
@pytest.mark.parametrize("gpu", ["cuda", "triton"])
def test_both(gpu): pass
def test_alone(): pass
def test_on_a_cpu(emulated): pass
@pytest.mark.parametrize("place", ["emulated", "cuda"])
def test_places(place): pass
"""
FAILING = """
import json, os, time, torch
def test_first():
    assert 1 + 1 == 3
def test_second():
    lines = [json.loads(line) for line in open(os.environ["ACCUMFUSED_GPU_JOURNAL"])]
    (failure,) = [line for line in lines if line["kind"] == "failure"]
    assert failure["test"].endswith("test_first") and "assert 1 + 1 == 3" in failure["trace"]
def test_third():
    time.sleep(600)
def test_fourth():
    def fails():
        raise RuntimeError("CUDA error: misaligned address")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fails
    fails()
def test_fifth():
    assert not torch.cuda.is_initialized()
"""
Run = Callable[..., tuple[str, Lines]]


@pytest.fixture
def run_pytest(tmp_path: Path) -> Run:
    def run(files: dict[str, str], *arguments: str) -> tuple[str, Lines]:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        known = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), journal.FILE: str(tmp_path / "lines")}
        program = [sys.executable, "-m", "pytest", "-p", "bench.gpu.test", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, **known, DRY: "1", gpu_tests._SECONDS: "3"}
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr, journal.read(tmp_path / "lines")

    return run


def test_failures_are_known_at_once_and_hangs_and_broken_gpus_end_one_process(run_pytest: Run) -> None:
    pytest.importorskip("xdist")
    workers = ("-p", "xdist", "-n", "1", "--dist", "load")
    said, lines = run_pytest({"test_x.py": f"# {gpu_tests.ASKS}\n{FAILING}", "test_y.py": "import not_there"}, *workers)
    failed = {line["test"].split("::")[1]: line["says"] for line in lines if line["kind"] == "failure"}
    assert failed.keys() == {"test_first", "test_third", "test_fourth"}
    assert failed["test_first"] == "assert (1 + 1) == 3"
    assert "crashed while running" in failed["test_third"]
    assert "Timeout (0:00:03)!" in said
    assert [line for line in lines if line["kind"] == "so far"][-1]["passed"] == 2
    (line,) = (line for line in lines if line["kind"] == "not collected")
    assert "No module named 'not_there'" in line["trace"]


def test_only_what_needs_a_gpu_runs_and_the_cuda_backend_comes_first(run_pytest: Run) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": ORDERED, "test_gpu_b.py": ABOUT_GPUS}
    said, _ = run_pytest(files, "--collect-only", "-q")
    assert [line.split("::")[1] for line in said.splitlines() if "::" in line] == [
        "test_both[cuda]", "test_alone", "test_places[cuda]", "test_for_all[cuda]",
        "test_compiles[cuda-rare]", "test_both[triton]", "test_for_all[triton]", "test_compiles[triton-rare]",
    ]  # fmt: skip
