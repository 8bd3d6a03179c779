"""A plugin for pytest (`-p bench.gpu.failures`): each failure goes to the report the moment it happens.

With --gpu-backends only what runs on a GPU is taken: first the tests of the backend named first, of the files about
GPUs before all others, and last those of rules without kernels in the native module, which Triton compiles for seconds
each. A worker whose GPU has become unusable ends, and xdist starts another: what comes next is not to blame.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.gpu.journal import Journal

ASKS = "cuda.is_available"  # in the text of a file in which a test may need a GPU
BY = ("gpu", "backend", "place")  # the tests' parameters that are a backend
_EVERY = 2.0  # seconds between two counts
_MOST = 100  # failures with their traceback
_LAST = 6000  # characters of one
_UNUSABLE = 70  # the exit code


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-backends", default="", metavar="LIST", help="only tests of these, in this order")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker())
    else:
        config.pluginmanager.register(Reporter(Journal.of_this_process("test")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [name for name in config.getoption("--gpu-backends").split(",") if name]
    if not wanted:
        return
    order = {item: _order(item, wanted) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if order[item] is None])
    items[:] = sorted((item for item in items if order[item] is not None), key=lambda item: order[item] or ())


def _order(item: pytest.Item, wanted: list[str]) -> tuple[int, ...] | None:
    """Which backend's, whether of a file about GPUs, and of a rule in the native module (tests/table.py).

    None: it does not run on a GPU, or is another stage's.
    """
    about_gpus = _is_about_gpus(item.path)
    params = getattr(getattr(item, "callspec", None), "params", {})
    name = next((params[key] for key in BY if key in params), wanted[0] if about_gpus else None)
    emulated = "emulated" in getattr(item, "fixturenames", ())  # which takes a minute to compile
    if name not in wanted or emulated or "sanitizer" in item.nodeid:
        return None
    compiles = any(not getattr(value, "is_common", True) for value in params.values())
    return wanted.index(name), int(not about_gpus), int(compiles)


@functools.cache
def _is_about_gpus(path: Path) -> bool:
    """Whether a test of it that is not for every backend may need a GPU."""
    return ASKS in path.read_text()


class Reporter:
    """Where the reports of all workers arrive."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._counts, self._skips = journal, Counter[str](), Counter[str]()
        self._began = self._told = time.monotonic()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            facts = {"test": report.nodeid, "when": report.when, "says": _last_line(report.longreprtext)}
            if self._counts["failed"] <= _MOST:
                facts["trace"] = report.longreprtext[-_LAST:]
            self._journal.write("failure", ok=False, **facts)
        elif report.skipped:
            self._counts["skipped"] += 1
            self._skips[report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext] += 1
        elif report.when == "call":
            self._counts["passed"] += 1
        if time.monotonic() - self._told > _EVERY:
            self._tell()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._journal.write("not collected", ok=False, file=report.nodeid, trace=report.longreprtext[-_LAST:])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._tell()
        for reason, number in self._skips.most_common(10):
            self._journal.write("skipped", tests=number, reason=reason)

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._journal.write("so far", **self._counts, seconds=round(self._told - self._began, 1))


class Worker:
    """In each of xdist's processes."""

    _failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """After a failure: every later call would fail with the same error."""
        if not self._failed:
            return
        self._failed = False
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(_UNUSABLE)


def _last_line(text: str) -> str:
    """What went wrong: the last line that pytest marks as the error, else the last one."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1]
