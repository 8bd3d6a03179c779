"""Memory for accumulators that are not adopted gradients: one flat allocation per device, kept between windows."""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core.plan import Grads, Plan

_PADDING = 32  # elements: accumulators start at multiples of 64 bytes


class Arena:
    """A place for each row, where one was needed."""

    def __init__(self, rows: int) -> None:
        self.places: Grads = [None] * rows
        self._bundles: list[Tensor] = []  # flat, of rows that travel together

    def add_rows(self, rows: int) -> None:
        self.places += [None] * rows

    def apart(self, grads: Grads) -> Grads:
        """These gradients; one that lies in a place (exchanged `p.grad`s of an earlier window, say) as a copy."""
        addresses = {place.data_ptr() for place in self.places if place is not None}
        return [g.clone() if g is not None and g.data_ptr() in addresses else g for g in grads]

    def extend(self, plan: Plan, grads: Grads) -> None:
        """Room for these gradients, where there is none that fits."""
        together = [b and p.requires_grad for b, p in zip(plan.bundled, plan.params, strict=True)]
        grads = [t if b else g for t, b, g in zip(plan.tensors, together, grads, strict=True)]
        missing: dict[tuple[torch.device, bool], list[int]] = {}
        for row, grad in enumerate(grads):
            have = self.places[row]
            if grad is not None and (
                have is None or (have.device, have.shape, have.stride()) != (grad.device, grad.shape, grad.stride())
            ):
                missing.setdefault((grad.device, plan.bundled[row]), []).append(row)
        for (device, is_bundle), rows in missing.items():
            sizes = [-(-plan.tensors[row].numel() // _PADDING) * _PADDING for row in rows]
            make = torch.zeros if is_bundle else torch.empty  # the gaps travel too
            memory = make(sum(sizes), dtype=torch.float32, device=device)
            if is_bundle:
                self._bundles.append(memory)
            offset = 0
            for row, size in zip(rows, sizes, strict=True):
                tensor = plan.tensors[row]
                self.places[row] = memory.as_strided(tensor.shape, tensor.stride(), offset)
                offset += size
        used = {place.untyped_storage().data_ptr() for place in self.places if place is not None}
        self._bundles = [bundle for bundle in self._bundles if bundle.data_ptr() in used]

    def bundle(self, plan: Plan, accumulators: Grads) -> Grads:
        """These accumulators, small ones in places for exactly the parameters that require a gradient.

        So what they lie in is alike in all processes.
        """
        wanted = [b and p.requires_grad for b, p in zip(plan.bundled, plan.params, strict=True)]
        alike = all((self.places[row] is not None) is wanted[row] for row, b in enumerate(plan.bundled) if b)
        if not alike or len(self._bundles) > len({tensor.device for tensor in plan.tensors}):
            self._bundles = []
            self.places = [None if b else p for p, b in zip(self.places, plan.bundled, strict=True)]
            self.extend(plan, [None] * len(wanted))
        placed: Grads = []
        for accumulator, place, is_bundled in zip(accumulators, self.places, wanted, strict=True):
            if accumulator is not None and is_bundled and place is not None and accumulator is not place:
                accumulator = place.copy_(accumulator)
            placed.append(accumulator)
        return placed

    def memory_of(self, plan: Plan, accumulators: Grads) -> list[Tensor]:
        """What these accumulators lie in, after `bundle`, as flat tensors: one of all small ones, and each other."""
        flats = list(self._bundles)
        for accumulator, place, is_bundled in zip(accumulators, self.places, plan.bundled, strict=True):
            if accumulator is not None and not is_bundled:
                flats.append(flat(accumulator))
            elif accumulator is None and is_bundled and place is not None:
                place.zero_()  # the last window's sums
        return flats


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as it lies."""
    return tensor.as_strided((tensor.numel(),), (1,))


def adoptable(grad: Tensor) -> bool:
    """fp32 memory that nobody else can write: whole, torch's own (not an array's), and of no other tensor.

    A part may belong to a bucket, a detached tensor shares its storage, and a gradient with a graph is still needed.
    """
    if grad.dtype is not torch.float32 or grad.requires_grad:
        return False
    storage = grad.untyped_storage()
    if _uses(storage._cdata) != _OWN_USES or not storage.resizable():
        return False
    return bool(storage.nbytes() == grad.numel() * grad.itemsize)


def _own_uses() -> int:
    tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    return int(_uses(tensor.untyped_storage()._cdata))


_uses = torch._C._storage_Use_Count
_OWN_USES = _own_uses()  # of a storage that one tensor has, counted as `adoptable` does
