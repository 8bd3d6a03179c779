"""The memory of a window, kept for the next one: of its accumulators, and of the gradients that it has freed.

Accumulators that are not adopted gradients lie in one flat allocation per device. Freed gradients stay with the
process: glibc is told to keep as much free memory as a window needs again. It trims its heap's top whenever enough of
it is free, and the kernel clears each page before it returns. Gradients that all exist at once are such a top: 70,000
page faults in each window of 4 micro-batches, for a model of 25M parameters (425 in place of 265 ms of CPU time).
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.rows import Grads, Row
from accumfused.formats.numeric import memory_order

_PADDING = 32  # elements: accumulators start at multiples of 64 bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, see malloc.h
_LARGEST_BLOCK = 32 * 2**20  # bytes: what glibc itself would come to in time; larger blocks never lie in the heap
_TUNED_BY = ("MALLOC_", "GLIBC_TUNABLES")  # how these variables begin with which users tune glibc
_OWN_TRIM = 2 * _LARGEST_BLOCK  # bytes: where glibc's own rule for this threshold ends
_trim = _OWN_TRIM


class Arena:
    """One place per row, allocated on demand."""

    def __init__(self, count: int = 0, plan: Plan | None = None) -> None:
        self.places = Grads([None] * count)
        self._plan = plan  # which the places fit
        self._bundles: list[Tensor] = []  # flat; the rows in each travel together

    def fitted(self, plan: Plan) -> Arena:
        """Returns this arena if its places fit the plan's rows, or an empty one."""
        if plan is self._plan:
            return self
        count = len(plan.rows)
        both = zip(self.places, plan.rows, strict=False)
        fits = len(self.places) == count and all(place is None or _fits(place, row) for place, row in both)
        if not fits:
            return Arena(count, plan)
        self._plan = plan
        return self

    def add_rows(self, plan: Plan) -> None:
        """Takes up the new rows of a plan."""
        self.places.extend([None] * (len(plan.rows) - len(self.places)))

    def place(self, plan: Plan, index: int) -> Tensor:
        """Returns the place of one row; it may hold anything."""
        place = self.places[index]
        if place is None or not _fits(place, plan.rows[index]):
            only = Grads([None] * len(plan.rows))
            only[index] = plan.rows[index].tensor
            place = self.places_for(plan, only)[index]
        assert place is not None
        return place

    def apart(self, grads: Grads) -> Grads:
        """Copies the gradients that lie in a place (an earlier window's `p.grad`, exchanged, say); returns all."""
        addresses = {place.data_ptr() for place in self.places if place is not None}
        return Grads([g.clone() if g is not None and g.data_ptr() in addresses else g for g in grads])

    def places_for(self, plan: Plan, grads: Grads) -> Grads:
        """Returns places for these gradients: new ones, unless they have places that fit."""
        missing: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for index, (row, grad, place) in enumerate(zip(plan.rows, grads, self.places, strict=True)):
            if (grad is not None or travels(row)) and (place is None or not _fits(place, row)):
                missing.setdefault((row.sum_device, row.sum_dtype, row.is_bundled), []).append(index)
        for (device, dtype, is_bundle), indices in missing.items():
            sizes = [padded(plan.rows[index].tensor.numel()) for index in indices]
            make = torch.zeros if is_bundle else torch.empty  # the gaps travel too
            memory = make(sum(sizes), dtype=dtype, device=device)
            if is_bundle:
                self._bundles.append(memory)
            offset = 0
            for index, size in zip(indices, sizes, strict=True):
                tensor = plan.rows[index].tensor
                self.places[index] = memory.as_strided(tensor.shape, tensor.stride(), offset)
                offset += size
        used = {place.untyped_storage().data_ptr() for place in self.places if place is not None}
        self._bundles = [bundle for bundle in self._bundles if bundle.data_ptr() in used]
        return Grads([None if grad is None else place for grad, place in zip(grads, self.places, strict=True)])

    def bundle(self, plan: Plan, accumulators: Grads) -> Grads:
        """Moves small accumulators to places; exactly the parameters that require a gradient have one.

        So this memory is alike in all processes.
        """
        both = list(zip(plan.rows, self.places, strict=True))
        memory = {bundle.data_ptr() for bundle in self._bundles}  # without processes, places lie elsewhere
        alike = all(
            (place is not None and place.untyped_storage().data_ptr() in memory) is travels(row)
            for row, place in both
            if row.is_bundled
        )
        if not alike or len(self._bundles) > len({(row.sum_device, row.sum_dtype) for row in plan.rows}):
            self._bundles = []
            self.places = Grads([None if row.is_bundled else place for row, place in both])
            self.places_for(plan, Grads([None] * len(both)))
        placed = Grads()
        for row, accumulator, place in zip(plan.rows, accumulators, self.places, strict=True):
            if accumulator is not None and travels(row) and place is not None and accumulator is not place:
                accumulator = place.copy_(accumulator)
            placed.append(accumulator)
        return placed

    def memory_of(self, plan: Plan, accumulators: Grads) -> list[Tensor]:
        """Lists the memory of accumulators after `bundle`, flat: one tensor for all small ones, one for each other."""
        flats = list(self._bundles)
        for row, accumulator in zip(plan.rows, accumulators, strict=True):
            if accumulator is not None and not row.is_bundled:
                flats.append(memory_order(accumulator))
        return flats


def _fits(place: Tensor, row: Row) -> bool:
    """Tells whether a row's sum can lie in this place, in its tensor's order."""
    tensor, layout = row.tensor, (place.device, place.dtype, place.shape, place.stride())
    return layout == (row.sum_device, row.sum_dtype, tensor.shape, tensor.stride())


def padded(numel: int) -> int:
    """Returns the elements between the beginnings of two accumulators in one memory."""
    return -(-numel // _PADDING) * _PADDING


def travels(row: Row) -> bool:
    """Tells whether its accumulator travels with others: small ones do if their parameters require a gradient."""
    return row.is_bundled and row.param.requires_grad


def keep_freed(size: int) -> None:
    """Lets this process keep so many bytes of freed memory, if its C library is glibc and no variable tunes it."""
    global _trim
    if size <= _trim or not sys.platform.startswith("linux") or any(name.startswith(_TUNED_BY) for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
        library.mallopt(_TRIM_THRESHOLD, size if size < 2**31 else -1)  # an int; -1: all of it
    _trim = size


def return_freed() -> None:
    """Gives freed memory that `keep_freed` keeps back to the system. (Large blocks went back when they were freed.)"""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _trim > _OWN_TRIM else None
    if trim is not None:
        trim(0)
