"""Freed gradients stay with the process until `release_memory()`, unless the user has tuned glibc."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# 48 MB of gradients, in pieces that glibc takes from its heap: 12288 pages, where none was before.
WINDOWS = """
import os, resource, torch
import accumfused as af

torch.set_num_threads(1)
tuned = "MALLOC_TRIM_THRESHOLD_" in os.environ
params = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(48)]
for release in (False, True):
    optimizer = af.SGD(params, lr=0.1)
    if release:
        af.release_gradients(optimizer)
    for window in range(3):
        if window == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(2):
            sum(param.sum() * 2 for param in params).backward()
            optimizer.accumulate()
        optimizer.step()
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert (found > 2000) == tuned, found
    if tuned:  # by the other name, which the package alone still reads
        os.environ["GLIBC_TUNABLES"] = os.environ.pop("MALLOC_TRIM_THRESHOLD_", "")
"""

# 24 or 48 MB of gradients, and twice as much for two sets of them or the sums of 16 bits.
RELEASE = """
import os, torch
import accumfused as af

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    params = [torch.nn.Parameter(torch.zeros(2**18, dtype=dtype)) for _ in range(48)]
    optimizer = af.SGD(params, lr=0.1, master_weights=None)
    hole, above = [torch.zeros(2**18) for _ in range(128)], torch.zeros(2**10)
    del hole  # where the sums of 16 bits, one block, have room in the heap
    found = []
    for window in range(3):
        if window == 1:
            before = resident()
        for _ in range(2):
            sum(param.sum() * 2 for param in params).backward()
            optimizer.accumulate()
        optimizer.step()
        found.append(resident())
        optimizer.release_memory()
        found.append(resident())
    assert all(kept - released > 60 for kept, released in zip(found[::2], found[1::2])), found
    assert abs(found[-1] - before) < 20, (found, before)
    del params, optimizer
"""


def run(script: str, chosen: dict[str, str]) -> None:
    """Runs a script in a process of its own, with an allocator that these variables alone tune."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)} | chosen
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    if done.returncode:
        pytest.fail(done.stderr)


of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is tuned")


@of_glibc
def test_a_heap_that_nobody_has_tuned_keeps_freed_gradients_until_they_are_released() -> None:
    """In one process, which imports torch."""
    run(WINDOWS + RELEASE, {})


@of_glibc
def test_a_heap_that_is_tuned_is_left_alone() -> None:
    """The user's choice here is what glibc does by itself."""
    run(WINDOWS, {"MALLOC_TRIM_THRESHOLD_": "131072"})
