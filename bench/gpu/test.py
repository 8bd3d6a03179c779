"""The tests that run on a GPU: a command, and the plugin for pytest that it loads (`-p bench.gpu.test`).

The plugin takes what runs on a GPU: first the CUDA backend's tests, of the files about GPUs before all others, then
Triton's, and of each those of rules last that Triton compiles for seconds. A failure is in the journal the moment it
happens. A test has a minute; then its process writes where it hangs and ends, and so does one whose GPU has become
unusable: xdist starts another for the tests that are left.
"""

from __future__ import annotations

import faulthandler
import functools
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

ROOT = Path(__file__).parents[2]
BACKENDS = ("cuda", "triton")
ASKS = "cuda.is_available"  # in the text of a file in which a test may need a GPU
_SECONDS = "ACCUMFUSED_GPU_SECONDS"  # for each test
_WORKERS = 12  # each has its context on the GPU, of half a gigabyte
_MOST = 100  # failures with their traceback
_LAST = 6000  # characters of one
_UNUSABLE = 70  # the exit code


def main() -> None:
    plugin = ["-p", "bench.gpu.test", "-rN", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    side_by_side = ["-p", "xdist", "-n", str(min(_WORKERS, os.cpu_count() or 1)), "--dist", "load"]
    side_by_side += ["--maxschedchunk", "8"]  # tests that a worker is given at once: the order holds across workers
    which = [str(path) for path in files()]
    if os.environ.get("ACCUMFUSED_GPU_DRY"):
        which = ["-k", "no_decay", "--gpu-backends", "torch,cpu", str(ROOT / "tests" / "numbers" / "test_rules.py")]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # without the plugins that happen to be installed
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *plugin, *side_by_side, *which])


def files() -> list[Path]:
    """Those with a test for every backend, and those about GPUs: to collect the others takes time."""
    needs = re.compile(rf"\bbackend: str\b|\bplace: Place\b|{re.escape(ASKS)}")
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if needs.search(path.read_text())]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-backends", default=",".join(BACKENDS), metavar="LIST", help="in this order")


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.enable(os.dup(2))  # before pytest takes it for a test's output
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker())
        if not os.environ.get("ACCUMFUSED_GPU_DRY") and torch.cuda.is_available():
            from bench.gpu.target import Target

            Target.here()  # switches off what smoke has found
    else:
        config.pluginmanager.register(Reporter())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {item: _order(item, config.getoption("--gpu-backends").split(",")) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if order[item] is None])
    items[:] = sorted((item for item in items if order[item] is not None), key=lambda item: order[item] or ())


def _order(item: pytest.Item, wanted: list[str]) -> tuple[int, ...] | None:
    """Which backend's, whether of a file about GPUs, whether Triton compiles; None: it does not run on a GPU."""
    params = list(getattr(getattr(item, "callspec", None), "params", {}).values())
    about_gpus = _asks(item.path)
    named = [value for value in params if isinstance(value, str) and value in ("torch", "cpu", "emulated", *BACKENDS)]
    name = named[0] if named else wanted[0] if about_gpus else None
    if name not in wanted or "emulated" in getattr(item, "fixturenames", ()):  # which takes a minute to compile
        return None
    compiles = any(not getattr(value, "is_common", True) for value in params)
    return wanted.index(name), int(not about_gpus), int(compiles)


@functools.cache
def _asks(path: Path) -> bool:
    return ASKS in path.read_text()


class Reporter:
    """Gets the reports of all workers."""

    def __init__(self) -> None:
        self._journal, self._counts, self._skips = Journal("test"), Counter[str](), Counter[str]()
        self._told = time.monotonic()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            text = report.longreprtext[-_LAST:]
            marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            says = (marked or [line for line in text.splitlines()[-1:]] or [""])[0]
            trace = {"trace": text} if self._counts["failed"] <= _MOST else {}
            self._journal.write("failure", ok=False, test=report.nodeid, when=report.when, says=says, **trace)
        elif report.skipped:
            self._counts["skipped"] += 1
            self._skips[report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext] += 1
        elif report.when == "call":
            self._counts["passed"] += 1
        if time.monotonic() - self._told > 2:
            self._tell()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._journal.write("not collected", ok=False, file=report.nodeid, trace=report.longreprtext[-_LAST:])

    def pytest_sessionfinish(self) -> None:
        self._tell()
        for reason, number in self._skips.most_common(10):
            self._journal.write("skipped", tests=number, reason=reason)

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._journal.write("so far", **self._counts)


class Worker:
    """In each of xdist's processes."""

    _failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Ends this process where a test takes too long, and after a failure that every later call would repeat."""
        faulthandler.dump_traceback_later(float(os.environ.get(_SECONDS, "60")), exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._failed and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self._failed = False
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    os._exit(_UNUSABLE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed


if __name__ == "__main__":
    main()
