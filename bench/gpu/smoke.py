"""Are the bits of the backends for GPUs those of the reference, and does any launch hang?

Conformance tests of the CUDA kernels, then of Triton's, each backend's in a process that a test's limit ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from accumfused.backends import why_not
from bench.gpu import journal
from bench.gpu.journal import SO_FAR, Journal
from bench.gpu.runner import DRY, ROOT
from bench.gpu.test import command

_FILES = [str(ROOT / "tests" / "conformance" / name) for name in ("test_gpu_graphs.py", "test_gpu.py", "test_bits.py")]
TESTS = {
    "cuda": command("smoke", "cuda", 30, *_FILES, "-k", "more_chunks or captured_window or fused_linears or test_bits"),
    # Triton compiles for seconds: a few formats and rules.
    "triton": command("smoke", "triton", 60, *_FILES, "-k", "edges or captured_window"),
}
DRY_TESTS = {"emulated": command("smoke", "emulated", 60, _FILES[-1], "-k", "edges")}


def main() -> None:
    own, is_dry = Journal("smoke"), bool(os.environ.get(DRY))
    good = True
    for backend, tests in (DRY_TESTS if is_dry else TESTS).items():
        reason = None if is_dry else why_not(backend, torch.device("cuda", 0))
        if reason is not None:
            own.write("left out", ok=False, backend=backend, reason=reason)
        good = reason is None and conforms(own, backend, tests) and good
    sys.exit(0 if good else 1)


def conforms(own: Journal, backend: str, tests: Sequence[str]) -> bool:
    """Runs a backend's tests, and writes how they ended."""
    assert own.path is not None
    begin = len(journal.read(own.path))
    code = subprocess.run(tests, cwd=ROOT).returncode
    lines = journal.read(own.path)[begin:]
    last = next((line for line in reversed(lines) if line["kind"] == SO_FAR), {})
    where = {} if last.get("ended") else {"in_test": last.get("begins")}
    outcome = "passed" if code == 0 else "hangs or dies" if where else "failed"
    own.write("backend", ok=code == 0, backend=backend, outcome=outcome, exit_code=code, **where)
    return code == 0


if __name__ == "__main__":
    main()
