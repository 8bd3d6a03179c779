"""The tests that run on a GPU: a command, and the plugin for pytest that it loads (`-p bench.gpu.test`).

The plugin takes what runs on a GPU: first the CUDA backend's tests, of the files about GPUs before all others, then
Triton's, and of each those of rules last that Triton compiles for seconds. A failure is in the journal the moment it
happens. A test has a minute; then its process writes where it hangs and ends, and so does one whose GPU has become
unusable: xdist starts another for the tests that are left.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, ROOT, python

ASKS = "cuda.is_available"  # in the text of a file in which a test may need a GPU
_BACKENDS = ("cuda", "triton", "cpu", "torch", "emulated")
_SECONDS = "ACCUMFUSED_GPU_TEST_SECONDS"  # for each test
_WORKERS = 12  # each has its context on the GPU, of half a gigabyte
_MOST = 100  # failures with their traceback
_LAST = 6000  # characters of one
_UNUSABLE = 70  # the exit code


def main() -> None:
    command = python("-m", "pytest", "-p", "bench.gpu.test", "-p", "no:cacheprovider", "-rs", "--tb=short")
    command += ["-p", "xdist", "-n", str(min(_WORKERS, os.cpu_count() or 1)), "--dist", "load"]
    command += ["--maxschedchunk", "8"]  # tests that a worker is given at once: the order holds across workers
    dry = ["-k", "no_decay", "--gpu-backends", "torch,cpu", str(ROOT / "tests" / "numbers" / "test_rules.py")]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # without the plugins that happen to be installed
    sys.stdout.flush()
    os.execv(command[0], [*command, *(dry if os.environ.get(DRY) else map(str, files()))])


def files() -> list[Path]:
    """Those with a test for every backend, and those about GPUs: to collect the others takes time."""
    needs = re.compile(rf"\bbackend: str\b|\bplace: Place\b|{re.escape(ASKS)}")
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if needs.search(path.read_text())]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-backends", default="cuda,triton", metavar="LIST", help="in this order")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Worker() if hasattr(config, "workerinput") else Reporter())


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
    """Gets the reports of all workers."""

    def __init__(self) -> None:
        self._journal, self._counts, self._told = Journal("test"), Counter[str](), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed or report.skipped:
            self._counts[report.outcome] += 1
        if report.failed:
            text = report.longreprtext[-_LAST:]
            marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            facts = {
                "test": report.nodeid,
                "when": report.when,
                "says": (marked[:1] or text.splitlines()[-1:] or [""])[0],
            }
            trace = {"trace": text} if self._counts["failed"] <= _MOST else {}
            self._journal.write("failure", ok=False, **facts, **trace)
        if time.monotonic() - self._told > 2:
            self._tell()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._journal.write("not collected", ok=False, file=report.nodeid, trace=report.longreprtext[-_LAST:])

    def pytest_sessionfinish(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._journal.write("so far", **self._counts)


class Worker:
    """In each of xdist's processes."""

    def __init__(self) -> None:
        self._failed, self._output = False, os.dup(2)  # before a test's output takes its place
        if not os.environ.get(DRY) and torch.cuda.is_available():
            from bench.gpu.target import Target

            Target()  # switches off the mechanisms that smoke has found to be wrong

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Ends this process where a test takes too long, and after a failure that every later call would repeat."""
        faulthandler.dump_traceback_later(float(os.environ.get(_SECONDS, "60")), exit=True, file=self._output)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._failed and torch.cuda.is_initialized():
            self._failed = False
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(_UNUSABLE)


if __name__ == "__main__":
    main()
