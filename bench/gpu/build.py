"""Says what machine this is, and builds the native module in place for its GPU, unless the report's folder has it.

`python -m bench.gpu.build FOLDER`. A stored module's name is a digest of all that it depends on: sources, flags,
compilers, Python. So a folder that is carried to another machine saves the build there. setup.py runs in a folder
without pyproject.toml, which setuptools before 77 would refuse.
"""

from __future__ import annotations

import hashlib
import os
import re
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
from bench.gpu.card import DRY, ROOT
from bench.machine import gpu

MODULE = ROOT / "accumfused" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
KEPT = ROOT / "build" / "gpu"  # the report's folder, unless another one is asked for
_PACKAGES = ("pybind11", "ninja", "setuptools", "pytest", "pytest-xdist", "hypothesis")
_SETTINGS = ("CXX", "CXXFLAGS", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "LDSHARED", "LDFLAGS", "NVCC_APPEND_FLAGS")


def main(folder: Path) -> int:
    print(", ".join(f"{name} {installed(name)}" for name in _PACKAGES))
    done = True
    if not DRY:  # which takes the module that is here
        facts = gpu(torch.device("cuda", 0))
        print(f"GPU: {', '.join(f'{name} {value}' for name, value in facts.items())}")
        done = build(str(facts["compute_capability"]).replace(".", ""), folder)
    if done:
        print(f"machine code: {machine_code()}")
    subprocess.run([sys.executable, "-m", "accumfused"], cwd=ROOT)
    return 0 if done else 1


def build(card: str, folder: Path) -> bool:
    """Whether the module in place is one for this card (its compute capability): stored, or built now."""
    name = f"_C-{key(card)}.so"
    stored = next((path for path in (folder / name, KEPT / name) if path.exists()), None)
    if stored is None and not compile_module(card):
        return False
    if stored is not None:
        MODULE.unlink(missing_ok=True)  # a running process may have the old file mapped
        shutil.copy2(stored, MODULE)
    print(f"module: {stored or 'built'}")
    if stored != folder / name:
        shutil.copy2(MODULE, folder / name)
    return True


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


def compile_module(card: str) -> bool:
    work = ROOT / "build" / "gpu-module"
    work.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "ACCUMFUSED_NATIVE": "1", "ACCUMFUSED_CUDA": "1", "ACCUMFUSED_CUDA_ARCHS": card}
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--build-lib", str(ROOT), "--build-temp", "temp"]
    return subprocess.run(command, cwd=work, env=env).returncode == 0


def machine_code() -> str:
    """A digest of the instructions for GPUs; without cuobjdump, or without any, of the whole module."""
    sys.path.insert(0, str(ROOT / "tools"))
    import machine_code as reader

    program, code = reader.cuobjdump(), []
    if program is not None:
        dump = subprocess.run([program, "--dump-sass", str(MODULE)], capture_output=True).stdout
        code = re.findall(rb"^\s*(?:Function|/\*).*", dump, re.MULTILINE)
    return hashlib.sha256(b"\n".join(code) or MODULE.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
