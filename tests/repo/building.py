"""A build on a copy of the source: made here and now, as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = f"accumfused/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
REASON = "accumfused/_native_error.txt"
OBJECTS = "build/temp/native"
# Runs a program in a session of its own, whose terminal is the first argument.
ON_TERMINAL = "import os, sys; os.setsid(); os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"

needs_source = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")


def copy_of_the_source(folder: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy2(ROOT / name, folder)
    for name in ("csrc", "accumfused"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_C.*", "_native_error.txt"))
    return folder


def setup_py(source: Path, *command: str, terminal: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")}
    modes = {"ACCUMFUSED_NATIVE": "auto", "ACCUMFUSED_CUDA": "0"}
    on_terminal = [sys.executable, "-c", ON_TERMINAL, terminal] if terminal else []
    return subprocess.run(
        [*on_terminal, sys.executable, "setup.py", *command],
        cwd=source, env={**known, **modes, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def built(folder: Path) -> Path:
    """A source folder in which the native module was built once, for CPUs."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    source = copy_of_the_source(folder)
    done = build_in_place(source, ACCUMFUSED_NATIVE="1")
    assert done.returncode == 0, done.stderr
    return source


def says(source: Path, *command: str) -> str:
    """What Python prints that runs there: `-m accumfused`, or `-c` and a program."""
    return subprocess.run([sys.executable, *command], cwd=source, check=True, capture_output=True, text=True).stdout


def build_in_place(source: Path, **options: str) -> subprocess.CompletedProcess[str]:
    return setup_py(source, "build_ext", "--inplace", "--build-temp", "build/temp", **options)


def written(source: Path) -> dict[str, int]:
    """When each object was last written."""
    return {path.name: path.stat().st_mtime_ns for path in (source / OBJECTS).iterdir() if path.suffix in (".o", ".so")}
