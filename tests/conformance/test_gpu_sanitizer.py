"""Every CUDA kernel under compute-sanitizer: minutes for each tool, so apart from the other tests that need a GPU."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@functools.cache
def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    if found is None:
        return None
    program = "import torch; torch.zeros(1, device='cuda')"
    probe = subprocess.run([found, "--error-exitcode", "7", sys.executable, "-c", program], capture_output=True)
    return found if probe.returncode == 0 else None


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    if sanitizer() is None:
        pytest.skip("compute-sanitizer is not there, or does not run on this machine")
    program = Path(__file__).with_name("sanitized.py")
    command = [sanitizer() or "", "--tool", tool, "--error-exitcode", "7"]
    if tool != "initcheck":  # which has to see what torch's kernels write
        command += ["--kernel-name", "kns=accumfused"]
    done = subprocess.run(
        [*command, sys.executable, str(program)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or an overrun stays inside torch's large blocks
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-3000:]
    assert "stepped" in done.stdout
