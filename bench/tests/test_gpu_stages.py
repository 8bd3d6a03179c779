"""`make gpu` without a GPU: its stages run and end, what is known survives, a launch that hangs is switched off."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu import build, journal, runner, smoke
from bench.gpu.journal import Journal
from bench.gpu.runner import JOURNAL, LAUNCHES, REPORT, ROOT, Stage, python, run_all

START = "import os, sys, signal, time\nfrom bench.gpu.journal import Journal\nwrite = Journal('x').write\n"
Lines = list[dict[str, Any]]


def stage(name: str, code: str, share: float = 1.0) -> Stage:
    return Stage(name, share, python("-c", START.replace("'x'", repr(name)) + code))


def of(folder: Path, kind: str) -> Lines:
    return [line for line in journal.read(folder / JOURNAL) if line["kind"] == kind]


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_the_next_stage_runs_whatever_the_last_one_said(tmp_path: Path) -> None:
    several = [stage("bad", "write('fact', value=1); sys.exit(3)"), stage("good", "write('fact', value=2)")]
    assert run_all(several, tmp_path, 600) == ["bad"]
    assert [line["outcome"] for line in of(tmp_path, "end")] == ["failed (3)", "passed"]
    assert [line["value"] for line in of(tmp_path, "fact")] == [1, 2]


def test_a_stage_whose_time_is_up_can_say_what_it_knows_though_the_caller_ignores_interrupts(tmp_path: Path) -> None:
    code = "write('fact', value=1)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: write('fact', value=2)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    try:
        assert run_all([stage("long", code), stage("next", "write('fact', value=3)", share=199)], tmp_path, 400) == [
            "long"
        ]
    finally:
        signal.signal(signal.SIGINT, before)
    assert [line["value"] for line in of(tmp_path, "fact")] == [1, 2, 3]
    assert of(tmp_path, "end")[0]["outcome"] == "cut off"


def test_what_ignores_the_interrupt_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_GRACE", 0.5)
    code = "import subprocess; signal.signal(2, signal.SIG_IGN); child = subprocess.Popen(['sleep', '600']); "
    code += "write('child', pid=child.pid); time.sleep(600)"
    assert run_all([stage("deaf", code)], tmp_path, 3) == ["deaf"]
    with contextlib.suppress(ProcessLookupError):  # it is gone
        assert select.select([os.pidfd_open(of(tmp_path, "child")[0]["pid"])], [], [], 60)[0], "it still runs"


def test_all_that_was_known_is_there_after_the_runner_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs")
    waits = f"write('fact', pid=os.getpid()); open({str(tmp_path / 'runs')!r}, 'w').close(); time.sleep(60)"
    stages = [stage("first", "write('fact', value=1)"), stage("second", waits)]
    code = "from pathlib import Path\nfrom bench.gpu.runner import Stage, run_all\n"
    code += f"run_all({stages!r}, Path({str(tmp_path)!r}), 60)"
    with subprocess.Popen(python("-c", code), cwd=ROOT) as process:
        (tmp_path / "runs").read_text()  # until the second stage has written its line
        process.kill()
    os.kill(of(tmp_path, "fact")[1]["pid"], signal.SIGKILL)  # the runner could not
    assert "| first | passed |" in (tmp_path / REPORT).read_text()
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"stage": "second", "ki')  # what was being written
    subprocess.run(python("-m", "bench.gpu", "report", str(tmp_path)), cwd=ROOT, check=True)
    assert "| second | was ended together with everything |" in (tmp_path / REPORT).read_text()
    run_all([stage("second", "write('fact', value=2)")], tmp_path, 60)
    assert [(line["stage"], line["value"]) for line in of(tmp_path, "fact")] == [("first", 1), ("second", 2)]


# ---- the ladder -----------------------------------------------------------------------------------------------------

RUNG = """
on = os.environ["ACCUMFUSED_GPU_LAUNCHES"]
write("so far", begins="norm")
write("bits", ok=True, check="norm")
write("so far", begins="step")
write("bits", ok=False, check="step")
if "queue" in on and hangs:
    write("so far", begins="window")
    time.sleep(600)
