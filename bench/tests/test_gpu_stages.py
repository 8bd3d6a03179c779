"""`make gpu` without a GPU: its stages, over the emulation and over commands of a line, and their report."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import build, journal, page, stages
from bench.gpu.journal import Journal
from bench.gpu.stages import BENCH, JOURNAL, LOG, PAGE, Stage, python, run_all

ROOT = Path(__file__).parents[2]
WRITES = (
    "import os, sys, time, signal; from bench.gpu.journal import Journal; write = Journal.of_this_process('?').write; "
)
Lines = list[dict[str, Any]]


def stage(name: str, code: str, share: float = 1.0) -> Stage:
    return Stage(name, share, python("-c", WRITES + code))


def of(lines: Lines, stage: str, kind: str) -> Lines:
    return [line for line in lines if (line["stage"], line["kind"]) == (stage, kind)]


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_the_next_stage_runs_whatever_the_last_one_said(tmp_path: Path) -> None:
    several = [stage("bad", "write('fact', value=1); sys.exit(3)"), stage("good", "write('fact', value=2)")]
    assert run_all(several, tmp_path, 600) == ["bad"]
    lines = journal.read(tmp_path / JOURNAL)
    assert [of(lines, name, "end")[0]["outcome"] for name in ("bad", "good")] == ["failed (3)", "passed"]
    assert [of(lines, name, "fact")[0]["value"] for name in ("bad", "good")] == [1, 2]


def test_a_stage_whose_time_is_up_is_interrupted_and_can_say_what_it_knows(tmp_path: Path) -> None:
    code = "write('first')\ntry: time.sleep(600)\nexcept KeyboardInterrupt: write('last')"
    several = [
        Stage("long", 1, python("-c", WRITES.replace("; ", "\n") + code)),
        stage("next", "write('fact')", share=99),
    ]
    assert run_all(several, tmp_path, 400) == ["long"]
    lines = journal.read(tmp_path / JOURNAL)
    assert [line["kind"] for line in lines] == ["begin", "first", "last", "end", "begin", "fact", "end"]
    assert of(lines, "long", "end")[0]["outcome"] == "cut off"


def test_what_ignores_the_interrupt_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_GRACE", 0.5)
    code = "import subprocess; signal.signal(2, signal.SIG_IGN); child = subprocess.Popen(['sleep', '600']); "
    code += "write('child', pid=child.pid); time.sleep(600)"
    assert run_all([stage("deaf", code)], tmp_path, 5) == ["deaf"]
    pid = of(journal.read(tmp_path / JOURNAL), "deaf", "child")[0]["pid"]
    with contextlib.suppress(ProcessLookupError):  # it is gone
        assert select.select([os.pidfd_open(pid)], [], [], 60)[0], "it still runs"


def test_an_interrupt_reaches_a_stage_though_the_caller_ignores_it(tmp_path: Path) -> None:
    """As in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = "try: time.sleep(600)\nexcept KeyboardInterrupt: write('last')"
        run_all([Stage("long", 1, python("-c", WRITES.replace("; ", "\n") + code))], tmp_path, 5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert of(journal.read(tmp_path / JOURNAL), "long", "last")


def test_all_that_was_known_is_there_after_the_driver_was_killed(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from bench.gpu.stages import Stage, python, run_all
first = Stage("first", 1, python("-c", {WRITES + "write('fact', value=1)"!r}))
second = Stage("second", 1, python("-c", {WRITES + "write('fact', value=2, pid=os.getpid()); time.sleep(600)"!r}))
run_all([first, second], Path({str(tmp_path)!r}), 600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        said = next(line for line in driver.stdout if line.startswith("second: fact"))
        driver.kill()
    assert "value 2" in said
    lines = journal.read(tmp_path / JOURNAL)
    assert [line["value"] for line in lines if line["kind"] == "fact"] == [1, 2]
    assert "| first | passed |" in (tmp_path / PAGE).read_text()
    assert "| second | was ended together with everything |" in page.markdown(lines)
    os.kill(of(lines, "second", "fact")[0]["pid"], signal.SIGKILL)  # the driver could not


# ---- the report -----------------------------------------------------------------------------------------------------


def test_lines_of_other_stages_stay_and_a_broken_one_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    for name in ("one", "two"):
        Journal(path, name).write("fact", tensor=torch.float32)
    with path.open("a") as file:
        file.write('{"stage": "two", "ki')
    assert [line["stage"] for line in journal.read(path)] == ["one", "two"]
    journal.begin(path, ["two"])
    assert [line["stage"] for line in journal.read(path)] == ["one"]


def test_the_page_counts_what_is_ok_and_shows_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    own = Journal(path, "smoke")
    own.write("bits", ok=True, check="norm")
    own.write("bits", ok=False, check="step | bf16", trace="Traceback\nValueError: 3")
    own.write("so far", number=1)
    own.write("so far", number=2)
    own.write("end", outcome="failed (1)", seconds=3.0)
    text = page.markdown(journal.read(path))
    assert "| smoke | failed (1) | 3 | 1 | 1 |" in text
    assert "### bits: 1 of 2 ok" in text
    assert "| step \\| bf16 |" in text
    assert "norm" not in text
    assert "````\nTraceback\nValueError: 3\n````" in text
    assert "### so far\n\n| number |\n|---|\n| 2 |" in text
    assert "Traceback" not in page.markdown(journal.read(path), details=False)


def test_the_page_has_the_tables_of_the_suites_that_are_done(tmp_path: Path) -> None:
    report = pytest.importorskip("bench.report")
    done = report.Table(
        "verbs, GPT-2", [report.Column("name", ""), report.Column("ms", "ms", "{:.2f}")], notes=["a note"]
    )
    done.rows.append({"name": "norm | fp32", "ms": 1.234})
    report.write_json(tmp_path / BENCH, {"date": "today"}, {"verbs": [done]})
    assert page.tables(tmp_path / "none.json") == ""
    assert "### verbs, GPT-2\n\n|  | ms |\n|---|---|\n| norm \\| fp32 | 1.23 |\n\na note\n" in page.tables(
        tmp_path / BENCH
    )
    run_all([stage("smoke", "")], tmp_path, 60)
    assert "verbs, GPT-2" in (tmp_path / PAGE).read_text()
    run_all([stage("bench", "")], tmp_path, 60)  # what it has written before is not of this run
    assert "verbs, GPT-2" not in (tmp_path / PAGE).read_text()


def test_the_command_runs_the_stages_that_are_asked_for_after_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [each.name for each in command.all_stages(tmp_path)]
    assert names == ["build", "smoke", "test", "probe", "bench", "sanitize"]
    assert sum(each.share for each in command.all_stages(tmp_path)) == 60 * command.MINUTES
    few = [stage(name, f"write('fact', name={name!r})") for name in names]
    monkeypatch.setattr(command, "all_stages", lambda folder, dry: few)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "probe", "smoke", "--report", str(tmp_path / "report")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code is None
    lines = journal.read(tmp_path / "report" / JOURNAL)
    assert [line["name"] for line in lines if line["kind"] == "fact"] == ["build", "smoke", "probe"]
    assert "| probe | passed |" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "report").iterdir()} == {JOURNAL, PAGE, LOG}
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "smok"])
    with pytest.raises(SystemExit):
        command.main()


