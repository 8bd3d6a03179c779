"""compute-sanitizer over the conformance tests of the CUDA kernels: accesses, races, memory that nobody wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, ROOT
from bench.gpu.test import SECONDS, command

_TOOLS = ("memcheck", "racecheck", "initcheck")
_LAST = 3000  # characters


def main() -> None:
    own, program = Journal("sanitize"), shutil.which("compute-sanitizer")
    is_dry = bool(os.environ.get(DRY))
    tools = [[]] if is_dry else [] if program is None else [[program, "--tool", tool] for tool in _TOOLS]
    if not tools:
        own.write("left out", ok=False, reason="compute-sanitizer is not on the PATH")
    good = bool(tools)
    tests = command("sanitize", str(ROOT / "tests" / "conformance" / "test_bits.py"), "-k", "edges or corner")
    tests += ["--gpu-backends", "torch" if is_dry else "cuda"]
    # Without torch's own cache an overrun does not stay inside its large blocks.
    known = {**os.environ, SECONDS: "80", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for tool in tools:
        watched = [*tool, "--error-exitcode", "7"] if tool else []
        if tool and tool[-1] != "initcheck":  # which has to see what torch's kernels write
            watched += ["--kernel-name", "kns=accumfused"]
        done = subprocess.run([*watched, *tests], env=known, cwd=ROOT, capture_output=True, text=True)
        says = done.stdout + done.stderr
        passed = done.returncode == 0 and (not tool or "0 errors" in says or "0 hazards" in says)
        own.write("tool", tool=(tool or ["none"])[-1], ok=passed, says="" if passed else says[-_LAST:])
        good = good and passed
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
