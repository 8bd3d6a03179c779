"""Runs the stages in turn, each as a process with a limit: what has not ended then is killed, and the next one runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import journal
from bench.gpu.journal import Journal

ROOT = Path(__file__).parents[2]
JOURNAL, REPORT, LOG = "report.jsonl", "report.md", "output.txt"
DRY = "ACCUMFUSED_GPU_DRY"  # the variable that says to a stage's process that no GPU is there
_CUDA = "/usr/local/cuda/bin"  # nvcc and compute-sanitizer are often not on the PATH


@dataclass(frozen=True)
class Stage:
    """One command; `share`: of the whole time, beside the other stages' shares."""

    name: str
    share: float
    command: Sequence[str]


def run_all(stages: Sequence[Stage], folder: Path, seconds: float) -> list[str]:
    """Runs the stages; the next ones also have the time that one leaves.

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
                outcome = _run(stage.command, path, deadline - began, log.fileno())
            finally:
                own.write("end", ok=outcome == "passed", outcome=outcome, seconds=round(time.monotonic() - began, 1))
                write_report(folder)
            bad += [] if outcome == "passed" else [stage.name]
    return bad


def write_report(folder: Path) -> None:
    (folder / REPORT).write_text(journal.markdown(journal.read(folder / JOURNAL)), encoding="utf-8")


def _run(command: Sequence[str], path: Path, seconds: float, log: int) -> str:
    """Runs a command, kills in the end all that it has started, and says how it ended."""
    # Without the plugins of pytest that happen to be installed.
    known = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", journal.FILE: str(path)}
    known["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    known["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), _CUDA])
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **known}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        preexec_fn=os.setpgrp,  # one signal reaches all that it starts
    )  # fmt: skip
    try:
        code = process.wait(seconds)
        return "passed" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        return "cut off"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
