"""tools/mutants.py: its defects fit the source, and only what is no accident of a test kills one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import emulation
import pytest

import accumfused as af

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
pytestmark = pytest.mark.skipif(
    not (TOOLS / "mutants").exists() or "AF_MUTANT" in os.environ, reason="needs the source, as it is"
)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("AF_MUTANTS_ROOT", str(TOOLS.parent))
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("mutants_plugin")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_each_mutant_stands_once_in_the_source() -> None:
    done = subprocess.run([sys.executable, TOOLS / "mutants.py", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
@pytest.mark.skipif(emulation.why_not() is not None, reason="needs g++")
@pytest.mark.parametrize("source", [*emulation.SOURCES[1:], ROOT / "csrc/cpu/baseline.cpp"], ids=lambda path: path.name)
def test_the_mutants_of_csrc_compile_side_by_side(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    mutants = importlib.import_module("mutants_list")
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in (ROOT / "csrc").rglob("*.*")}
    for name, data in mutants.switched(files, mutants.load()).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    compiles = emulation.check_source(tmp_path / source.relative_to(ROOT), tmp_path)
    assert compiles.returncode == 0, compiles.stderr


def does_not_raise() -> None:
    with pytest.raises(KeyError):
        pass


def fails(text: str = "1 == 2") -> None:
    raise AssertionError(text)


ELSEWHERE = f'worker 0:\nTraceback (most recent call last):\n  File "{__file__}", line 1, in <module>\nKeyError: 1\n'


@pytest.mark.parametrize(
    ("call", "kills"),
    [
        (fails, True),
        (does_not_raise, True),
        (lambda: af.AdamW([], max_grad_norm=-1.0), True),
        (lambda: warnings.warn("x", stacklevel=1), True),
        (lambda: {}["exp_avg"], False),
        (lambda: fails(ELSEWHERE), False),
    ],
    ids=["fails", "does not raise", "package raises", "warns", "test breaks", "breaks in another process"],
)
def test_assertions_and_what_the_package_raises_kill(call: Callable[[], Any], kills: bool, plugin: ModuleType) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # pytest's own failures are no Exceptions
        call()
    assert (plugin.why_killed(caught.value) is not None) == kills
