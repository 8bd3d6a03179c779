"""compute-sanitizer over conformance tests of the CUDA kernels: accesses, races, memory that nobody wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, ROOT
from bench.gpu.test import command

_TOOLS = ("memcheck", "racecheck", "initcheck")
TESTS = command("sanitize", "cuda", 80, str(ROOT / "tests" / "conformance" / "test_bits.py"), "-k", "edges or corner")
_LAST = 3000  # characters


def main() -> None:
    own, program, is_dry = Journal("sanitize"), shutil.which("compute-sanitizer"), bool(os.environ.get(DRY))
    if is_dry or program is None:
        own.write("left out", ok=is_dry, reason="a dry run" if is_dry else "compute-sanitizer is not on the PATH")
        sys.exit(0 if is_dry else 1)
    good = True
    for tool in _TOOLS:
        # initcheck has to see what torch's kernels write.
        kernels = [] if tool == "initcheck" else ["--kernel-name", "kns=accumfused"]
        watched = [program, "--tool", tool, "--error-exitcode", "7", *kernels, *TESTS]
        # Without torch's own cache an overrun does not stay inside its large blocks.
        known = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(watched, env=known, cwd=ROOT, capture_output=True, text=True)
        says = done.stdout + done.stderr
        passed = done.returncode == 0 and " SUMMARY: 0 " in says  # errors, or hazards
        own.write("tool", tool=tool, ok=passed, says="" if passed else says[-_LAST:])
        good = good and passed
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
