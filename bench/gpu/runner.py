"""Runs commands in turn, each with a limit: an interrupt when its time is up, the end soon after, and the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import journal
from bench.gpu.journal import Journal

ROOT = Path(__file__).parents[2]
JOURNAL, REPORT, LOG = "report.jsonl", "report.md", "output.txt"
LAUNCHES = "ACCUMFUSED_GPU_LAUNCHES"  # bench/gpu/target.py reads it
_CUDA = "/usr/local/cuda/bin"  # nvcc, ncu and compute-sanitizer are often not on the PATH
_GRACE = 8.0  # seconds between the interrupt and the end
_START = 60.0  # seconds until a child's first line: it imports torch
_LOOK = 0.1


@dataclass(frozen=True)
class Stage:
    """One command. Args: share: of the whole time, in seconds of the default."""

    name: str
    share: float
    command: Sequence[str]


def run_all(stages: Sequence[Stage], folder: Path, seconds: float) -> list[str]:
    """Runs them; what one leaves of its time the next ones have too.

    Args:
        folder: the report's: journal, report, and what the stages have printed.
        seconds: for all of them.

    Returns:
        The names of those that failed or were cut off.
    """
    path, whole = folder / JOURNAL, sum(stage.share for stage in stages)
    journal.forget(path, [stage.name for stage in stages])
    began, share, bad = time.monotonic(), 0.0, []
    with open(folder / LOG, "wb") as log:
        os.environ[journal.FILE] = str(path)
        for stage in stages:
            share += stage.share
            own, start = Journal(stage.name, path), time.monotonic()
            limit = began + seconds * share / whole - start
            own.write("begin", limit_seconds=round(limit))
            outcome = "interrupted"
            try:
                outcome = watch(stage.command, path, limit, known=launches(path), log=log.fileno(), tells=True)
            finally:
                passed = time.monotonic() - start
                own.write("end", ok=outcome == "passed", outcome=outcome, seconds=round(passed, 1))
                write_report(folder)
            if outcome != "passed":
                bad.append(stage.name)
    return bad


def write_report(folder: Path) -> None:
    (folder / REPORT).write_text(journal.markdown(journal.read(folder / JOURNAL)), encoding="utf-8")


def launches(path: Path) -> dict[str, str]:
    """The variable with the mechanisms that smoke has left on; nothing where it has not run."""
    lines = [line for line in journal.read(path) if line["kind"] == "mechanisms"]
    return {LAUNCHES: ",".join(lines[-1]["on"])} if lines else {}


def watch(
    command: Sequence[str], path: Path, seconds: float, *, quiet: float | None = None,
    known: Mapping[str, str] | None = None, log: int | None = None, tells: bool = False,
) -> str:  # fmt: skip
    """Runs a command as a group of processes, and ends the group.

    Args:
        path: the journal that it writes.
        quiet: it hangs where the journal gets no new line for so many seconds; None: only the whole time counts.
        known: more environment variables.
        log: a file for all output; None: ours.
        tells: whether new lines that are not simply ok are printed.

    Returns:
        How it ended: "passed", "failed (exit code)", "cut off" or "hangs".
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(known or {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), _CUDA])
    told = size = path.stat().st_size if path.exists() else 0
    deadline, heard, first = time.monotonic() + seconds, time.monotonic(), True
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_own_group
    )
    outcome = "cut off"
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK)
            told = _tell(path, told) if tells else told
            if path.exists() and path.stat().st_size > size:
                size, heard, first = path.stat().st_size, time.monotonic(), False
            if quiet is not None and time.monotonic() - heard > (max(quiet, _START) if first else quiet):
                outcome = "hangs"
                break
        if process.returncode is not None:
            outcome = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
    finally:
        _end(process, grace=_GRACE if quiet is None else 0.0)
        if tells:
            _tell(path, told)
    return outcome


def _own_group() -> None:
    """One signal reaches all that a command has started; where ours ignores interrupts, theirs do not."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupts the process, which can then write what it knows, and ends it with all that it has started."""
    if process.poll() is None and grace:
        _signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tell(path: Path, told: int) -> int:
    """Prints the new lines that are not simply ok; how far the journal was read."""
    with open(path, "rb") as file:
        file.seek(told)
        new = file.read()
    new = new[: new.rfind(b"\n") + 1]
    for line in journal.parse(new.decode()):
        if line.get("ok") is not True and line["kind"] not in journal.LATEST:
            print(journal.say(line), flush=True)
    return told + len(new)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
