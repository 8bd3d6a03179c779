"""`make gpu-test` without a GPU: which tests it takes, in which order, and what is in its report when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import failures, journal
from bench.gpu import tests as gpu_tests

ROOT = Path(__file__).parents[2]
Lines = list[dict[str, Any]]

CONFTEST = """
import pytest, torch
@pytest.fixture(params=["torch", "cuda", "triton"])
def backend(request):
    return request.param
@pytest.fixture
def emulated():
    pass
"""
FAILING = """
import json, os
def test_first():
    assert 1 + 1 == 3
def test_second():
    lines = [json.loads(line) for line in open(os.environ["ACCUMFUSED_GPU_JOURNAL"])]
    (failure,) = [line for line in lines if line["kind"] == "failure"]
    assert failure["test"].endswith("test_first") and "assert 1 + 1 == 3" in failure["trace"]
def test_third():
    import pytest
    pytest.skip("no card")
"""
UNUSABLE = """
import os, torch
def test_first(monkeypatch):
    def fails():
        raise RuntimeError("CUDA error: misaligned address")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fails
    fails()
def test_second():
    assert torch.cuda.is_initialized() is False
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
# {failures.ASKS}
import pytest
@pytest.fixture(params=["cuda", "triton"])
def gpu(request):
    return request.param
def test_both(gpu): pass
def test_alone(): pass
def test_on_a_cpu(emulated): pass
@pytest.mark.parametrize("place", ["emulated", "cuda"])
def test_places(place): pass
@pytest.mark.parametrize("tool", ["memcheck"])
def test_compute_sanitizer(tool): pass
"""


def of(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def run_pytest(tmp_path: Path) -> Callable[..., tuple[str, Lines]]:
    def run(files: dict[str, str], *arguments: str) -> tuple[str, Lines]:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        known = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), journal.FILE: str(tmp_path / "lines")}
        program = [sys.executable, "-m", "pytest", "-p", "bench.gpu.failures", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(program, cwd=tmp_path, env={**os.environ, **known}, capture_output=True, text=True)
        return done.stdout + done.stderr, journal.read(tmp_path / "lines")

    return run


def test_a_failure_is_in_the_report_before_the_next_test_begins(run_pytest: Any) -> None:
    said, lines = run_pytest({"test_x.py": FAILING})
    assert "1 failed, 1 passed, 1 skipped" in said
    (failure,) = of(lines, "failure")
    assert failure["says"] == "assert (1 + 1) == 3"
    last = of(lines, "so far")[-1]
    assert (last["failed"], last["passed"], last["skipped"]) == (1, 1, 1)
    assert of(lines, "skipped")[0]["reason"] == "Skipped: no card"


def test_a_file_that_does_not_import_is_in_the_report(run_pytest: Any) -> None:
    _, lines = run_pytest({"test_x.py": "import not_there"})
    (line,) = of(lines, "not collected")
    assert "No module named 'not_there'" in line["trace"]


def test_a_worker_with_an_unusable_gpu_ends_and_the_next_test_has_another(run_pytest: Any) -> None:
    pytest.importorskip("xdist")
    _, lines = run_pytest({"test_x.py": UNUSABLE}, "-p", "xdist", "-n", "1", "--dist", "load")
    failed = {line["test"] for line in of(lines, "failure")}
    assert failed == {"test_x.py::test_first"}
    assert of(lines, "so far")[-1]["passed"] == 1


def test_only_what_needs_a_gpu_runs_and_the_cuda_backend_comes_first(run_pytest: Any) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": ORDERED, "test_gpu_b.py": ABOUT_GPUS}
    said, _ = run_pytest(files, "--collect-only", "-q", "--gpu-backends", "cuda,triton")
    assert [line.split("::")[1] for line in said.splitlines() if "::" in line] == [
        "test_both[cuda]", "test_alone", "test_places[cuda]", "test_for_all[cuda]",
        "test_compiles[cuda-rare]", "test_both[triton]", "test_for_all[triton]", "test_compiles[triton-rare]",
    ]  # fmt: skip


def test_what_slows_down_the_others_runs_alone() -> None:
    alone, others = (gpu_tests.command(sanitizer=which, dry=False) for which in (True, False))
    assert alone[alone.index("-k") + 1] == "sanitizer"
    assert "xdist" not in alone
    assert others[others.index("--dist") + 1] == "load"
    assert others[others.index("--gpu-backends") + 1] == "cuda,triton"
    assert "--full" not in others  # to collect all combinations alone would take longer than the stage


def test_the_files_are_those_with_tests_for_gpus() -> None:
    names = {path.name for path in gpu_tests.files()}
    assert {"test_gpu.py", "test_gpu_graphs.py", "test_bits.py", "test_rules.py"} <= names
    assert "test_build.py" not in names
