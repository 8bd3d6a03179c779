"""The plan: an optimizer's tensors, validated, in the form that the backends work on.

In: param_groups and state. Out: one row per parameter, in the groups' order. Every parameter has its own range of
chunks, with a gradient or without, so the norm's summation order depends on the optimizer alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.core import graphs, memory
from accumfused.core.reader import OWN_REFERENCES, OWN_USES, TensorReader, setting_grads, storage_uses
from accumfused.core.rows import Grads, Row, check_gradient, check_parameter, has_memory, is_freed, row_of
from accumfused.formats.kinds import check_states
from accumfused.formats.numeric import chunk_count
from accumfused.rules import Rule
from accumfused.settings import Settings


@dataclass(eq=False)
class Plan:
    """One row per parameter. `build` makes it; a tensor that moves outdates it."""

    rows: list[Row]
    rules: list[type[Rule]]  # per group
    chunks: int
    device: torch.device  # where its kernels run
    reader: Any = field(init=False)  # a TensorReader, or the table
    table: Any = None  # the rows' addresses (_C.Table), for native kernels
    functors: list[int] = field(default_factory=list)  # of each group's rule, as native kernels know it
    parts: list[Plan] = field(default_factory=list)  # with several devices: the plan of each
    _pointed_at: weakref.ref[Grads] | None = None  # the gradients of the table's rows
    _sums: weakref.ref[Grads] | None = None  # and their sums
    _checked: set[int] = field(default_factory=set)  # parameters, if no table checks them

    def __post_init__(self) -> None:
        self.reader = TensorReader(self.rows)

    @cached_property
    def params(self) -> list[Tensor]:
        """All parameters."""
        return [row.param for row in self.rows]

    @cached_property
    def bundles(self) -> bool:
        """Whether some rows' accumulators travel together."""
        return any(row.is_bundled for row in self.rows)

    @cached_property
    def copies(self) -> list[int]:
        """Rows whose tensor is a dense copy."""
        return [index for index, row in enumerate(self.rows) if row.is_copy]

    @cached_property
    def has_all_states(self) -> bool:
        """Whether every parameter has its state."""
        return all(row.storage is not None for row in self.rows)

    @cached_property
    def is_spread(self) -> bool:
        """Whether some rows are shards of their parameters."""
        return any(row.shard is not None for row in self.rows)

    def add_table(self, table: Any, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Makes the table of the addresses on this device; `table` is the class of a native module."""
        self.table = table(compiled.exchange_api, torch.empty(0, device=self.device).__dlpack_device__(), self.rows)
        if not self.is_spread:
            self.table.remember(param_groups, state)
            self.reader = self.table
        assert self.table.chunks == self.chunks

    def unchanged(self, param_groups: list[dict[str, Any]], state: Mapping[Tensor, Any] | None) -> bool:
        """Whether groups, states (None: not asked for) and the memory behind them are still those of this plan."""
        readers = [part.reader for part in self.parts if not self.is_spread] or [self.reader]
        return all(reader.unchanged(param_groups, state) for reader in readers)

    def gradients(self) -> tuple[Grads, int]:
        """Every p.grad, and their number."""
        read, present, refused = self.reader.read_grads(OWN_REFERENCES)
        grads = Grads(read)
        if self.table is not None:
            self._pointed_at = weakref.ref(grads) if refused < 0 else None
        return grads, present

    def adopts_all(self, grads: Grads) -> bool:
        """Whether a window may keep these gradients, just read, as its sums: nobody else can write any of them."""
        if not self._points_at(grads) or self.reader is not self.table or self.bundles:
            return False
        return not graphs.has_static_memory(self.device) and self.table.adoptable(grads, storage_uses, OWN_USES)

    def releasing_grads(self, rows: Container[int] | None) -> partial[Any]:
        """The call of a C function that sets p.grad = None: of all parameters, or of those with these ids."""
        if rows is None and self.reader is self.table:
            return partial(self.table.release_grads)
        params = [param for param in self.params if rows is None or id(param) in rows]
        return setting_grads(params, repeat(None))

    def hypers(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[float | Tensor, ...]]:
        """The groups' numbers in the order of their rules' `hypers`; a tensor is not read."""
        return [
            tuple(rule.hyper(group, name) for name in rule.hyper_names)
            for rule, group in zip(self.rules, param_groups, strict=True)
        ]

    def lacks_state(self, grads: Grads) -> bool:
        return not self.has_all_states and any(
            grad is not None and row.storage is None for grad, row in zip(grads, self.rows, strict=True)
        )

    def match(self, grads: Grads) -> Grads:
        """Returns the gradients as kernels read them: dense, laid out as their parameters.

        A gradient of another layout is copied (slower).

        Raises:
            RuntimeError: a gradient is sparse or complex, or its device or shape is not the parameter's.
            TypeError: a parameter or gradient is not fp32, fp16 or bf16.
        """
        if self.table is not None and self._point_at(grads) < 0:
            return grads
        return Grads([None if g is None else self._match(i, g) for i, g in enumerate(grads)])

    def point_at(self, grads: Grads, sums: Grads | None = None, *, overwrites: bool = False) -> None:
        """Points the table's rows at these (matched) gradients, and at sums, as long as the lists live."""
        refused = self._point_at(grads)
        if refused >= 0:
            raise RuntimeError(f"the gradient of parameter {refused} cannot be read natively; use backend='torch'")
        if sums is None:
            return
        if self._sums is None or self._sums() is not sums:
            refused = self.table.set_sums(sums)
            self._sums = weakref.ref(sums) if refused < 0 else None
            if refused >= 0:
                raise RuntimeError(f"the accumulator of parameter {refused} no longer fits it; call zero_grad()")
        both = -1 if overwrites else self.table.overwritten()
        if both >= 0:
            raise overwritten(both)

    def forget_sums(self) -> None:
        """Before a list of sums that the table may point at changes."""
        self._sums = None

    def _points_at(self, grads: Grads) -> bool:
        return self._pointed_at is not None and self._pointed_at() is grads

    def _point_at(self, grads: Grads) -> int:
        """Returns the first row whose gradient kernels cannot read, or -1."""
        if self._points_at(grads):
            return -1
        if self._sums is not None and self._sums() is grads:  # a step takes what the last fold has written
            self.table.take_sums()
            refused = -1
        else:
            refused = int(self.table.set_grads(grads))
        self._pointed_at = weakref.ref(grads) if refused < 0 else None
        return refused

    def _match(self, index: int, grad: Tensor) -> Tensor:
        tensor = self.rows[index].tensor
        if index not in self._checked:
            check_parameter(self.rows[index].owned)
            self._checked.add(index)
        check_gradient(tensor, grad)
        in_memory = type(grad) is Tensor and not grad.is_neg() and not grad._is_zerotensor()
        if in_memory and is_freed(grad):  # torch's kernels read at address 0
            memory.check_size(grad, "gradient")
        if in_memory and grad.stride() == tensor.stride():
            return grad
        return torch.empty_like(tensor, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


EMPTY = Plan([], [], 0, torch.device("cpu"))


def build(
    param_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Any],
    rules: list[type[Rule]],
    settings: Settings,
) -> Plan:
    """Builds the plan; the backend then adds its own tables.

    Raises:
        ValueError: a group's states cannot be kept in 8 bits.
        RuntimeError: two parameters share memory; a parameter's memory is too small or read-only; this process has no
            shard of a DTensor to update.
    """
    for rule in rules:
        check_states(rule, settings)
    rows, chunks = list[Row](), 0
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            rows.append(row_of(param, index, rules[index], state.get(param), settings, chunks))
            chunks += chunk_count(rows[-1].tensor.numel())
    owned = [row.owned for row in rows]
    memory.check([tensor for tensor in owned if has_memory(tensor) and not is_freed(tensor) and tensor.numel()])
    for row in rows:
        for slot in () if row.storage is None else row.storage.slots():
            if slot is not None:
                memory.check_size(slot, "state")
    device = next((tensor.device for tensor in owned if has_memory(tensor)), torch.device("cpu"))
    plan = Plan(rows, rules, chunks, device)
    if plan.is_spread:
        plan.reader.remember(param_groups, state)
    return plan


def rule_of(rules: Iterable[type[Rule]], group: Mapping[str, Any]) -> type[Rule]:
    """An optimizer's rule for a parameter group: the first whose flags are the group's."""
    return next(rule for rule in rules if rule.fits(group))


def overwritten(row: int) -> RuntimeError:
    """The error of a gradient in memory that the window has adopted: its accumulator holds no sum any more."""
    return RuntimeError(
        f"the gradient of parameter {row} lies where the window's sum does, so one has overwritten the other; call "
        "zero_grad(), and give every micro-batch a gradient in memory of its own (p.grad = buffer.clone())"
    )
