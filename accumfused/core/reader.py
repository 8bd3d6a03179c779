"""Readers: what a plan's tensors are at this moment, p.grad among them, and who else could write a gradient.

A reader looks (has anything changed since the plan was made?), reads p.grad, matches gradients to what kernels read,
and points the kernels at them. `TableReader` has the native module's table, at 0.1 us a parameter; `TensorReader` asks
tensor by tensor. Both begin at `param_groups` and `state` in each call, and own no tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.core import graphs
from accumfused.core.rows import (
    Grads,
    Row,
    check_gradient,
    check_parameter,
    check_size,
    is_short,
    overwritten,
)
from accumfused.formats import shards
from accumfused.formats.kinds import DTYPES, TORCH_DTYPES


def _own_references() -> int:
    param = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    return sys.getrefcount(param.grad)


def _own_uses() -> int:
    tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    return int(storage_uses(tensor.untyped_storage()._cdata))


# Gradients on a CPU whose storages' sizes are looked at in each call: of so many elements, which take 400 us to step on
# one core, where a look takes 1.5 us. To read far beyond an end would end the process.
_LARGE = 1 << 17
OWN_REFERENCES = _own_references()  # to `param.grad` as it is read, if nothing else holds the gradient
storage_uses = torch._C._storage_Use_Count  # of a storage, by its address
OWN_USES = _own_uses()  # of one with a single tensor


class TensorReader:
    """Reads tensor by tensor: without a native module, and for parameters that are sharded over processes.

    Args:
        optimizer: a weak reference to that of the rows; None: they are no parameters, and only `match` works.
        dtype: of the plan's arithmetic.
    """

    def __init__(self, optimizer: Callable[[], Any] | None, rows: list[Row], dtype: torch.dtype) -> None:
        self._optimizer: Any = optimizer
        self._rows = rows
        self._dtypes = TORCH_DTYPES if dtype == torch.float64 else DTYPES  # of gradients
        self._held = [True] * len(rows)  # flags gradients that the user's code holds, too: all until the first read
        self._checked: set[int] = set()  # rows whose parameter was checked
        self._snapshot: tuple[list[int], list[Any], list[Any]] | None = None

    # ---- looks -----------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Notes what `unchanged` compares; without this call all counts as changed."""
        if self._optimizer is not None:
            objects, arrangement = self._objects(with_states=True)
            self._snapshot = list(map(id, objects)), arrangement, [_place(shards.local(value)) for value in objects]

    def unchanged(self, *, with_states: bool) -> bool:
        """Tells whether groups, states and their memory are still those of the plan; or only the groups.

        An object may come back at the address of one that was freed: so its place in memory is compared, too.
        """
        if self._snapshot is None:
            return False
        ids, last_arrangement, places = self._snapshot
        objects, arrangement = self._objects(with_states=with_states)
        if not with_states:
            ids, last_arrangement = ids[: len(objects)], last_arrangement[:1]
        if arrangement != last_arrangement or list(map(id, objects)) != ids:
            return False
        return all(map(_lies, map(shards.local, objects), places))

    def _objects(self, *, with_states: bool) -> tuple[list[Any], list[Any]]:
        """Lists parameters with the entries of their states, and their arrangement: groups' sizes, and names."""
        groups: list[dict[str, Any]] = self._optimizer().param_groups
        params = [param for group in groups for param in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        if not with_states:
            return params, [sizes]
        state = self._optimizer().state
        states = [state.get(param) or {} for param in params]
        return params + [value for entries in states for value in entries.values()], [sizes, *map(list, states)]

    # ---- p.grad ----------------------------------------------------------------------------------------------------

    def present(self) -> int:
        """Counts the parameters that have a p.grad."""
        return sum(param.grad is not None for group in self._optimizer().param_groups for param in group["params"])

    def read_grads(self) -> tuple[Grads, int]:
        """Reads every p.grad, and counts those that are not None."""
        params = [row.param for row in self._rows]
        held = [p.grad is not None and sys.getrefcount(p.grad) > OWN_REFERENCES for p in params]
        whole = [param.grad for param in params]
        counts = Counter(map(id, whole))
        self._held = [is_held or counts[id(grad)] > 1 for is_held, grad in zip(held, whole, strict=True)]
        both = zip(self._rows, params, whole, strict=True)
        grads = Grads([grad if row.shard is None else _part(param, grad) for row, param, grad in both])
        return grads, sum(grad is not None for grad in grads)

    def held(self) -> list[bool]:
        """Flags those of the last read gradients that the user's code holds, too, and may write again."""
        return self._held

    def adopt_all(self, grads: Grads) -> bool:
        """Prepares gradients, just read, as a window's sums, if nothing else can write any of them; returns whether.

        Tensor by tensor, `adoptable` answers; this is the answer for all, where it costs little.
        """
        return False

    def releasing(self, param_ids: Container[int] | None) -> partial[Any]:
        """Makes the call of a C function that sets p.grad = None: of all parameters, or of those with these ids."""
        params = [param for group in self._optimizer().param_groups for param in group["params"]]
        return setting_grads([p for p in params if param_ids is None or id(p) in param_ids], repeat(None))

    def versions(self, first: int, every: int) -> int:
        """Adds up some parameters' version counters, which grow with each write that autograd sees."""
        return sum(row.param._version for row in self._rows[first::every])

    # ---- for kernels -----------------------------------------------------------------------------------------------

    def match(self, grads: Grads) -> Grads:
        """Returns the gradients as kernels read them: dense, laid out as their parameters.

        A gradient of another layout is copied (slower).

        Raises:
            RuntimeError: a gradient is sparse or complex, or its device or shape is not the parameter's.
            TypeError: a parameter or gradient is of another dtype.
        """
        return Grads([None if grad is None else self._match(index, grad) for index, grad in enumerate(grads)])

    def _match(self, index: int, grad: Tensor) -> Tensor:
        row = self._rows[index]
        tensor = row.tensor
        if index not in self._checked:
            check_parameter(row.owned)
            self._checked.add(index)
        check_gradient(tensor, grad, self._dtypes)
        in_memory = type(grad) is Tensor and not grad.is_neg() and not grad._is_zerotensor()
        is_laid_out = in_memory and grad.stride() == tensor.stride()
        if in_memory and (not is_laid_out or is_short(grad)):  # torch's kernels read beyond its end
            check_size(grad, "gradient")
        if is_laid_out:
            return grad
        return torch.empty_like(tensor, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())

    def forget_sums(self) -> None:
        """Forgets the list of sums at which kernels are pointed, before it changes."""


class TableReader(TensorReader):
    """Reads by the native module's table of addresses, which its kernels read, too.

    Args:
        table: the class of a native module.
        device: of the kernels.
    """

    def __init__(
        self, optimizer: Callable[[], Any] | None, rows: list[Row], dtype: torch.dtype, table: Any, device: torch.device
    ) -> None:
        super().__init__(optimizer, rows, dtype)
        self.table = table(compiled.exchange_api, torch.empty(0, device=device).__dlpack_device__(), rows)
        self._may_adopt = not any(row.is_bundled for row in rows)
        self._device = device
        self._looks = optimizer is not None and all(row.shard is None for row in rows)  # else tensor by tensor
        # The lists at which the table's rows point: a list that is the same object is not read again.
        self._grads: weakref.ref[Grads] | None = None
        self._sums: weakref.ref[Grads] | None = None
        self._watched: Sequence[int] = range(len(rows)) if device.type == "cpu" else ()  # at first all
        self.remember()

    def remember(self) -> None:
        if self._looks:
            self.table.remember(self._optimizer().param_groups, self._optimizer().state)
        else:
            super().remember()

    def unchanged(self, *, with_states: bool) -> bool:
        if not self._looks:
            return super().unchanged(with_states=with_states)
        optimizer = self._optimizer()
        return bool(self.table.unchanged(optimizer.param_groups, optimizer.state if with_states else None))

    def present(self) -> int:
        return int(self.table.present(self._optimizer().param_groups)) if self._looks else super().present()

    def read_grads(self) -> tuple[Grads, int]:
        if not self._looks:
            return super().read_grads()
        read, present, refused = self.table.read_grads(self._optimizer().param_groups, OWN_REFERENCES)
        grads = Grads(read)
        self._grads = weakref.ref(grads) if refused < 0 else None
        return grads, present

    def held(self) -> list[bool]:
        return list(self.table.held()) if self._looks else super().held()

    def adopt_all(self, grads: Grads) -> bool:
        """Points the table at these gradients as sums, if a window may keep all of them; returns whether."""
        if not self._looks or not self._may_adopt or self._grads is None or self._grads() is not grads:
            return False
        if graphs.has_static_memory(self._device) or not self.table.adoptable(grads, storage_uses, OWN_USES):
            return False
        self.table.keep_grads()
        self._sums = weakref.ref(grads)
        return True

    def releasing(self, param_ids: Container[int] | None) -> partial[Any]:
        if param_ids is None and self._looks:
            return partial(self.table.release_grads, self._optimizer().param_groups)
        return super().releasing(param_ids)

    def versions(self, first: int, every: int) -> int:
        if not self._looks:
            return super().versions(first, every)
        return int(self.table.versions(self._optimizer().param_groups, first, every))

    def match(self, grads: Grads) -> Grads:
        """Points the table at the gradients as they are, or returns copies that kernels read."""
        is_sum = self._sums is not None and self._sums() is grads
        if self._point(grads) >= 0:
            return super().match(grads)
        if self._watched and not is_sum:
            self._refuse_short(grads)
        return grads

    def _refuse_short(self, grads: Grads) -> None:
        """Refuses gradients whose storages were made smaller: all in the plan's first call, then the large ones."""
        for index in self._watched:
            grad = grads[index]
            if grad is not None and is_short(grad):
                check_size(grad, "gradient")
        if len(self._watched) == len(self._rows):
            self._watched = [index for index, row in enumerate(self._rows) if row.tensor.numel() >= _LARGE]

    def pointed_at(self, grads: Grads, sums: Grads | None = None, *, overwrites: bool = False) -> Any:
        """Points the table's rows at (matched) gradients, and at sums, as long as the lists live; returns the table.

        Args:
            overwrites: gradients may be the sums themselves.
        """
        refused = self._point(grads)
        if refused >= 0:
            raise RuntimeError(f"the gradient of parameter {refused} cannot be read natively; use backend='torch'")
        if sums is None:
            return self.table
        if self._sums is None or self._sums() is not sums:
            refused = self.table.set_sums(sums)
            self._sums = weakref.ref(sums) if refused < 0 else None
            if refused >= 0:
                raise RuntimeError(f"the accumulator of parameter {refused} no longer fits it; call zero_grad()")
        both = -1 if overwrites else self.table.overwritten()
        if both >= 0:
            raise overwritten(both)
        return self.table

    def forget_sums(self) -> None:
        self._sums = None

    def _point(self, grads: Grads) -> int:
        """Points the table's rows at gradients. Returns the first row whose gradient kernels cannot read, or -1."""
        if self._grads is not None and self._grads() is grads:
            return -1
        if self._sums is not None and self._sums() is grads:  # a step takes what the last fold has written
            self.table.take_sums()
            refused = -1
        else:
            refused = int(self.table.set_grads(grads))
        self._grads = weakref.ref(grads) if refused < 0 else None
        return refused


def adoptable(grad: Tensor, row: Row) -> bool:
    """Tells whether this has its sum's dtype, and memory that nothing else writes: a whole storage of torch's.

    A slice may belong to a bucket, a detached tensor shares its storage, and a gradient with a graph is still needed.
    """
    if grad.dtype is not row.sum_dtype or row.is_offloaded or grad.requires_grad:
        return False
    return has_own_memory(grad)


def has_own_memory(grad: Tensor) -> bool:
    """Tells whether a gradient has a whole storage of torch's, which no other tensor shares."""
    storage = grad.untyped_storage()
    if storage_uses(storage._cdata) != OWN_USES or not storage.resizable():
        return False
    return bool(storage.nbytes() == grad.numel() * grad.itemsize)


def setting_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> partial[Any]:
    """Makes the call of a C function that sets p.grad of each parameter; it can be made once."""
    return partial(deque, map(setattr, params, repeat("grad"), grads), 0)


def _place(value: Any) -> tuple[Any, ...] | None:
    """Returns a tensor's place in memory, for `_lies`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _lies(value: Any, place: tuple[Any, ...] | None) -> bool:
    """Compares a tensor with a place, field by field: thousands of tuples per step burden the garbage collector."""
    if place is None or not isinstance(value, Tensor):
        return place is None
    address, dtype, shape, stride = place
    return value.data_ptr() == address and value.dtype is dtype and value.shape == shape and value.stride() == stride


def _part(param: Tensor, grad: Tensor | None) -> Tensor | None:
    """Returns this process's shard of a gradient.

    It redistributes a gradient with other placements than its parameter (a pending sum, with tensor parallelism).
    """
    if grad is None:
        return None
    dtensor: Any = grad
    placements = getattr(param, "placements", None)
    if shards.is_dtensor(dtensor) and dtensor.placements != placements:
        param.grad = grad = dtensor.redistribute(placements=placements)
    return shards.local(grad)  # type: ignore[no-any-return]
