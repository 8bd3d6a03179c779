"""`make gpu` without a GPU: what ends a stage ends nothing else, what is known survives, and nothing runs twice.

PYTHON names a shell script, which stands in for what a stage runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "bench" / "gpu" / "run.sh")
STAGES = ("build", "smoke", "loops", "offload", "test", "versus", "probe", "sanitize", "lease")
# Of the make that runs these tests, and of what runs that.
KNOWN = {name: value for name, value in os.environ.items() if "MAKE" not in name and name not in ("ARGS", "OUT")}
Start = Callable[..., "subprocess.Popen[str]"]


def program(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(*stages: str, python: str = 'exec "$REAL" "$@"', **variables: str) -> subprocess.Popen[str]:
        """Starts run.sh. Args: python: what the interpreter does, which notes in `calls` what it is asked for."""
        program(tmp_path / "python", f'echo "$*" >>{tmp_path}/calls\n{python}')
        known = {"PYTHON": str(tmp_path / "python"), "REAL": sys.executable, "OUT": str(tmp_path / "out")}
        known |= {"DRY": "1", "TMPDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        pipe, env = subprocess.PIPE, {**KNOWN, **known, **variables}
        return subprocess.Popen(["bash", RUN, *stages], env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    (tmp_path / "out").mkdir()
    return start


def said(process: subprocess.Popen[str], code: int = 0) -> str:
    text = process.communicate()[0]
    assert process.returncode == code, text
    return text


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_a_stage_that_hangs_is_killed_with_all_that_it_has_started_and_the_next_one_runs(
    start: Start, tmp_path: Path
) -> None:
    deaf = f"trap '' TERM; sleep 600 & echo $! >{tmp_path}/child; sleep 600"
    python = f"case $* in *loops) {deaf};; *versus) echo 3 us; exit 3;; esac"
    text = said(start("loops", "versus", "probe", python=python, GPU_MINUTES="0.1"), 1)
    report = (tmp_path / "out" / "report.md").read_text()
    for stage, outcome in {"loops": "cut off", "versus": "failed (3)", "probe": "passed"}.items():
        assert f"- {stage}: {outcome}, " in report
    assert "## versus\n\n````\n3 us\n````" in report
    assert text.endswith("not passed: loops versus\n")
    with contextlib.suppress(ProcessLookupError):  # it is gone
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
        assert select.select([child], [], [], 60)[0], "it still runs"


def test_after_a_kill_all_that_was_known_is_there_and_a_new_call_goes_on(start: Start, tmp_path: Path) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    os.mkfifo(runs)
    first = start("loops", "versus", python=f"case $* in *versus) echo 3 us; ps -o pgid= $$ >{runs}; sleep 600;; esac")
    group = int(runs.read_text())  # once versus has said something
    first.kill()
    os.killpg(group, signal.SIGKILL)  # the runner could not
    first.communicate()
    assert "- loops: passed" in (out / "report.md").read_text()
    assert (out / "versus.txt").read_text() == "3 us\n"
    said(start("report"))
    report = (out / "report.md").read_text()
    assert "- versus: did not end\n" in report
    assert "## versus\n\n````\n3 us\n````" in report
    (tmp_path / "calls").unlink()
    assert "loops has passed before" in said(start(python="", VARIANTS=""))
    calls = (tmp_path / "calls").read_text()
    assert "bench.gpu.versus" in calls
    assert "bench.gpu.loops" not in calls
    (out / "passed.txt").write_text("test_a\n")
    assert "passed before" not in said(start("build", python="echo another card"))
    assert not (out / "passed.txt").exists()


def test_what_cannot_run_is_refused(start: Start) -> None:
    assert "unknown stage smok; choose from" in said(start("smok"), 2)
    assert "finds no GPU that it can use; --dry runs the stages without one" in said(start(DRY=""), 1)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("stage", STAGES)
def test_make_has_a_target_for_each_stage_and_reports_into_the_folder_for_outputs(stage: str) -> None:
    command = ["make", "-C", str(ROOT), "--no-print-directory", "-n", f"gpu-{stage}"]
    printed = subprocess.run(command, env={**KNOWN, "OUT": "/a"}, capture_output=True, text=True).stdout
    assert printed.split() == ["PYTHON=python3", 'OUT="/a"', "GPU_MINUTES=9.5", "bash", "bench/gpu/run.sh", stage]


@pytest.mark.parametrize(
    ("build", "code", "expected"),
    [
        ("echo machine code: abc", 1, "ahead: has the machine code of another variant, so nothing is compared"),
        ("[[ $NVCC_APPEND_FLAGS == *-DA* ]] && echo error: a && exit 1", 1, "error: a\nahead: does not build, so"),
        ('echo machine code: "$NVCC_APPEND_FLAGS"', 0, "== ahead: 8-bit steps, round 2\n-m bench.gpu.probe"),
    ],
)
def test_variants_are_compared_if_all_build_and_differ(start: Start, build: str, code: int, expected: str) -> None:
    python = f'case $* in *gpu.build*) {build};; *) echo "$*";; esac'
    text = said(start("--inside", "lease", python=python, VARIANTS="ahead=-DA,-DB", DRY=""), code)
    assert expected in text
    assert ("gpu.probe" in text) == (code == 0)


def test_without_variants_there_is_nothing_to_compare(start: Start) -> None:
    assert said(start("--inside", "lease", VARIANTS="")) == "there are no variants to compare\n"


SANITIZER = """while [[ $1 != --log-file ]]; do shift; done; cat >"$2" <<'LOG'
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at norm_kernel+0x76f0 in block.cuh:52
=========     and Read access at norm_kernel+0x7790 in block.cuh:53 [255 hazards]
=========
========= Error: Race reported between Write access at norm_kernel+0x76f0 in block.cuh:52
=========     and Read access at norm_kernel+0x7790 in block.cuh:53 [100 hazards]
=========     by thread (1,0,0) in block (0,0,0)
=========     Host Frame: _PyEval_EvalFrameDefault [0x1c0]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
LOG"""


def test_every_distinct_line_of_the_sanitizer_is_kept_and_a_hazard_is_a_failure(start: Start, tmp_path: Path) -> None:
    program(tmp_path / "compute-sanitizer", SANITIZER)
    text = said(start("--inside", "sanitize"), 1).partition("racecheck: ")[2].partition("synccheck: ")[0]
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "exit code 0; its distinct lines, and how often each:",
        "2 and Read access at norm_kernel+0x7790 in block.cuh:53",
        "2 Error: Race reported between Write access at norm_kernel+0x76f0 in block.cuh:52",
        "1 RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
    ]


# ---- the tests that run on a GPU ------------------------------------------------------------------------------------


MEMCHECK = """[[ $* == *memcheck* ]] || exit
while [[ $1 != */python ]]; do shift; done; exec "$@\""""


