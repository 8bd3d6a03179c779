"""Freed gradients stay with the process: a few bytes above them keep glibc from giving them back to the kernel.

glibc trims its heap from the top whenever enough of it is free there, and the kernel clears each page before it comes
again. Gradients that all exist at once are such a top: 70,000 page faults in each window of 4 micro-batches, for a
model of 25M parameters. What lies below a block in use is not trimmed, and serves autograd's next gradients.
"""

from __future__ import annotations

import ctypes
import sys

from accumfused.core.rows import Grads

_GROWTH = 2**20  # bytes: a heap that has grown by less has nothing new to be trimmed
_PROBE = 16 * 2**20  # bytes: more than most holes below, less than what glibc always puts outside the heap
_PROBES = 64
_KEPT = 4096  # bytes; glibc does not coalesce freed blocks of up to 1032 (tcache), and would trim nothing below one


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
    """A block above gradients, as long as this object lives; none where they are not in glibc's own heap.

    A copy, or what is unpickled, has no block yet.
    """

    def __init__(self) -> None:
        self._block = 0  # its address
        self._end = 0  # of the heap, when the block was last looked for

    def __del__(self) -> None:
        if self._block and _LIBC is not None:
            _LIBC.free(self._block)

    def __reduce__(self) -> tuple[type[Pin], tuple[()]]:
        return Pin, ()

    def hold(self, grads: Grads) -> None:
        """Lies above these gradients from now on; to be called before they are freed."""
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
    """A few bytes of the heap above this address; 0 if there are none to be had.

    A large block is no page of memory until it is written to, and fits into few holes: it comes from the heap's top.
    There it is shrunk, which glibc does in place. Blocks in holes are held until then, so that none comes twice.
    """
    blocks: list[int] = []
    outside = found = 0
    while not found and len(blocks) < _PROBES and outside < 2:
        block = libc.malloc(_PROBE)
        if block is None:
            break
        if block > libc.sbrk(0):  # freed at once, which raises the size from which glibc goes outside
            libc.free(block)
            outside += 1
        elif block > address:
            found = libc.realloc(block, _KEPT)
        else:
            blocks.append(block)
    for block in blocks:
        libc.free(block)
    return found
