"""`make gpu` without a GPU: stages run and end, what is known survives, launches that hang are off, failures told."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu import build, journal, sanitize, smoke
from bench.gpu import test as gpu_tests
from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, JOURNAL, REPORT, ROOT, Stage, run_all

START = "import os, sys, signal, time\nfrom bench.gpu.journal import Journal\nwrite = Journal('x').write\n"
Lines = list[dict[str, Any]]


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def stage(name: str, code: str, share: float = 1.0) -> Stage:
    return Stage(name, share, program(START.replace("'x'", repr(name)) + code))


def of(folder: Path, kind: str) -> Lines:
    return [line for line in journal.read(folder / JOURNAL) if line["kind"] == kind]


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_the_next_stage_runs_after_one_that_fails_and_one_that_is_killed_with_all_that_it_has_started(
    tmp_path: Path,
) -> None:
    deaf = "import subprocess; signal.signal(2, signal.SIG_IGN); child = subprocess.Popen(['sleep', '600']); "
    deaf += "write('child', pid=child.pid); time.sleep(600)"
    several = [stage("bad", "write('fact', value=1); sys.exit(3)"), stage("deaf", deaf)]
    several += [stage("good", "write('fact', value=2)", share=98)]
    assert run_all(several, tmp_path, 400) == ["bad", "deaf"]
    assert [line["outcome"] for line in of(tmp_path, "end")] == ["failed (3)", "cut off", "passed"]
    assert [line["value"] for line in of(tmp_path, "fact")] == [1, 2]
    with contextlib.suppress(ProcessLookupError):  # it is gone
        assert select.select([os.pidfd_open(of(tmp_path, "child")[0]["pid"])], [], [], 60)[0], "it still runs"


def test_all_that_was_known_is_there_after_the_runner_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs")
    waits = f"write('fact', pid=os.getpid()); open({str(tmp_path / 'runs')!r}, 'w').close(); time.sleep(60)"
    stages = [stage("first", "write('fact', value=1)"), stage("second", waits)]
    code = "from pathlib import Path\nfrom bench.gpu.runner import Stage, run_all\n"
    code += f"run_all({stages!r}, Path({str(tmp_path)!r}), 60)"
    with subprocess.Popen(program(code), cwd=ROOT) as process:
        (tmp_path / "runs").read_text()  # until the second stage has written its line
        process.kill()
    os.kill(of(tmp_path, "fact")[1]["pid"], signal.SIGKILL)  # the runner could not
    assert "| first | passed |" in (tmp_path / REPORT).read_text()
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"stage": "second", "ki')  # what was being written
    subprocess.run([sys.executable, "-m", "bench.gpu", "report", str(tmp_path)], cwd=ROOT, check=True)
    assert "| second | was ended together with everything |" in (tmp_path / REPORT).read_text()
    run_all([stage("second", "write('fact', value=2)")], tmp_path, 60)
    assert [(line["stage"], line["value"]) for line in of(tmp_path, "fact")] == [("first", 1), ("second", 2)]


def test_the_report_has_a_table_for_each_kind_and_texts_below(tmp_path: Path) -> None:
    own = Journal("smoke", tmp_path / JOURNAL)
    own.write("failure", ok=False, test="step | bf16", trace="Traceback\nValueError: 3")
    for number in (1, 2):
        own.write("so far", passed=number, share=0.91234)
    own.write("end", outcome="failed (1)", seconds=3.0)
    text = journal.markdown(journal.read(tmp_path / JOURNAL))
    assert "| smoke | failed (1) | 3 | 1 |" in text
    assert "### failure\n\n| ok | test |\n| --- | --- |\n| False | step \\| bf16 |" in text
    assert "````\nTraceback\nValueError: 3\n````" in text
    assert "### so far\n\n| passed | share |\n| --- | --- |\n| 2 | 0.9123 |" in text
    assert "Traceback" not in journal.markdown(journal.read(tmp_path / JOURNAL), texts=False)


# ---- smoke ----------------------------------------------------------------------------------------------------------

ENDS = {
    "passed": "write('so far', ended=True)",
    "failed": "write('so far', ended=True); sys.exit(1)",
    "hangs or dies": "write('so far', begins='window'); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("outcome", ENDS)
def test_smoke_tells_wrong_bits_from_launches_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setenv(journal.FILE, str(tmp_path / JOURNAL))
    own = Journal("smoke")
    own.write("so far", begins="another backend's test")
    run = program(START.replace("'x'", "'smoke'") + ENDS[outcome])
    assert smoke.conforms(own, "cuda", run) is (outcome == "passed")
    (line,) = of(tmp_path, "backend")
    assert (line["outcome"], line.get("in_test")) == (outcome, "window" if outcome == "hangs or dies" else None)


@pytest.mark.parametrize("run", [smoke.TESTS["cuda"], smoke.DRY_TESTS["emulated"], sanitize.TESTS])
def test_the_names_by_which_a_stage_chooses_tests_are_those_of_tests(tmp_path: Path, run: list[str]) -> None:
    (tmp_path / "with_a_gpu.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    known = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    program = [*run[:3], "-p", "with_a_gpu", *run[3:], "--collect-only", "-q"]
    done = subprocess.run(program, cwd=ROOT, env={**os.environ, **known}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert all(name in done.stdout for name in run[run.index("-k") + 1].split(" or "))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_builds_and_then_runs_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command, "run_all", lambda stages, folder, seconds: ran.append([s.name for s in stages]) or [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for names in ([], ["probe", "smoke"], ["--dry"]):
        monkeypatch.delenv(DRY, raising=False)
        monkeypatch.setattr(sys, "argv", ["bench.gpu", *names, "--report", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code is None
    assert ran == [[*command.SECONDS], ["build", "smoke", "probe"], [*command.SECONDS][1:]]
    monkeypatch.delenv(DRY)
    assert sum(command.SECONDS.values()) == 60 * command.MINUTES
    assert all((ROOT / "bench" / "gpu" / f"{name}.py").exists() for name in command.SECONDS)
    for wrong, said in ((["smok"], "2"), ([], "finds no GPU that it can use; --dry runs the stages without one")):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["bench.gpu", *wrong])
        with pytest.raises(SystemExit, match=said):
            command.main()


def test_make_has_a_target_for_each_stage_and_reports_into_the_folder_for_outputs() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    # Of the make that runs these tests, and of what runs that.
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name not in ("ARGS", "OUT")}
    for target, asked in {"gpu": [], **{f"gpu-{name}": [name] for name in command.SECONDS}}.items():
        run = ["make", "--no-print-directory", "-n", target]
        said = subprocess.run(run, cwd=ROOT, env={**outside, "OUT": "/a"}, capture_output=True, text=True).stdout
        assert said.split() == ["python3", "-m", "bench.gpu", "--minutes", "9.5", "--report", '"/a"', *asked]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder, in place of this one; its build writes what it was asked for into the module."""
    for name in ("csrc/rules.h", "setup.py", "accumfused/compiling.py", "report/x", "other/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "KEPT", tmp_path / "build" / "gpu")
    monkeypatch.setattr(build, "MODULE", tmp_path / "accumfused" / "_C.so")
    return tmp_path


def test_the_module_is_stored_by_content_in_the_reports_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiles(card: str) -> None:
        calls.append(card)
        build.MODULE.write_text(f"for {card}, build {len(calls)}")

    monkeypatch.setattr(build, "compile_module", compiles)
    own = Journal("build", source / JOURNAL)

    def built(card: str = "90", folder: str = "report") -> tuple[str, int]:
        assert build.build(own, card, source / folder)
        return build.MODULE.read_text(), len(calls)

    assert built() == built() == ("for 90, build 1", 1)
    os.utime(source / "csrc/rules.h", (1, 1))  # a copy of the same sources is not a change
    assert built() == ("for 90, build 1", 1)
    assert built("100") == ("for 100, build 2", 2)
    assert built() == ("for 90, build 1", 2)  # both lie there
    (source / "csrc/rules.h").write_text("changed")
    assert built() == ("for 90, build 3", 3)
    monkeypatch.setenv("CXXFLAGS", "-g")
    assert built() == ("for 90, build 4", 4)
    monkeypatch.setattr(build, "KEPT", source / "report")  # carried here; this run reports elsewhere
    assert built(folder="other") == ("for 90, build 4", 4)
    assert [path.read_text() for path in (source / "other").glob("_C-*.so")] == ["for 90, build 4"]


def test_where_the_kernels_do_not_build_there_is_a_module_without_them(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(card: str) -> str | None:
        build.MODULE.write_text("")
        return "launch.cu:1: error: no" if card else None

    monkeypatch.setattr(build, "compile_module", compiles)
    assert not build.build(Journal("build", source / JOURNAL), "90", source / "report")
    kernels, without = of(source, "module")
    assert (kernels["ok"], kernels["compiler"]) == (False, "launch.cu:1: error: no")
    assert (without["is_for"], without["ok"]) == ("CPUs", True)


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")
def test_the_build_does_not_read_what_an_old_setuptools_refuses(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setup.py", "README.md", "accumfused/compiling.py"):
        shutil.copy2(ROOT / name, source / name)
    shutil.copytree(ROOT / "accumfused" / "rules", source / "accumfused" / "rules", dirs_exist_ok=True)
    (source / "pyproject.toml").write_text("[project]\nname = 3\n")
    monkeypatch.setenv("CXX", "false")
    assert "false cannot compile C++17" in (build.compile_module("90") or "")


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
ABOUT_GPUS = """
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
        environment = {**os.environ, **known, DRY: "1"}
        run = gpu_tests.command("test", "cuda,triton", 3, *arguments)
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr, journal.read(tmp_path / "lines")

    return run


def test_failures_are_known_at_once_and_hangs_and_broken_gpus_end_one_process(run_pytest: Run) -> None:
    pytest.importorskip("xdist")
    workers = ("-p", "xdist", "-n", "1", "--dist", "load")
    said, lines = run_pytest({"test_gpu_x.py": FAILING, "test_y.py": "import not_there"}, *workers)
    failed = {line["test"].split("::")[1]: line["says"] for line in lines if line["kind"] == "failure"}
    assert failed.keys() == {"test_first", "test_third", "test_fourth"}
    assert failed["test_first"] == "assert (1 + 1) == 3"
    assert "crashed while running" in failed["test_third"]
    assert "Timeout (0:00:03)!" in said
    assert [line for line in lines if line["kind"] == "so far"][-1]["passed"] == 2
    (line,) = (line for line in lines if line["kind"] == "not collected")
    assert "No module named 'not_there'" in line["trace"]


def test_in_one_process_the_last_line_names_the_test_that_hangs(run_pytest: Run) -> None:
    _, lines = run_pytest({"test_gpu_x.py": FAILING})
    last = [line for line in lines if line["kind"] == "so far"][-1]
    assert last["begins"] == "test_gpu_x.py::test_third"
    assert "ended" not in last


def test_only_what_needs_a_gpu_runs_and_the_cuda_backend_comes_first(run_pytest: Run) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": ORDERED, "test_gpu_b.py": ABOUT_GPUS}
    said, _ = run_pytest(files, "--collect-only", "-q")
    assert [line.split("::")[1] for line in said.splitlines() if "::" in line] == [
        "test_for_all[cuda]", "test_both[cuda]", "test_alone", "test_places[cuda]", "test_compiles[cuda-rare]",
        "test_for_all[triton]", "test_both[triton]", "test_compiles[triton-rare]",
    ]  # fmt: skip
