"""Runs commands in turn, each with a limit: an interrupt when its time is up, the end soon after, and the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.gpu import journal, page
from bench.gpu.journal import Journal

ROOT = Path(__file__).parents[2]
JOURNAL, PAGE, BENCH, LOG = "report.jsonl", "report.md", "bench.json", "output.txt"
_CUDA = ("/usr/local/cuda/bin",)  # nvcc, ncu and compute-sanitizer are often not on the PATH
_GRACE = 8.0  # seconds between the interrupt and the end
_LOOK = 0.2


@dataclass(frozen=True)
class Stage:
    """One command. Args: share: of the whole time, beside the other stages' shares."""

    name: str
    share: float
    command: Sequence[str]


def run_all(stages: Sequence[Stage], folder: Path, seconds: float) -> list[str]:
    """Runs them; what one leaves of its time the next ones have too.

    Args:
        folder: the report's: journal, page, and what the stages have printed.
        seconds: for all of them.

    Returns:
        The names of those that failed or were cut off.
    """
    whole = sum(stage.share for stage in stages)
    journal.begin(folder / JOURNAL, [stage.name for stage in stages])
    if "bench" in [stage.name for stage in stages]:
        (folder / BENCH).unlink(missing_ok=True)
    began, share, bad = time.monotonic(), 0.0, []
    with open(folder / LOG, "wb") as log:
        for stage in stages:
            share += stage.share
            if _run(stage, folder, began + seconds * share / whole, log) != "passed":
                bad.append(stage.name)
    return bad


def write_page(folder: Path) -> None:
    text = page.markdown(journal.read(folder / JOURNAL)) + page.tables(folder / BENCH)
    (folder / PAGE).write_text(text, encoding="utf-8")


def _run(stage: Stage, folder: Path, deadline: float, log: IO[bytes]) -> str:
    """How it ended: "passed", "failed (exit code)", "cut off"."""
    lines = folder / JOURNAL
    own = Journal(lines, stage.name)
    began = time.monotonic()
    own.write("begin", limit_seconds=round(deadline - began))
    told, outcome = lines.stat().st_size, "cut off"
    log.write(f"==== {stage.name}: {' '.join(stage.command)}\n".encode())
    log.flush()
    known = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *_CUDA]),
        "PYTHONUNBUFFERED": "1", journal.FILE: str(lines), journal.STAGE: stage.name,
    }  # fmt: skip
    process = subprocess.Popen(
        stage.command, cwd=ROOT, env={**os.environ, **known}, stdin=subprocess.DEVNULL, stdout=log,
        stderr=subprocess.STDOUT, preexec_fn=_own_group,
    )  # fmt: skip
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
            told = _tell(lines, told)
        if process.returncode is not None:
            outcome = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
    finally:
        _end(process)
        _tell(lines, told)
        own.write("end", ok=outcome == "passed", outcome=outcome, seconds=round(time.monotonic() - began, 1))
        write_page(folder)
    return outcome


def _own_group() -> None:
    """One signal reaches all that a stage has started; where ours ignores interrupts, theirs do not."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process, which can then write what it knows, and ends it with all that it has started."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tell(lines: Path, told: int) -> int:
    """Says what is new and not simply ok; how far the journal was read."""
    with open(lines, "rb") as file:
        file.seek(told)
        new = file.read()
    new = new[: new.rfind(b"\n") + 1]
    for line in journal.parse(new.decode()):
        if line.get("ok") is not True and line["kind"] not in journal.LATEST:
            print(journal.say(line), flush=True)
    return told + len(new)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