def test_make_has_a_target_for_each_stage() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    # Of the make that runs these tests.
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    for target, asked in {"gpu": [], **{f"gpu-{name}": [name] for name in command.NAMES}}.items():
        said = subprocess.run(
            ["make", "--no-print-directory", "-n", target, "GPU_REPORT=r"],
            cwd=ROOT, env=outside, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert said.split() == ["python3", "-m", "bench.gpu", "--minutes", "9", "--report", '"r"', *asked]


# ---- build ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder of three files, in place of this one."""
    for name in ("csrc/rules.h", "setup.py", "accumfused/_C.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(build, "MODULE", tmp_path / "accumfused" / "_C.so")
    return tmp_path


def test_the_module_is_built_only_when_sources_or_the_card_have_changed(source: Path) -> None:
    calls = []

    def run(command: list[str], known: dict[str, str]) -> tuple[int, str]:
        calls.append(known.get("ACCUMFUSED_CUDA_ARCHS"))
        build.MODULE.write_text("built" * len(calls))
        return 0, ""

    for card in ("90", "90", "100"):
        assert build.built(card, run)[1] is None
    assert calls == ["90", "100"]
    os.utime(source / "csrc/rules.h", (1, 1))  # a copy of the same sources is not a change
    build.built("100", run)
    assert calls == ["90", "100"]
    (source / "csrc/rules.h").write_text("changed")
    build.built("100", run)
    build.built("100", run)
    assert calls == ["90", "100", "100"]
    build.MODULE.write_text("of another build")
    build.built("100", run)
    assert calls == ["90", "100", "100", "100"]


def test_a_build_that_fails_is_tried_again_and_says_why(source: Path) -> None:
    assert build.built("90", lambda command, known: (1, "rules.h:3: error: no")) == ("failed", "rules.h:3: error: no")
    assert build.built("90", lambda command, known: (0, "")) == ("built", None)


def test_where_the_kernels_do_not_build_there_is_a_module_without_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], known: dict[str, str]) -> tuple[int, str]:
        asked.append((known["ACCUMFUSED_CUDA"], known.get("ACCUMFUSED_CUDA_ARCHS")))
        return int(known["ACCUMFUSED_CUDA"]), "launch.cu:1: error: no"

    monkeypatch.setattr(build, "_run", run)
    assert not build._build(Journal(tmp_path / "lines", "build"), "90")
    assert asked == [("1", "90"), ("0", None)]
    kernels, without = of(journal.read(tmp_path / "lines"), "build", "module")
    assert (kernels["ok"], kernels["compiler"]) == (False, "launch.cu:1: error: no")
    assert (without["for"], without["outcome"]) == ("CPUs", "built")


def test_the_build_says_what_machine_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 345 MHz, 2619 MHz, 1980 MHz, 3201 MHz, 700.00 W, P0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    card = {"name": "fake", "major": 9, "minor": 0, "multi_processor_count": 2, "total_memory": 1, "L2_cache_size": 1}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**card))
    assert build._machine(Journal(tmp_path / "lines", "build")) == "90"
    lines = {line["kind"]: line for line in journal.read(tmp_path / "lines")}
    assert lines["nvidia-smi"]["clocks.sm"] == "345 MHz"
    assert lines["GPU"]["gpu"] == "fake"
    assert torch.__version__.startswith(lines["packages"]["torch"])
    assert lines["programs"]["nvidia-smi"] == str(program)


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")
def test_the_build_does_not_read_what_an_old_setuptools_refuses(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy2(ROOT / "setup.py", source)
    for name in ("compiling.py", "functors.py", "arithmetic.py", "rule.py"):  # which setup.py imports
        (source / "accumfused").mkdir(exist_ok=True)
        shutil.copy2(ROOT / "accumfused" / name, source / "accumfused")
    (source / "pyproject.toml").write_text("[project]\nname = 3\n")
    monkeypatch.setenv("CXX", "false")
    outcome, says = build.built(None, build._run)
    assert outcome == "failed"
    assert "false cannot compile C++17" in (says or "")
