"""Freed gradients stay with the process: a few bytes above them keep glibc from giving them back to the kernel.

glibc trims its heap's top whenever enough of it is free, and the kernel clears each page before it returns. Gradients
that all exist at once are such a top: 70,000 page faults in each window of 4 micro-batches, for a model of 25M
parameters. glibc does not trim memory below a used block, so it serves autograd's next gradients.
"""

from __future__ import annotations

import ctypes
import sys

from accumfused.core.rows import Grads

_GROWTH = 2**20  # bytes: a heap that has grown by less has nothing new to trim
_PROBE = 16 * 2**20  # bytes: above most holes' size, below the blocks that glibc always puts outside the heap
_PROBES = 64
_KEPT = 4096  # bytes: glibc does not coalesce freed blocks of up to 1032 (tcache), and would trim nothing below them


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    for name in ("malloc", "realloc", "sbrk"):
        getattr(library, name).restype = ctypes.c_void_p
    library.malloc.argtypes, library.realloc.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t]
    library.sbrk.argtypes, library.free.argtypes = [ctypes.c_ssize_t], [ctypes.c_void_p]
    return library


_LIBC = _libc()


class Pin:
    """A block above gradients, as long as this object lives; no block if they lie outside glibc's own heap.

    A copied or unpickled pin has no block yet.
    """

    def __init__(self) -> None:
        self._block = 0  # its address
        self._end = 0  # of the heap, at the last search for a block

    def __del__(self) -> None:
        if self._block and _LIBC is not None:
            _LIBC.free(self._block)

    def __reduce__(self) -> tuple[type[Pin], tuple[()]]:
        return Pin, ()

    def hold(self, grads: Grads) -> None:
        """Lies above these gradients from now on; call it before they are freed."""
        if _LIBC is None or _LIBC.sbrk(0) - self._end < _GROWTH:
            return
        end = _LIBC.sbrk(0)
        addresses = [grad.data_ptr() for grad in grads if grad is not None]
        highest = max((address for address in addresses if address < end), default=0)
        if highest <= self._block:
            return
        found = _block_above(_LIBC, highest)
        if found:
            _LIBC.free(self._block or None)
            self._block = found
        self._end = _LIBC.sbrk(0)


def _block_above(libc: ctypes.CDLL, address: int) -> int:
    """Allocates a few bytes of the heap above this address; 0 if there are none.

    A large block takes no page of memory until somebody writes it. It fits into few holes, so it comes from the heap's
    top, where glibc shrinks it in place. Blocks in holes are held until then, so that none comes twice.
    """
    blocks: list[int] = []
    outside = found = 0
    while not found and len(blocks) < _PROBES and outside < 2:
        block = libc.malloc(_PROBE)
        if block is None:
            break
        if block > libc.sbrk(0):  # freeing it at once raises the size from which glibc goes outside
            libc.free(block)
            outside += 1
        elif block > address:
            found = libc.realloc(block, _KEPT)
        else:
            blocks.append(block)
    for block in blocks:
        libc.free(block)
    return found
