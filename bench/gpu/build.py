"""Says what machine this is, and builds the native module in place for its GPU, unless the report's folder has it.

A module's file there is named by all that it depends on: the sources' content, flags, compilers, Python. It can be
carried to the next machine. setup.py runs in a folder without pyproject.toml: setuptools before 77 would refuse that file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path

from bench.gpu.journal import Journal
from bench.gpu.runner import ROOT

MODULE = ROOT / "accumfused" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
WORK = ROOT / "build" / "gpu-module"
_PACKAGES = ("torch", "triton", "pybind11", "ninja", "setuptools", "pytest", "pytest-xdist", "hypothesis")
_PROGRAMS = ("nvcc", "ncu", "compute-sanitizer", "nvidia-smi", "g++")
_SETTINGS = ("CXX", "CXXFLAGS", "CUDACXX", "CUDA_HOME", "LDSHARED", "LDFLAGS")
_LAST = 4000  # characters of what the compiler says


def main() -> None:
    own = Journal("build")
    import torch

    from bench.machine import gpu

    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    own.write("packages", python=sys.version.split()[0], **{name: versions.get(name) for name in _PACKAGES})
    own.write("programs", **{name: shutil.which(name) for name in _PROGRAMS})
    if not torch.cuda.is_available():
        own.write("GPU", ok=False, says=f"torch {torch.__version__} finds none that it can use; nothing is built")
        sys.exit(1)
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
        began = time.monotonic()
        stored = folder / f"_C-{key(wanted)}.so"
        found = next((path for path in (stored, ROOT / "build" / "gpu" / stored.name) if path.exists()), None)
        says = None if found else compiled(wanted)
        if says is None:
            MODULE.unlink(missing_ok=True) if found else None  # a running process may have the old file mapped
            shutil.copy2(found or MODULE, MODULE if found else stored)
        facts = {"for": wanted or "CPUs", "kept": found is not None, "seconds": round(time.monotonic() - began, 1)}
        own.write("module", ok=None if says is None else False, **facts, compiler=(says or "")[-_LAST:])
        if says is None:
            return bool(wanted)
    return False


def key(card: str) -> str:
    """A digest of all that a module depends on."""
    from accumfused import functors

    with tempfile.TemporaryDirectory() as printed:
        functors.write(Path(printed))  # the rules, in C++
        digest = hashlib.sha256("".join(p.read_text() for p in sorted(Path(printed).iterdir())).encode())
    for path in [ROOT / "setup.py", ROOT / "accumfused" / "compiling.py", *sorted((ROOT / "csrc").rglob("*.*"))]:
        digest.update(path.read_bytes())
    said = [_version(program) for program in (os.environ.get("CUDACXX", "nvcc"), os.environ.get("CXX", "c++"))]
    settings = [os.environ.get(name) for name in _SETTINGS]
    digest.update(repr([card, sys.version, metadata.version("pybind11"), said, settings]).encode())
    return digest.hexdigest()[:16]


def compiled(card: str) -> str | None:
    """Runs setup.py. What it says if it fails; it is printed at once, too. Args: card: "": no kernels for GPUs."""
    WORK.mkdir(parents=True, exist_ok=True)
    settings = {"ACCUMFUSED_NATIVE": "1", "ACCUMFUSED_CUDA": "1" if card else "0", "ACCUMFUSED_CUDA_ARCHS": card}
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--build-lib", str(ROOT), "--build-temp", "temp"]
    said = []
    with subprocess.Popen(
        command, cwd=WORK, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return "".join(said) if process.returncode else None


def _version(program: str) -> str:
    found = shutil.which(program)
    return subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else "none"


if __name__ == "__main__":
    main()
