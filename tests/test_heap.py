"""Freed gradients stay with the process while an optimizer lives, and nothing of the user's does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc alone is held")

# 48 MB of gradients in pieces that glibc takes from its heap, above all else that is there.
_PRELUDE = """
import copy, ctypes, gc, pickle, resource, torch
import accumfused as af

PAGES = 48 * 2**20 // resource.getpagesize()
torch.set_num_threads(1)
libc = ctypes.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
params = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(48)]
optimizer = af.SGD(params, lr=0.1)

def micro_batch():
    sum(param.sum() * 2 for param in params).backward()
    optimizer.accumulate()

def window():
    for _ in range(4):
        micro_batch()
    optimizer.step()

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def _run(program: str) -> None:
    """In a process of its own, with glibc's allocator as it comes."""
    named = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", _PRELUDE + program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_window_finds_the_memory_of_the_last_ones_gradients() -> None:
    _run("""
for _ in range(3):
    window()
found = faults(lambda: [window() for _ in range(3)])
assert found < PAGES / 4, found
""")


def test_so_does_one_whose_gradients_are_released_during_backward() -> None:
    _run("""
af.release_gradients(optimizer)
for _ in range(3):
    window()
found = faults(lambda: [window() for _ in range(3)])
assert found < PAGES / 4, found
""")


def test_memory_goes_back_to_the_system_when_the_pin_is_gone() -> None:
    _run("""
from accumfused.heap import Pin
tensors = [torch.zeros(2**18) for _ in range(48)]
pin = Pin()
pin.hold([None, *tensors])
tensors.clear()
held = libc.sbrk(0)
del pin
returned = held - libc.sbrk(0)
assert returned > 40 * 2**20, returned
""")


def test_a_copy_and_a_pickle_hold_no_memory_of_the_original() -> None:
    _run("""
window()
micro_batch()
twin, stored = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
del optimizer
gc.collect()
del twin, stored
gc.collect()
optimizer = af.SGD(params, lr=0.1)
window()
""")


def test_a_gradient_of_the_users_is_freed_and_not_written() -> None:
    _run("""
import weakref
given = [[torch.full((2**18,), 3.0) for _ in params] for _ in range(2)]
for grads in given:
    for param, grad in zip(params, grads):
        param.grad = grad
    optimizer.accumulate()
    param = grad = None
assert all(bool((grad == 3.0).all()) for grad in given[1])
seen = [weakref.ref(grad) for grads in given for grad in grads]
grads = None
params[:] = []
del given[1]
assert not any(ref() is not None for ref in seen[48:])
optimizer.step()
given.clear()
assert not any(ref() is not None for ref in seen)
""")
