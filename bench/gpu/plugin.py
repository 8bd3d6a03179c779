"""The plugin of pytest for tests on a GPU (`-p bench.gpu.plugin`): chooses and orders them, and tells at once.

Tests of some backends run, in order, and of each backend those of rules last that Triton compiles for seconds. A
failure is printed and a name that has passed is written the moment it happens. A test that takes too long ends its
process, and so does one whose GPU has become unusable; xdist starts another process for the tests that are left.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_BACKENDS = ("cuda", "triton", "cpu", "torch", "emulated")
_OFTEN = 50  # tests that have passed are a line
_TRACES = 100  # failures with their traceback
_UNUSABLE = 70  # the exit code


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-backends", metavar="LIST", help="in this order")
    parser.addoption("--gpu-seconds", type=float, metavar="N", help="that a test may take")
    parser.addoption("--gpu-leave-out", type=Path, metavar="FILE", help="names of tests, a line each")
    parser.addoption("--gpu-folder", type=Path, metavar="FOLDER", help="for passed.txt and running.txt")


def pytest_configure(config: pytest.Config) -> None:
    workers = config.getoption("numprocesses", None)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(config.getoption("--gpu-folder"), names_running=not workers))
    if hasattr(config, "workerinput") or not workers:
        config.pluginmanager.register(Watchdog(config.getoption("--gpu-seconds")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("--gpu-leave-out")
    passed = set(file.read_text().splitlines()) if file else set()
    wanted = config.getoption("--gpu-backends").split(",")
    order = {item: None if item.nodeid in passed else _order(item, wanted) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if order[item] is None])
    items[:] = sorted((item for item in items if order[item] is not None), key=lambda item: order[item] or ())


def _order(item: pytest.Item, wanted: list[str]) -> tuple[int, bool] | None:
    """Returns the place of its backend, and whether Triton compiles for it; None where it does not run on a GPU."""
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = [value for value in params if isinstance(value, str) and value in _BACKENDS]
    name = named[0] if named else wanted[0] if item.path.name.startswith("test_gpu") else None
    if name not in wanted or "emulated" in getattr(item, "fixturenames", ()):  # which takes a minute to compile
        return None
    return wanted.index(name), any(not getattr(value, "is_common", True) for value in params)


class Reporter:
    """Prints results, in the process that has the reports of all workers."""

    def __init__(self, folder: Path | None, names_running: bool) -> None:
        self._counts, self._skipped, self._called = Counter[str](), Counter[str](), ""
        self._passed = folder / "passed.txt" if folder else Path(os.devnull)
        self._running = folder / "running.txt" if folder and names_running else None

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """Prints no dots."""
        return "", "", ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Writes which test runs: the file stays if the process ends here."""
        if self._running:
            self._running.write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            text = report.longreprtext
            says = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            print(f"FAILED: {report.nodeid}, {report.when}: {(says or text.splitlines()[-1:])[0]}", flush=True)
            if self._counts["failed"] <= _TRACES:
                print(text, flush=True)
        elif report.skipped:
            self._skipped[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
        elif report.when == "call":
            self._called = report.nodeid
        elif report.when == "teardown" and self._called == report.nodeid:
            self._counts["passed"] += 1
            with self._passed.open("a") as file:
                file.write(f"{report.nodeid}\n")
            if self._counts["passed"] % _OFTEN == 0:
                self._say()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(f"NOT COLLECTED: {report.nodeid}\n{report.longreprtext}", flush=True)

    def pytest_sessionfinish(self) -> None:
        self._say()
        for reason, number in self._skipped.most_common():
            print(f"skipped {number}: {reason}", flush=True)
        if self._running:
            self._running.unlink(missing_ok=True)

    def _say(self) -> None:
        counts = self._counts["passed"], self._counts["failed"], self._skipped.total()
        print("tests: {} passed, {} failed, {} skipped".format(*counts), flush=True)


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
