"""Says what machine this is, and builds the native module in place for its GPU, unless the report's folder has it.

A stored module's name is a digest of all that it depends on: sources, flags, compilers, Python. So a folder that is
carried to another machine saves the build there. setup.py runs in a folder without pyproject.toml, which setuptools
before 77 would refuse.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from accumfused.__main__ import installed
from accumfused.rules import to_cpp
from bench.gpu.journal import Journal
from bench.gpu.runner import ROOT
from bench.machine import gpu

MODULE = ROOT / "accumfused" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
KEPT = ROOT / "build" / "gpu"  # the report's folder, unless another one is asked for
_PACKAGES = ("torch", "triton", "pybind11", "ninja", "setuptools", "pytest", "pytest-xdist", "hypothesis")
_PROGRAMS = ("nvcc", "compute-sanitizer", "nvidia-smi", "g++")
_SETTINGS = ("CXX", "CXXFLAGS", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "LDSHARED", "LDFLAGS")
_LAST = 4000  # characters of what the compiler says


def main() -> None:
    own = Journal("build")
    own.write("packages", python=sys.version.split()[0], **{name: installed(name) for name in _PACKAGES})
    own.write("programs", **{name: shutil.which(name) for name in _PROGRAMS})
    facts = gpu(torch.device("cuda", 0))
    own.write("GPU", **facts)
    assert own.path is not None
    done = build(own, str(facts["compute_capability"]).replace(".", ""), own.path.parent)
    said = subprocess.run([sys.executable, "-m", "accumfused"], cwd=ROOT, capture_output=True, text=True)
    own.write("python -m accumfused", says=said.stdout + said.stderr)
    sys.exit(0 if done else 1)


def build(own: Journal, card: str, folder: Path) -> bool:
    """Whether there is a module for this card (its compute capability); where none builds, one for CPUs is made."""
    for wanted in (card, ""):
        name = f"_C-{key(wanted)}.so"
        stored = next((path for path in (folder / name, KEPT / name) if path.exists()), None)
        says = None if stored else compile_module(wanted)
        facts = {"is_for": wanted or "CPUs", "stored": str(stored or ""), "compiler": (says or "")[-_LAST:]}
        own.write("module", ok=says is None, **facts)
        if stored is not None:
            MODULE.unlink(missing_ok=True)  # a running process may have the old file mapped
            shutil.copy2(stored, MODULE)
        if says is None:
            if stored != folder / name:
                shutil.copy2(MODULE, folder / name)
            return bool(wanted)
    return False


def key(card: str) -> str:
    """A digest of all that a module depends on."""
    with tempfile.TemporaryDirectory() as printed:
        to_cpp.write(Path(printed))  # the rules, in C++
        sources = [*Path(printed).iterdir(), *(ROOT / "csrc").rglob("*.*"), ROOT / "setup.py"]
        texts = sorted(path.read_bytes() for path in [*sources, ROOT / "accumfused" / "compiling.py"])
    programs = [shutil.which(os.environ.get(name, default)) for name, default in (("CUDACXX", "nvcc"), ("CXX", "c++"))]
    said = [subprocess.run([each, "--version"], capture_output=True).stdout for each in programs if each]
    settings = [card, sys.version, metadata.version("pybind11"), *map(os.environ.get, _SETTINGS)]
    return hashlib.sha256(repr([texts, said, settings]).encode()).hexdigest()[:16]


def compile_module(card: str) -> str | None:
    """Runs setup.py; what it says if it fails. Args: card: "": no kernels for GPUs."""
    settings = {"ACCUMFUSED_NATIVE": "1", "ACCUMFUSED_CUDA": "1" if card else "0", "ACCUMFUSED_CUDA_ARCHS": card}
    work = ROOT / "build" / "gpu-module"
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--build-lib", str(ROOT), "--build-temp", "temp"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=work, env={**os.environ, **settings}, **pipes)
    print(done.stdout, flush=True)
    return done.stdout if done.returncode else None


if __name__ == "__main__":
    main()
