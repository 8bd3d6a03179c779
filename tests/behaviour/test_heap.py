"""Freed gradients stay with the process, unless the user has tuned glibc."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import resource, sys, torch
import accumfused as af

torch.set_num_threads(1)
"""
# 48 MB of gradients, in pieces that glibc takes from its heap: 12288 pages, where none was before.
WINDOWS = """
params = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(48)]
optimizer = af.SGD(params, lr=0.1)
for release in (False, True):
    if release:
        af.release_gradients(optimizer)
    for window in range(7):
        if window == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(2):
            sum(param.sum() * 2 for param in params).backward()
            optimizer.accumulate()
        optimizer.step()
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert (found < 2000) == (sys.argv[1] == "as it comes"), found
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is tuned")
@pytest.mark.parametrize("tuned", ["as it comes", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_heap_that_nobody_has_tuned_keeps_freed_gradients(tuned: str) -> None:
    """In a process of its own. The user's choice here is what glibc does by itself."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    values = {"MALLOC_TRIM_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    environment |= {name: value for name, value in values.items() if name == tuned}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + WINDOWS, tuned], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        pytest.fail(done.stderr)