@pytest.mark.parametrize("stage", ["smoke", "sanitize"])
def test_the_names_by_which_a_stage_chooses_tests_are_those_of_tests(start: Start, tmp_path: Path, stage: str) -> None:
    (tmp_path / "with_a_gpu.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    program(tmp_path / "compute-sanitizer", MEMCHECK)
    options = {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": "-p with_a_gpu --collect-only", "DRY": ""}
    text = start("--inside", stage, **options).communicate()[0]
    code = Path(RUN).read_text().partition(f"\nstage_{stage}()")[2].partition("\n}")[0]
    words = [word for chosen in re.findall(r'-k "(.*?)"', code) for word in chosen.split(" or ")]
    assert words
    assert [word for word in words if word not in text] == []


def test_what_smoke_or_an_earlier_report_has_passed_is_left_out_by_test(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out" / "passed.txt").write_text("test_smoke\n")
    (tmp_path / "earlier").write_text("test_earlier\n")
    python = "while [[ $1 != --gpu-leave-out ]]; do shift; done; cat $2"
    text = said(start("--inside", "test", python=python, LEAVE_OUT=str(tmp_path / "earlier")))
    assert text == "test_smoke\ntest_earlier\n"


CONFTEST = """
import pytest
@pytest.fixture(params=["torch", "cuda", "triton"])
def backend(request): return request.param
@pytest.fixture
def emulated(): pass
"""
ORDERED = """
import pytest
class Case: is_common = False
@pytest.mark.parametrize("case", [Case()], ids=["rare"])
def test_compiles(backend, case): pass
def test_for_all(backend): pass
def test_for_cpus(): pass
"""
ABOUT_GPUS = """
import pytest
@pytest.mark.parametrize("gpu", ["cuda", "triton"])
def test_both(gpu): pass
def test_alone(): pass
def test_on_a_cpu(emulated): pass
"""
FAILING = """
import time, torch
def test_first(): assert 1 + 1 == 3
def test_second(): pass
def test_third(): time.sleep(600)
def test_fourth():
    def fails(): raise RuntimeError("CUDA error: misaligned address")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fails
    fails()
def test_fifth(): assert not torch.cuda.is_initialized()
"""


def run_pytest(folder: Path, files: dict[str, str], *arguments: str) -> str:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "before").touch()
    command = [sys.executable, "-m", "pytest", "-p", "bench.gpu.plugin", "-p", "no:cacheprovider", "-q", "--no-summary"]
    command += ["--gpu-backends", "cuda,triton", "--gpu-seconds", "3", "--gpu-leave-out", "before", "--gpu-folder", "."]
    env = {**KNOWN, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    return done.stdout + done.stderr


def names(text: str) -> list[str]:
    return [line.split("::")[1] for line in text.splitlines() if "::" in line]


def test_failures_are_told_at_once_hangs_and_broken_gpus_end_one_process_and_what_has_passed_is_left_out(
    tmp_path: Path,
) -> None:
    pytest.importorskip("xdist")
    files = {"test_gpu_x.py": FAILING, "test_y.py": "import not_there"}
    text = run_pytest(tmp_path, files, "-p", "xdist", "-n", "1", "--dist", "load")
    first, third, fourth, ended = (line for line in text.splitlines() if line.startswith("FAILED: "))
    assert first == "FAILED: test_gpu_x.py::test_first, call: assert (1 + 1) == 3"
    assert "crashed while running 'test_gpu_x.py::test_third'" in third
    assert "misaligned address" in fourth
    assert "crashed while running 'test_gpu_x.py::test_fourth'" in ended
    assert "Timeout (0:00:03)!" in text
    assert "No module named 'not_there'" in text
    passed = (tmp_path / "passed.txt").read_text()
    assert names(passed) == ["test_second", "test_fifth"]
    (tmp_path / "before").write_text(passed)
    assert names(run_pytest(tmp_path, {}, "--collect-only", "-k", "x")) == ["test_first", "test_third", "test_fourth"]


def test_in_one_process_a_file_names_the_test_that_hangs(tmp_path: Path) -> None:
    run_pytest(tmp_path, {"test_gpu_x.py": FAILING})
    assert (tmp_path / "running.txt").read_text() == "test_gpu_x.py::test_third"
    run_pytest(tmp_path, {"conftest.py": CONFTEST, "test_gpu_x.py": ABOUT_GPUS})
    assert not (tmp_path / "running.txt").exists()


def test_only_what_needs_a_gpu_runs_and_the_cuda_backend_comes_first(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": ORDERED, "test_gpu_b.py": ABOUT_GPUS}
    assert names(run_pytest(tmp_path, files, "--collect-only")) == [
        "test_for_all[cuda]", "test_both[cuda]", "test_alone", "test_compiles[cuda-rare]",
        "test_for_all[triton]", "test_both[triton]", "test_compiles[triton-rare]",
    ]  # fmt: skip
