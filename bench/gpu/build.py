"""Says what machine this is, and builds the native module in place for its GPU, where that is not done already.

setup.py runs in a folder without pyproject.toml: setuptools before 77 would refuse that file, and what is in it does
not matter to a build in place. ninja compiles what has changed; where the sources are the same by content and the
module is still the one that was built from them, nothing runs at all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu.journal import Journal

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "accumfused" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
FOLDER = ROOT / "build" / "gpu-module"
_PACKAGES = ("torch", "triton", "numpy", "pybind11", "ninja", "setuptools", "pytest", "pytest-xdist", "hypothesis")
_PROGRAMS = ("nvcc", "ncu", "compute-sanitizer", "nvidia-smi", "g++")
_LAST = 4000  # characters of what the compiler says


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.gpu.build", description=__doc__).parse_args()
    journal = Journal.of_this_process("build")
    card = _machine(journal)
    if card is None:
        sys.exit("there is no GPU, and nothing is built")
    done = _build(journal, card)
    said = subprocess.run([sys.executable, "-m", "accumfused"], cwd=ROOT, capture_output=True, text=True)
    journal.write("python -m accumfused", ok=None if said.returncode == 0 else False, says=said.stdout + said.stderr)
    sys.exit(0 if done else "there is no module for this GPU")


def _machine(journal: Journal) -> str | None:
    """Writes down what is here; the GPU's compute capability ("90"), or None."""
    from bench.machine import nvidia_smi  # with torch

    journal.write("programs", **{name: shutil.which(name) for name in _PROGRAMS}, python=sys.version.split()[0])
    journal.write("packages", **{name: _version(name) for name in _PACKAGES})
    journal.write("nvidia-smi", **nvidia_smi())
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,TEMPERATURE,ECC"], timeout=30)
    import torch

    from bench.machine import gpu

    if not torch.cuda.is_available():
        journal.write("GPU", ok=False, says=f"torch {torch.__version__} finds none that it can use")
        return None
    facts = gpu(torch.device("cuda", 0))
    journal.write("GPU", **{name: value for name, value in facts.items() if name != "nvidia_smi"})
    return str(facts["compute_capability"]).replace(".", "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _build(journal: Journal, card: str) -> bool:
    """Whether there is a module for this card; where it does not build, one for the CPU is made."""
    for wanted in (card, None):
        began = time.monotonic()
        outcome, says = built(wanted, _run)
        facts: dict[str, Any] = {"for": wanted or "CPUs", "outcome": outcome, "seconds": time.monotonic() - began}
        journal.write("module", ok=None if says is None else False, **facts, compiler=(says or "")[-_LAST:])
        if says is None:
            return wanted == card
    return False


def built(card: str | None, run: Callable[[list[str], dict[str, str]], tuple[int, str]]) -> tuple[str, str | None]:
    """Builds the module, or leaves the one that is there.

    Args:
        card: compute capability; None: no kernels for GPUs.
        run: runs a command with more environment variables; its exit status, and what it has said.

    Returns:
        What was done, and what the compiler said if it failed.
    """
    stamp = FOLDER / "built.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text()) == _facts(card):
            return "kept: nothing has changed", None
    stamp.unlink(missing_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = {"ACCUMFUSED_NATIVE": "1", "ACCUMFUSED_CUDA": "1" if card else "0"}
    known |= {"ACCUMFUSED_CUDA_ARCHS": card} if card else {}
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--build-lib", str(ROOT)]
    status, says = run([*command, "--build-temp", str(FOLDER / "temp")], known)
    if status != 0:
        return "failed", says
    stamp.write_text(json.dumps(_facts(card)))
    return "built", None


def _facts(card: str | None) -> dict[str, Any]:
    """What a module depends on, and which one it is."""
    sources = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*.*"))]:
        sources.update(path.read_bytes())
    module = MODULE.stat()
    return {
        "card": card, "sources": sources.hexdigest(), "module": [module.st_size, module.st_mtime_ns],
        "built by": [sys.version, _version("pybind11"), shutil.which("nvcc")],
    }  # fmt: skip


def _run(command: list[str], known: dict[str, str]) -> tuple[int, str]:
    """What it says goes to our output at once, too."""
    said = []
    with subprocess.Popen(
        command, cwd=FOLDER, env={**os.environ, **known}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return process.returncode, "".join(said)


if __name__ == "__main__":
    main()
