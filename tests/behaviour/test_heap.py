"""Freed gradients stay with the process while an optimizer lives, and the block above them goes with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import copy, ctypes, pickle, resource, torch
from unittest import mock
import accumfused as af
from accumfused.core import heap

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
    assert found < 2000, found
del optimizer, params
"""
# A block that nobody needs; once it is free glibc returns what was below it as it returns other memory.
BLOCK = """
torch.zeros(2**21)  # freed: blocks of this size come from the heap from now on
tensors = [torch.zeros(2**18) for _ in range(48)]
pin, libc = heap.Pin(), heap._LIBC
pin.hold([None, *tensors])
end, block = libc.sbrk(0), pin._block
tensors.clear()
assert libc.sbrk(0) == end and block
assert libc.malloc_usable_size(ctypes.c_void_p(block)) < 2**16  # the rest of the probe is free again
copies = copy.copy(pin), copy.deepcopy(pin), pickle.loads(pickle.dumps(pin))
assert [each._block for each in copies] == [0] * 3  # none of them frees it once more
with mock.patch.object(heap, "_LIBC", mock.Mock()) as freeing:
    del pin
freeing.free.assert_called_once_with(block)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is held")
def test_the_heap_is_held_by_one_optimizer() -> None:
    """In a process of its own, with glibc's allocator as it comes."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + WINDOWS + BLOCK], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        pytest.fail(done.stderr)
