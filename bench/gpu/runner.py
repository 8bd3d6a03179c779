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
# What a stage's process finds; bench/gpu/target.py reads both.
DRY, LAUNCHES = "ACCUMFUSED_GPU_DRY", "ACCUMFUSED_GPU_LAUNCHES"
_CUDA = "/usr/local/cuda/bin"  # nvcc and compute-sanitizer are often not on the PATH
_GRACE = 8.0  # seconds between the interrupt and the end
_START = 60.0  # seconds until the first line of a process that is watched: it imports torch
_LOOK = 0.1


@dataclass(frozen=True)
class Stage:
    """One command. Args: share: of the whole time, beside the other stages' shares."""

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
    deadline, bad = time.monotonic(), []
    with open(folder / LOG, "wb") as log:
        for stage in stages:
            own, began, outcome = Journal(stage.name, path), time.monotonic(), "interrupted"
            deadline += seconds * stage.share / whole
            own.write("begin", limit_seconds=round(deadline - began))
            try:
                outcome = watch(stage.command, path, deadline - began, known=mechanisms(path), log=log.fileno())
            finally:
                own.write("end", ok=outcome == "passed", outcome=outcome, seconds=round(time.monotonic() - began, 1))
                write_report(folder)
            bad += [] if outcome == "passed" else [stage.name]
    return bad


def write_report(folder: Path) -> None:
    (folder / REPORT).write_text(journal.markdown(journal.read(folder / JOURNAL)), encoding="utf-8")


def mechanisms(path: Path) -> dict[str, str]:
    """The variable with those that smoke has left on; nothing where it has not run."""
    lines = [line for line in journal.read(path) if line["kind"] == "mechanisms"]
    return {LAUNCHES: ",".join(lines[-1]["on"])} if lines else {}


def watch(
    command: Sequence[str], path: Path, seconds: float, *, known: Mapping[str, str],
    quiet: float | None = None, log: int | None = None,
) -> str:  # fmt: skip
    """Runs a command, and ends it with all that it has started.

    Args:
        path: the journal that it writes.
        known: more environment variables.
        quiet: it hangs where the journal gets no new line for so many seconds; None: only the whole time counts.
        log: a file for its output; None: ours.

    Returns:
        How it ended: "passed", "failed (exit code)", "cut off" or "hangs".
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", journal.FILE: str(path), **known}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), _CUDA])
    size = path.stat().st_size
    deadline = time.monotonic() + seconds
    silent_until = time.monotonic() + max(quiet or seconds, _START)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_own_group
    )
    outcome = "cut off"
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK)
            if path.stat().st_size > size:
                size, silent_until = path.stat().st_size, time.monotonic() + (quiet or seconds)
            if quiet is not None and time.monotonic() > silent_until:
                outcome = "hangs"
                break
        if process.returncode is not None:
            outcome = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
    finally:
        _end(process, _GRACE if quiet is None else 0.0)
    return outcome


def _own_group() -> None:
    """One signal reaches all that a command has started; where ours ignores interrupts, theirs do not."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupts it, so that it can write what it knows, and ends its group."""
    if process.poll() is None and grace:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
