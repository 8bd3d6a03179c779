"""Memory for accumulators that are not adopted gradients: one flat allocation per device, kept between windows."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

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

    def lay_out(self, plan: Plan, accumulators: Grads) -> Grads:
        """These accumulators in places for exactly the parameters that require a gradient: alike in all processes."""
        wanted = [param.requires_grad for param in plan.params]
        alike = all((place is not None) is want for place, want in zip(self.places, wanted, strict=True))
        if not alike or len(self._flats) > len({tensor.device for tensor in plan.tensors}):
            self.places, self._flats = [None] * len(wanted), []
            self.extend(plan, [None] * len(wanted))
        for row, accumulator in enumerate(accumulators):
            place = self.places[row]
            if accumulator is not None and place is not None and accumulator is not place:
                place.copy_(accumulator)
        return [None if a is None else place for a, place in zip(accumulators, self.places, strict=True)]

    def memory_of(self, accumulators: Grads) -> list[Tensor]:
        """What these accumulators lie in, after `lay_out`: one flat tensor per device."""
        for accumulator, place in zip(accumulators, self.places, strict=True):
            if accumulator is None and place is not None:
                place.zero_()  # the last window's sums
        return self._flats


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
