"""Freed gradients stay with the process while an optimizer lives, and the block above them goes with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# 48 MB of gradients, in pieces that glibc takes from its heap: 12288 pages, where none was before.
PROGRAM = """
import copy, gc, pickle, resource, torch
from unittest import mock
import accumfused as af
from accumfused import heap

# A block that nobody needs is given back; glibc then returns what was below it as it returns other memory.
torch.set_num_threads(1)
torch.zeros(2**21)  # freed: blocks of this size come from the heap from now on
tensors = [torch.zeros(2**18) for _ in range(48)]
pin, libc = heap.Pin(), heap._LIBC
pin.hold([None, *tensors])
end, block = libc.sbrk(0), pin._block
tensors.clear()
assert libc.sbrk(0) == end and block
with mock.patch.object(heap, "_LIBC", mock.Mock()) as freeing:
    del pin
freeing.free.assert_called_once_with(block)
libc.free(block)

# Windows find the memory of the last ones' gradients.
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
    assert found < 2000, found

# Copies share no memory with the original: glibc ends a process that frees the same block twice.
others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
del optimizer
gc.collect()
others.clear()
gc.collect()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is held")
def test_the_heap_is_held_by_one_optimizer_and_given_back() -> None:
    """In a process of its own, with glibc's allocator as it comes."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
