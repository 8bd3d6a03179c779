"""Freed gradients stay with the process while an optimizer lives, and nothing of the user's does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import accumfused as af

glibc_alone = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is held")

# 48 MB of gradients, in pieces that glibc takes from its heap.
_PRELUDE = """
import copy, ctypes, gc, pickle, resource, torch
import accumfused as af
from accumfused.heap import Pin

torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(48)]
optimizer = af.SGD(params, lr=0.1)

def micro_batch():
    sum(param.sum() * 2 for param in params).backward()
    optimizer.accumulate()

def window():
    for _ in range(4):
        micro_batch()
    optimizer.step()
"""


def _run(program: str) -> None:
    """In a process of its own, with glibc's allocator as it comes."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", _PRELUDE + program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@glibc_alone
def test_windows_find_the_memory_of_the_last_ones_gradients() -> None:
    """The kernel gives 12288 pages to one set of gradients that lies where none was before."""
    _run("""
def faults():
    for _ in range(3):
        window()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        window()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = faults()
assert found < 2000, found
af.release_gradients(optimizer)
found = faults()
assert found < 2000, found
""")


@glibc_alone
def test_a_block_that_nobody_needs_is_given_back() -> None:
    """glibc then returns what was below it as it returns other memory."""
    _run("""
from unittest import mock
from accumfused import heap
libc = heap._LIBC
torch.zeros(2**21)  # freed: blocks of this size come from the heap from now on
tensors = [torch.zeros(2**18) for _ in range(48)]
pin = Pin()
pin.hold([None, *tensors])
end, block = libc.sbrk(0), pin._block
tensors.clear()
assert libc.sbrk(0) == end
assert block
with mock.patch.object(heap, "_LIBC", mock.Mock()) as freeing:
    del pin
freeing.free.assert_called_once_with(block)
""")


@glibc_alone
def test_a_copy_and_a_pickle_share_no_memory_with_the_original() -> None:
    """glibc ends a process that frees the same block twice."""
    _run("""
window()
micro_batch()
others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
del optimizer
gc.collect()
others.clear()
gc.collect()
""")


def test_gradients_of_the_users_are_freed_and_those_that_are_not_adopted_not_written() -> None:
    params = [nn.Parameter(torch.zeros(2**10)) for _ in range(8)]
    optimizer = af.SGD(params, lr=0.1)
    given = [[torch.full((2**10,), 3.0) for _ in params] for _ in range(2)]
    seen = [[weakref.ref(grad) for grad in grads] for grads in given]
    for micro_batch in range(2):
        for index, param in enumerate(params):
            param.grad = given[micro_batch][index]
        optimizer.accumulate()
    assert all(bool((grad == 3.0).all()) for grad in given[1])
    given.clear()
    assert not any(ref() is not None for ref in seen[1])
    optimizer.step()
    assert not any(ref() is not None for ref in seen[0])
