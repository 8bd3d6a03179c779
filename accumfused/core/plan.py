"""The plan: an optimizer's tensors, validated, in the form that the backends work on.

A plan has one row per parameter, in the groups' order. Every parameter has its own range of chunks, with a gradient or
without, so the norm's summation order depends on the optimizer alone. A plan is data: it owns no tensor of the user's,
and its reader finds them where the optimizer has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from accumfused.core.protocol import Backend, Exchange, Pending
from accumfused.core.reader import TableReader, TensorReader
from accumfused.core.rows import Grads, Row
from accumfused.core.skips import Skips
from accumfused.core.streams import StreamUses
from accumfused.formats import kinds
from accumfused.rules import Rule


@dataclass(eq=False)
class Plan:
    """One row per parameter. `plans.build` makes it; a tensor that moves outdates it."""

    rows: list[Row]
    rules: list[type[Rule]]  # per group
    chunks: int
    device: torch.device  # where its kernels run
    optimizer: Callable[[], Any] | None = None  # a weak reference; None: the rows are not its parameters
    devices: set[torch.device] = field(default_factory=set)  # of all parameters with memory
    dtype: torch.dtype = torch.float32  # of factors, sums of squares and coefficients
    is_valid: bool = True  # False: the optimizer's state or settings were replaced
    seed: int = 0  # of the noise of sums in bf16
    backend: Backend = field(init=False)  # has added its tables
    exchange: Exchange = field(init=False)
    skips: Skips = field(init=False)  # of the optimizer's steps; the next plan has it, too
    reader: TensorReader = field(init=False)
    table_reader: TableReader = field(init=False)  # the reader, where a backend has called `add_table`
    pending: Pending | None = None  # a backend's that makes folds later
    stream_uses: StreamUses = field(default_factory=StreamUses)
    functors: list[int] = field(default_factory=list)  # of each group's rule, as native kernels know it
    parts: list[Plan] = field(default_factory=list)  # with several devices: the plan of each

    def __post_init__(self) -> None:
        self.reader = TensorReader(self.optimizer, self.rows, self.dtype)

    def add_table(self, table: Any) -> None:
        """Replaces the reader by one with a table of the addresses on this device.

        Args:
            table: the class of a native module.
        """
        self.reader = self.table_reader = TableReader(self.optimizer, self.rows, self.dtype, table, self.device)
        assert self.table_reader.table.chunks == self.chunks

    @property
    def params(self) -> list[Tensor]:
        """All parameters."""
        assert self.optimizer is not None
        return [param for group in self.optimizer().param_groups for param in group["params"]]

    @cached_property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(row.tensor.numel() for row in self.rows)

    @cached_property
    def copies(self) -> list[int]:
        """Rows whose tensor is a dense copy."""
        return [index for index, row in enumerate(self.rows) if row.copy is not None]

    @cached_property
    def has_all_states(self) -> bool:
        """Whether every parameter has its state."""
        return all(row.has_state for row in self.rows)

    @cached_property
    def is_spread(self) -> bool:
        """Whether some rows are shards of their parameters."""
        return any(row.shard is not None for row in self.rows)

    @cached_property
    def rounds_sums(self) -> bool:
        """Whether some new sums are in bf16."""
        return any(row.sum_dtype is torch.bfloat16 for row in self.rows)

    @cached_property
    def least_eps(self) -> list[float]:
        """The least eps of each group, but 0, that all its formats take; 0 where any may be."""
        least = [0.0] * len(self.rules)
        for row in self.rows:
            least[row.group] = max(least[row.group], kinds.least_eps(row.rule, row.form))
        return least

    def check_eps(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuses an eps that has become too small since the groups were made."""
        for least, group in zip(self.least_eps, param_groups, strict=True):
            if least:
                kinds.check_eps(group["eps"], least)

    def wait(self) -> None:
        """Waits until the sums hold all folds so far, and the host can read and write them: see `Pending`."""
        if self.pending is not None:
            self.pending.wait()

    def drop(self, *, memory: bool = False) -> None:
        """Ends the window of folds that may be under way: see `Pending`."""
        if self.pending is not None:
            self.pending.drop(memory=memory)

    def unchanged(self, *, with_states: bool) -> bool:
        """Tells whether the memory of groups (and of states) is still this plan's; one of several devices asks."""
        return (self.parts or [self])[0].reader.unchanged(with_states=with_states)

    def lacks_state(self, grads: Grads) -> bool:
        """Tells whether a parameter with a gradient has no state yet."""
        return any(g is not None and not row.has_state for g, row in zip(grads, self.rows, strict=True))

    def record(self, *lists: Grads) -> None:
        """Keeps gradients, or sums, until the current streams have read them: for those who let go of them.

        Shards pass where the default stream reads them. FSDP's stream waits for the current one before it allocates
        gradients, and what is recorded comes back to it late: that would cost as much memory again.
        """
        self.stream_uses.record(self.devices, *lists, by_default_stream=not self.is_spread)

    def hypers(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[float | Tensor, ...]]:
        """Returns the groups' numbers in the order of their rules' `hypers`; a tensor is not read."""
        return [
            tuple([rule.hyper(group, name) for name in rule.hyper_names])  # a generator takes 2 us longer
            for rule, group in zip(self.rules, param_groups, strict=True)
        ]
