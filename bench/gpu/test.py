"""The tests that run on a GPU: a command, and the plugin for pytest that it loads (`-p bench.gpu.test`).

The plugin takes the tests of some backends, in order, and of each those of rules last that Triton compiles for seconds.
A failure is in the journal the moment it happens. A test that takes too long ends its process, and so does one whose
GPU has become unusable; xdist starts another process for the tests that are left.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu.journal import SO_FAR, Journal
from bench.gpu.runner import DRY, ROOT

_FOR_EVERY_BACKEND = re.compile(r"\bbackend: str\b|\bplace: Place\b")
_BACKENDS = ("cuda", "triton", "cpu", "torch", "emulated")
_WORKERS = 12  # each has its context on the GPU, of half a gigabyte
_MOST = 100  # failures with their traceback
_LAST = 6000  # characters of one
_UNUSABLE = 70  # the exit code


def main() -> None:
    run = command("test", "cuda,triton", 60, *map(str, files()))
    if os.environ.get(DRY):
        run = command("test", "torch,cpu", 60, str(ROOT / "tests" / "numbers" / "test_rules.py"), "-k", "no_decay")
    if importlib.util.find_spec("xdist"):
        # The last option: tests that a worker is given at once, so that the order holds across workers.
        workers = str(min(_WORKERS, os.cpu_count() or 1))
        run += ["-p", "xdist", "-n", workers, "--dist", "load", "--maxschedchunk", "8"]
    sys.stdout.flush()
    os.execv(run[0], run)


def command(stage: str, backends: str, seconds: int, *arguments: str) -> list[str]:
    """Returns the call of pytest with this plugin, which writes lines of this stage; `seconds`: a test's limit."""
    run = [sys.executable, "-m", "pytest", "-p", "bench.gpu.test", "-p", "no:cacheprovider", "-rs", "--tb=short"]
    options = ["--gpu-stage", stage, "--gpu-backends", backends, "--gpu-seconds", str(seconds)]
    return [*run, *options, *arguments]


def files() -> list[Path]:
    """Returns those about GPUs, and those with a test for every backend: to collect the others takes time."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if _about_gpus(path) or _FOR_EVERY_BACKEND.search(path.read_text())]


def _about_gpus(path: Path) -> bool:
    return path.name.startswith("test_gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-stage", metavar="STAGE", help="of the journal's lines")
    parser.addoption("--gpu-backends", metavar="LIST", help="in this order")
    parser.addoption("--gpu-seconds", type=float, metavar="N", help="that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(config))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Watchdog(config.getoption("--gpu-seconds")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--gpu-backends").split(",")
    order = {item: _order(item, wanted) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if order[item] is None])
    items[:] = sorted((item for item in items if order[item] is not None), key=lambda item: order[item] or ())


def _order(item: pytest.Item, wanted: list[str]) -> tuple[int, bool] | None:
    """Returns the place of its backend, and whether Triton compiles for it; None where it does not run on a GPU."""
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = [value for value in params if isinstance(value, str) and value in _BACKENDS]
    name = named[0] if named else wanted[0] if _about_gpus(item.path) else None
    if name not in wanted or "emulated" in getattr(item, "fixturenames", ()):  # which takes a minute to compile
        return None
    return wanted.index(name), any(not getattr(value, "is_common", True) for value in params)


class Reporter:
    """Writes the journal, in the process that has the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._journal, self._counts, self._told = Journal(config.getoption("--gpu-stage")), Counter[str](), 0.0
        self._seldom = 2.0 if config.getoption("numprocesses", None) else 0.0  # seconds between lines

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Says which test begins: if it is the last line, that test hangs."""
        if time.monotonic() - self._told >= self._seldom:
            self._told = time.monotonic()
            self._journal.write(SO_FAR, **self._counts, begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed or report.skipped:
            self._counts[report.outcome] += 1
        if report.failed:
            text = report.longreprtext[-_LAST:]
            marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            says = (marked[:1] or text.splitlines()[-1:] or [""])[0]
            trace = {"trace": text} if self._counts["failed"] <= _MOST else {}
            self._journal.write("failure", ok=False, test=report.nodeid, when=report.when, says=says, **trace)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._journal.write("not collected", ok=False, file=report.nodeid, trace=report.longreprtext[-_LAST:])

    def pytest_sessionfinish(self) -> None:
        self._journal.write(SO_FAR, **self._counts, ended=True)


class Watchdog:
    """Ends a process in which tests run, where they cannot go on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._failed = seconds, False
        self._output = os.dup(2)  # before a test's output takes its place

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Ends it where a test takes too long."""
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._output)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Ends it after a failure that every later call would repeat."""
        if self._failed and torch.cuda.is_initialized():
            self._failed = False
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(_UNUSABLE)


if __name__ == "__main__":
    main()
