"""A reader tells whether a plan's tensors are still the same, reads p.grad, and knows who else could write a gradient.

The native module's table is one, at 0.1 us a parameter (csrc/table.h). Here is the one for plans without a table, and
for parameters that are sharded over processes.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from accumfused.core.rows import Grads, Row
from accumfused.formats import shards

Groups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, Any]


def _own_references() -> int:
    param = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    return sys.getrefcount(param.grad)


def _own_uses() -> int:
    tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    return int(storage_uses(tensor.untyped_storage()._cdata))


OWN_REFERENCES = _own_references()  # to `param.grad` as it is read, if nobody else holds the gradient
storage_uses = torch._C._storage_Use_Count  # of a storage, by its address
OWN_USES = _own_uses()  # of one with a single tensor


class TensorReader:
    """Has the table's methods, tensor by tensor. Without a call of `remember` the plan never counts as unchanged."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._held = [True] * len(rows)  # until the first read
        self._seen: tuple[list[Any], list[Any], list[Any]] | None = None  # objects, their arrangement, their places

    def remember(self, groups: Groups, state: State) -> None:
        """Notes the tensors that `unchanged` compares."""
        objects, arranged = _objects(groups, state)
        self._seen = objects, arranged, [_place(shards.local(value)) for value in objects]

    def unchanged(self, groups: Groups, state: State | None) -> bool:
        """Whether groups, states and their memory are still those of the plan; without a state, only the groups."""
        if self._seen is None:
            return False
        known, known_arranged, places = self._seen
        objects, arranged = _objects(groups, state or {})
        if state is None:
            known, known_arranged, arranged = known[: len(self._rows)], known_arranged[:1], arranged[:1]
        if len(objects) != len(known) or arranged != known_arranged or not all(map(operator.is_, objects, known)):
            return False
        return all(map(_lies, map(shards.local, objects), places))

    def present(self) -> int:
        """How many parameters have a p.grad."""
        return sum(row.param.grad is not None for row in self._rows)

    def read_grads(self, own_references: int) -> tuple[Grads, int, int]:
        """Every p.grad, their number, and 0: no row of a table points at them."""
        params = [row.param for row in self._rows]
        held = [p.grad is not None and sys.getrefcount(p.grad) > own_references for p in params]
        whole = [param.grad for param in params]
        counts = Counter(map(id, whole))
        self._held = [is_held or counts[id(grad)] > 1 for is_held, grad in zip(held, whole, strict=True)]
        both = zip(self._rows, whole, strict=True)
        grads = Grads([g if row.shard is None else _part(row.param, g) for row, g in both])
        return grads, sum(grad is not None for grad in grads), 0

    def held(self) -> list[bool]:
        """Flags the last read gradients that somebody else also holds, and may write again."""
        return self._held

    def versions(self, first: int, every: int) -> int:
        """The sum of some parameters' version counters, which grow with each write that autograd sees."""
        return sum(row.param._version for row in self._rows[first::every])


def adoptable(grad: Tensor, row: Row) -> bool:
    """Whether this has its sum's dtype, and memory that nobody else can write: a whole storage of torch's (no array).

    A slice may belong to a bucket, a detached tensor shares its storage, and a gradient with a graph is still needed.
    """
    if grad.dtype is not row.form.dtype or grad.requires_grad:
        return False
    storage = grad.untyped_storage()
    if storage_uses(storage._cdata) != OWN_USES or not storage.resizable():
        return False
    return bool(storage.nbytes() == grad.numel() * grad.itemsize)


def setting_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> partial[Any]:
    """The call of a C function that sets p.grad of each parameter; it can be made once."""
    return partial(deque, map(setattr, params, repeat("grad"), grads), 0)


def _objects(param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> tuple[list[Any], list[Any]]:
    """Parameters with the entries of their state, and their arrangement: groups' sizes, and names."""
    params = [param for group in param_groups for param in group["params"]]
    entries = [state.get(param) or {} for param in params]
    arranged = [[len(group["params"]) for group in param_groups], *map(list, entries)]
    return params + [value for values in entries for value in values.values()], arranged


def _place(value: Any) -> tuple[Any, ...] | None:
    """A tensor's place in memory, for `_lies`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _lies(value: Tensor, place: tuple[Any, ...] | None) -> bool:
    """Compares field by field: thousands of new tuples per step would burden the garbage collector."""
    if place is None:
        return True
    address, dtype, shape, stride = place
    return value.data_ptr() == address and value.dtype is dtype and value.shape == shape and value.stride() == stride


def _part(param: Tensor, grad: Tensor | None) -> Tensor | None:
    """Returns this process's shard of a gradient.

    It redistributes a gradient with other placements than its parameter (a pending sum, with tensor parallelism).
    """
    if grad is None:
        return None
    given: Any = grad
    placements = getattr(param, "placements", None)
    if shards.is_dtensor(given) and given.placements != placements:
        param.grad = grad = given.redistribute(placements=placements)
    return shards.local(grad)  # type: ignore[no-any-return]