sys.exit(3)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_mechanism_that_hangs_is_off_in_later_stages_and_one_that_is_wrong_as_plain_is_not(
    tmp_path: Path, hangs: bool
) -> None:
    (tmp_path / JOURNAL).touch()
    own = Journal("smoke", tmp_path / JOURNAL)
    program = python("-c", START.replace("'x'", "'smoke'") + f"hangs = {hangs}" + RUNG)
    assert not smoke.climb(own, program, ["plain", *smoke.MECHANISMS], quiet=1.5)
    rungs = {line["rung"]: (line["outcome"], line["at check"]) for line in of(tmp_path, "rung")}
    assert rungs == {
        "plain": ("failed (3)", "step"), "queue": ("hangs", "window") if hangs else ("failed (3)", "step"),
    }  # fmt: skip
    assert of(tmp_path, "mechanisms")[-1]["on"] == ([] if hangs else ["queue"])
    assert of(tmp_path, "mechanisms")[-1]["off"] == (["queue"] if hangs else [])
    run_all([stage("versus", f"write('fact', on=os.environ[{LAUNCHES!r}])")], tmp_path, 60)
    assert of(tmp_path, "fact")[0]["on"] == ("" if hangs else "queue")


def test_a_rung_that_ends_early_leaves_its_mechanism_off(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).touch()
    own = Journal("smoke", tmp_path / JOURNAL)
    code = "if 'queue' in os.environ['ACCUMFUSED_GPU_LAUNCHES']: os.kill(os.getpid(), 9)"
    smoke.climb(own, python("-c", START + code), ["plain", "queue"], quiet=60)
    assert [line["outcome"] for line in of(tmp_path, "rung")] == ["passed", "failed (-9)"]
    assert of(tmp_path, "mechanisms")[-1]["on"] == []


# ---- the report and the command -------------------------------------------------------------------------------------


def test_the_report_counts_what_is_ok_and_shows_what_is_not(tmp_path: Path) -> None:
    own = Journal("smoke", tmp_path / JOURNAL)
    own.write("bits", ok=True, check="norm")
    own.write("bits", ok=False, check="step | bf16", trace="Traceback\nValueError: 3")
    for number in (1, 2):
        own.write("so far", number=number)
    own.write("rates", share=0.91234)
    own.write("end", outcome="failed (1)", seconds=3.0)
    text = journal.markdown(journal.read(tmp_path / JOURNAL))
    assert "| smoke | failed (1) | 3 | 1 | 1 |" in text
    assert "### bits: 1 of 2 ok\n\n| check |\n| --- |\n| step \\| bf16 |" in text
    assert "````\nTraceback\nValueError: 3\n````" in text
    assert "### so far\n\n| number |\n| --- |\n| 2 |" in text
    assert "| share |\n| --- |\n| 0.9123 |" in text
    assert "norm" not in text
    assert "Traceback" not in journal.markdown(journal.read(tmp_path / JOURNAL), texts=False)


def test_the_command_builds_and_then_runs_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command, "run_all", lambda stages, folder, seconds: ran.append([s.name for s in stages]) or [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for names in ([], ["probe", "smoke"], ["--dry"]):
        monkeypatch.delenv(runner.DRY, raising=False)
        monkeypatch.setattr(sys, "argv", ["bench.gpu", *names, "--report", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code is None
    assert ran == [[*command.SECONDS], ["build", "smoke", "probe"], [*command.SECONDS][1:]]
    monkeypatch.delenv(runner.DRY)
    assert sum(command.SECONDS.values()) == 60 * command.MINUTES
    assert all((ROOT / "bench" / "gpu" / f"{name}.py").exists() for name in command.SECONDS | command.ALONE)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "smok"])
    with pytest.raises(SystemExit, match="2"):
        command.main()


def test_without_a_gpu_the_command_says_so_in_a_line() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(python("-m", "bench.gpu"), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "finds no GPU that it can use; --dry runs the stages without one" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_make_has_a_target_for_each_stage_and_reports_into_the_folder_for_outputs() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    # Of the make that runs these tests, and of what runs that.
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name not in ("ARGS", "OUT")}
    for target, asked in {"gpu": [], **{f"gpu-{name}": [name] for name in command.SECONDS | command.ALONE}}.items():
        for out, folder in (({}, "build/gpu"), ({"OUT": "/there"}, "/there")):
            run = ["make", "--no-print-directory", "-n", target]
            said = subprocess.run(run, cwd=ROOT, env={**outside, **out}, capture_output=True, text=True).stdout
            assert said.split() == ["python3", "-m", "bench.gpu", "--minutes", "9.5", "--report", f'"{folder}"', *asked]


# ---- build ----------------------------------------------------------------------------------------------------------


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
    for name in ("setup.py", "accumfused/compiling.py"):
        shutil.copy2(ROOT / name, source / name)
    shutil.copytree(ROOT / "accumfused" / "rules", source / "accumfused" / "rules", dirs_exist_ok=True)
    (source / "pyproject.toml").write_text("[project]\nname = 3\n")
    monkeypatch.setenv("CXX", "false")
    assert "false cannot compile C++17" in (build.compile_module("90") or "")
