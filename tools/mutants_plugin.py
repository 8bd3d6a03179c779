"""A pytest plugin for tools/mutants.py: which failure kills a mutant, and which says no more than that a test broke.

In: AF_MUTANTS_ROOT, the repository; AF_MUTANTS_LOG, a file. Out: there, a line of JSON for each test that begins, for
each failure, and for the end of the session. AF_MUTANTS_STOP=1: the first failure that kills ends it; others never do.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(os.environ["AF_MUTANTS_ROOT"])
_PRODUCT = f"{_ROOT / 'accumfused'}{os.sep}"
_FRAME = re.compile(r'^ *File "([^"]+)", line \d+', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


def pytest_runtest_logstart(nodeid: str) -> None:
    _log(test=nodeid, at=time.time())


def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any]) -> None:
    assert call.excinfo is not None
    how = why_killed(call.excinfo.value)
    _log(failed=node.nodeid, how=how, error=f"{type(call.excinfo.value).__name__}: {str(call.excinfo.value)[:300]}")
    if how is not None and os.environ["AF_MUTANTS_STOP"] == "1":
        node.session.shouldfail = "the mutant is killed"


def pytest_sessionfinish(exitstatus: int) -> None:
    _log(ended=int(exitstatus))


def why_killed(error: BaseException) -> str | None:
    """How an exception kills a mutant; None where a test broke in its own lines, which any bad value may do."""
    inner = getattr(error, "exceptions", None)  # of a group: Hypothesis found several
    if inner is not None:
        return next(filter(None, map(why_killed, inner)), None)
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return _why_killed_elsewhere(str(error)) if _TRACEBACK in str(error) else "assertion"
    if isinstance(error, Warning):
        return "warned"  # every test claims that nothing warns
    for path in reversed(_paths(error)):
        if _is_ours(path):
            return f"raised {type(error).__name__}" if path.startswith(_PRODUCT) else None
    # pytest hides the exception of a module that does not import behind one of its own.
    return why_killed(error.__cause__) if error.__cause__ is not None else None


def _is_ours(path: str) -> bool:
    return path.startswith(f"{_ROOT}{os.sep}") and "site-packages" not in path  # an environment may lie in there


def _paths(error: BaseException) -> list[str]:
    paths, frame = [], error.__traceback__
    while frame is not None:
        paths.append(frame.tb_frame.f_code.co_filename)
        frame = frame.tb_next
    return paths


def _why_killed_elsewhere(text: str) -> str | None:
    """The same for another process, whose tracebacks the error's text has."""
    for trace in text.split(_TRACEBACK)[1:]:
        own = list(filter(_is_ours, _FRAME.findall(trace)))
        raised = [line for line in trace.splitlines() if re.match(r"[\w.]+(: |$)", line)]
        if own and own[-1].startswith(_PRODUCT):
            return "raised in another process"
        if raised and raised[0].partition(":")[0].rpartition(".")[2] in ("AssertionError", "Failed"):
            return "assertion in another process"
    return None


def _log(**entry: Any) -> None:
    with open(os.environ["AF_MUTANTS_LOG"], "a") as file:
        file.write(json.dumps(entry) + "\n")
