"""compute-sanitizer over the checks of `smoke`, without a comparison: accesses, races, memory that nobody wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from bench.gpu.checks import TINY, Place, checks, linears
from bench.gpu.journal import Journal
from bench.gpu.runner import python
from bench.gpu.target import Target

TOOLS = ("memcheck", "racecheck", "initcheck")
_DONE = "all kernels ran"
_LAST = 3000  # characters


def main() -> None:
    own, target, inside = Journal("sanitize"), Target(), python("-m", "bench.gpu.sanitize", "inside")
    if sys.argv[1:]:
        run_kernels(target)
        return
    found = shutil.which("compute-sanitizer")
    tools = [[]] if target.is_dry else [] if found is None else [[found, "--tool", tool] for tool in TOOLS]
    if not tools:
        own.write("left out", ok=False, reason="compute-sanitizer is not on the PATH")
    good = bool(tools)
    for tool in tools:
        watched = [*tool, "--error-exitcode", "7"] if tool else []
        if tool and tool[-1] != "initcheck":  # which has to see what torch's kernels write
            watched += ["--kernel-name", "kns=accumfused"]
        # Without torch's own cache an overrun does not stay inside its large blocks.
        known = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run([*watched, *inside], env=known, capture_output=True, text=True)
        says = done.stdout + done.stderr
        clean = not tool or "0 errors" in says or "0 hazards" in says
        passed = done.returncode == 0 and _DONE in says and clean
        own.write("tool", tool=(tool or ["none"])[-1], ok=passed, says="" if passed else says[-_LAST:])
        good = good and passed
    sys.exit(0 if good else 1)


def run_kernels(target: Target) -> None:
    """Each check but those of streams and captures, which need the cache, and of torch's matrix product."""
    sizes = (*TINY, 3 * TINY[-1])
    for check in checks():
        if not check.needs_gpu and check.run is not linears:
            check.run(Place(target.backend, target.device, sizes, sizes))
            print(check.name, flush=True)
    print(_DONE)


if __name__ == "__main__":
    main()
