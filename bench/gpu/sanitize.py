"""compute-sanitizer over every check of `smoke`, without a comparison: accesses, races, memory that nobody wrote."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

import torch

from bench.gpu.checks import TINY, Place, checks
from bench.gpu.journal import Journal
from bench.gpu.target import Target

TOOLS = ("memcheck", "racecheck", "initcheck")
_LAST = 3000  # characters


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.sanitize", description=__doc__)
    parser.add_argument("--inside", action="store_true", help="run the kernels; nothing watches them")
    inside = [sys.executable, "-m", "bench.gpu.sanitize", "--inside"]
    if parser.parse_args().inside:
        run_kernels(Target.here())
        return
    own, good = Journal("sanitize"), True
    if Target.here().is_dry:
        own.write("tool", tool="none: a dry run", ok=subprocess.run(inside).returncode == 0)
        return
    found = shutil.which("compute-sanitizer")
    if found is None or subprocess.run([found, sys.executable, "-c", "import torch; torch.ones(1).cuda()"]).returncode:
        own.write("left out", reason="compute-sanitizer is not there, or does not run on this machine")
        return
    # Without torch's own cache an overrun does not stay inside its large blocks.
    known = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        command = [found, "--tool", tool, "--error-exitcode", "7"]
        command += ["--kernel-name", "kns=accumfused"] if tool != "initcheck" else []  # it has to see torch's writes
        done = subprocess.run([*command, *inside], env=known, capture_output=True, text=True)
        says = done.stdout + done.stderr
        passed = done.returncode == 0 and "all kernels ran" in says and ("0 errors" in says or "0 hazards" in says)
        own.write("tool", tool=tool, ok=passed, **({} if passed else {"says": says[-_LAST:]}))
        good = good and passed
    sys.exit(0 if good else 1)


def run_kernels(target: Target) -> None:
    """Each check but those of captures, which need the cache, and of speed."""
    sizes = (*TINY, 3 * TINY[-1])
    for check in checks():
        if not check.needs_gpu:
            check.run(Place(target.backend, target.device, sizes, sizes[-1]))
            print(check.name, flush=True)
    if not target.is_dry:
        torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
