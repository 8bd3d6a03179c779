"""The tests that run on a GPU: a command, and the plugin for pytest that it loads (`-p bench.gpu.test`).

The plugin takes the tests that run on a GPU: first the CUDA backend's, of the files about GPUs before all others, then
Triton's, and of each those of rules last that Triton compiles for seconds. A failure is in the journal the moment it
happens. A test that takes too long ends its process, and so does one whose GPU has become unusable; xdist starts
another process for the tests that are left. Neither xdist nor hypothesis need be installed: without the latter, tests
of drawn values are skipped.
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
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, ROOT, python

ASKS = "cuda.is_available"  # in the text of a file in which a test may need a GPU
SECONDS = "ACCUMFUSED_GPU_TEST_SECONDS"  # the variable with the limit of each test
_BACKENDS = ("cuda", "triton", "cpu", "torch", "emulated")
_WORKERS = 12  # each has its context on the GPU, of half a gigabyte
_MOST = 100  # failures with their traceback
_LAST = 6000  # characters of one
_UNUSABLE = 70  # the exit code


def main() -> None:
    arguments = ["--gpu-backends", "cuda,triton", *map(str, files())]
    if os.environ.get(DRY):
        arguments = ["-k", "no_decay", "--gpu-backends", "torch,cpu", str(ROOT / "tests" / "numbers" / "test_rules.py")]
    if importlib.util.find_spec("xdist"):
        # The last option: tests that a worker is given at once, so that the order holds across workers.
        workers = str(min(_WORKERS, os.cpu_count() or 1))
        arguments += ["-p", "xdist", "-n", workers, "--dist", "load", "--maxschedchunk", "8"]
    sys.stdout.flush()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # without the plugins that happen to be installed
    run = command("test", *arguments)
    os.execv(run[0], run)


def command(stage: str, *arguments: str) -> list[str]:
    """Returns the call of pytest with this plugin, which writes the journal's lines of this stage."""
    known = ["-p", "bench.gpu.test", "-p", "no:cacheprovider", "-rs", "--tb=short", "--gpu-stage", stage]
    return python("-m", "pytest", *known, *arguments)


def files() -> list[Path]:
    """Returns those with a test for every backend, and those about GPUs: to collect the others takes time."""
    needs = re.compile(rf"\bbackend: str\b|\bplace: Place\b|{re.escape(ASKS)}")
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if needs.search(path.read_text())]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-backends", default="cuda,triton", metavar="LIST", help="in this order")
    parser.addoption("--gpu-stage", default="test", metavar="STAGE", help="of the journal's lines")
    if importlib.util.find_spec("hypothesis") is None:
        same = mock.MagicMock(side_effect=lambda **settings: lambda test: test)
        stand_in = mock.MagicMock(given=lambda *drawn, **named: _skipped, settings=same)
        sys.modules |= dict.fromkeys(("hypothesis", "hypothesis.strategies", "hypothesis.stateful"), stand_in)


def _skipped(test: Any) -> Any:
    """Takes the place of a test of drawn values, or of a function within a test."""
    reason = "hypothesis is not installed"
    inside = "<locals>" in test.__qualname__
    return (lambda: pytest.skip(reason)) if inside else pytest.mark.skip(reason=reason)(test)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(config))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Watchdog())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--gpu-backends").split(",")
    asking = {path: ASKS in path.read_text() for path in {item.path for item in items}}
    order = {item: _order(item, wanted, asking[item.path]) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if order[item] is None])
    items[:] = sorted((item for item in items if order[item] is not None), key=lambda item: order[item] or ())


def _order(item: pytest.Item, wanted: list[str], asks: bool) -> tuple[int, ...] | None:
    """Which backend's, whether of a file about GPUs, whether Triton compiles; None: it does not run on a GPU."""
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = [value for value in params if isinstance(value, str) and value in _BACKENDS]
    name = named[0] if named else wanted[0] if asks else None
    if name not in wanted or "emulated" in getattr(item, "fixturenames", ()):  # which takes a minute to compile
        return None
    return wanted.index(name), int(not asks), int(any(not getattr(value, "is_common", True) for value in params))


class Reporter:
    """Writes the journal, in the process that has the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._journal, self._counts, self._told = Journal(config.getoption("--gpu-stage")), Counter[str](), 0.0
        self._seldom = 2.0 if config.getoption("numprocesses", None) else 0.0  # seconds between lines

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if time.monotonic() - self._told >= self._seldom:
            self._tell(begins=nodeid)

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
        self._tell(ended=True)

    def _tell(self, **facts: object) -> None:
        self._told = time.monotonic()
        self._journal.write("so far", **self._counts, **facts)


class Watchdog:
    """Ends a process in which tests run, where they cannot go on."""

    def __init__(self) -> None:
        self._failed, self._output = False, os.dup(2)  # before a test's output takes its place
        if not os.environ.get(DRY) and torch.cuda.is_available():
            from bench.gpu.card import allow

            allow()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Ends it where a test takes too long."""
        faulthandler.dump_traceback_later(float(os.environ.get(SECONDS, "60")), exit=True, file=self._output)
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
