"""Memory for accumulators that are not adopted gradients: one flat allocation per device, kept between windows."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from accumfused.numeric import memory_order
from accumfused.plan import Grads, Plan

_PADDING = 32  # elements: accumulators start at multiples of 64 bytes


class Arena:
    """A place for each row, where one was needed."""

    def __init__(self, rows: int) -> None:
        self.places: Grads = [None] * rows
        self._flats: list[Tensor] = []

    def add_rows(self, rows: int) -> None:
        self.places += [None] * rows

    def extend(self, plan: Plan, grads: Grads) -> None:
        """Room for these gradients, where there is none that fits."""
        missing: dict[torch.device, list[int]] = {}
        if not plan.adopts_gradients:  # all at once, for what is to be reduced
            wanted = [p.requires_grad or g is not None for p, g in zip(plan.params, grads, strict=True)]
            grads = [t if want else None for t, want in zip(plan.tensors, wanted, strict=True)]
        for row, grad in enumerate(grads):
            have = self.places[row]
            if grad is not None and (
                have is None
                or have.dtype != plan.accumulator_dtype
                or (have.device, have.shape, have.stride()) != (grad.device, grad.shape, grad.stride())
            ):
                missing.setdefault(grad.device, []).append(row)
        for device, rows in missing.items():
            sizes = [-(-plan.tensors[row].numel() // _PADDING) * _PADDING for row in rows]
            make = torch.empty if plan.adopts_gradients else torch.zeros  # the gaps travel too
            flat = make(sum(sizes), dtype=plan.accumulator_dtype, device=device)
            self._flats.append(flat)
            offset = 0
            for row, size in zip(rows, sizes, strict=True):
                tensor = plan.tensors[row]
                self.places[row] = flat.as_strided(tensor.shape, tensor.stride(), offset)
                offset += size
        used = {place.untyped_storage().data_ptr() for place in self.places if place is not None}
        self._flats = [flat for flat in self._flats if flat.data_ptr() in used]

    def memory_of(self, accumulators: Grads) -> list[Tensor]:
        """What these accumulators lie in, in as few (flat) tensors as may be."""
        rows = list(zip(accumulators, self.places, strict=True))
        if all(accumulator is None or accumulator is place for accumulator, place in rows):
            for place in [place for accumulator, place in rows if accumulator is None and place is not None]:
                place.zero_()  # the last window's sums
            return self._flats
        return [memory_order(accumulator) for accumulator in accumulators if accumulator is not None]


def adoptable(grad: Tensor, dtype: torch.dtype) -> bool:
    """Memory that nobody else owns: a part may belong to a bucket, and a gradient with a graph is still needed."""
    if grad.dtype is not dtype or grad.requires_grad or grad._is_view():
        return False
    return grad.untyped_storage().nbytes() == grad.nbytes


def shared_memory(grads: Grads) -> set[int]:
    """Addresses at which more than one gradient begins."""
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    if len(set(addresses)) == len(addresses):
        return set()
    return {address for address, count in Counter(addresses).items() if count > 1}
