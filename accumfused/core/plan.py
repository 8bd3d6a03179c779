"""The plan: an optimizer's tensors, validated, in the form that the backends work on; and its two partners.

A plan has one row per parameter, in the groups' order. Every parameter has its own range of chunks, with a gradient or
without, so the norm's summation order depends on the optimizer alone. A `Backend` runs the three verbs on a plan; an
`Exchange` knows the gradients and norms of other processes. All backends but torch_kernels.py compute the same bits.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.core import graphs
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling, overwritten
from accumfused.core.reader import OWN_REFERENCES, OWN_USES, TensorReader, setting_grads, storage_uses
from accumfused.core.rows import Grads, Row, check_gradient, check_parameter, check_size, is_freed
from accumfused.core.skips import Skips
from accumfused.formats.kinds import DTYPES, TORCH_DTYPES
from accumfused.rules import Rule


class Backend(Protocol):
    """The three verbs."""

    name: str
    measures_folds: bool  # else `norm` is given the accumulators

    def prepare(self, plan: Plan, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Adds this backend's tables to a new plan."""

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        """Folds; if it measures folds, and this one does not copy, it writes the sums of squares into partials.

        Those of rows without a gradient stay right: they are 0 where `before` makes the sum 0. In the plan's dtype,
        [plan.chunks].
        """

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        """Reduces the sums of squares to one coefficient on the device.

        norm = sqrt(sum(partials)) / normalization
        coefficient = min(1, max_grad_norm / (norm + 1e-6)) / normalization

        Args:
            grads: gradients whose sums of squares partials lack, if any; None leaves a row's partials alone.
            partials: None: it takes no norm, and only the normalization enters.
        """

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        """The sums of squares of runs of chunks, each added up as `norm` adds up all of them: fp64 [segments].

        Args:
            partials: as `norm` leaves them.
            bounds: int64 [segments + 1], on the plan's device; segment i begins at chunk bounds[i] and ends before
                bounds[i + 1].
        """

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        """Updates parameters, states and step counts; writes nothing if the outcome is a skip."""


@dataclass
class Segments:
    """The runs of rows that have a norm: parameter groups, or single rows."""

    bounds: Tensor  # int64 [segments + 1]: their first chunks, and the number of all
    row_bounds: Tensor  # int64 [rows + 1]: the rows' first chunks, and the number of all
    first_rows: Tensor | None  # int64 [segments + 1]: their first rows, and the number of all; None: rows are segments
    of_rows: Tensor | None  # int64 [rows]: each row's segment; None: its own

    @classmethod
    def of(cls, plan: Plan, *, per_group: bool) -> Segments:
        """The segments of a plan; their tensors lie on its device."""

        def kept(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=plan.device)

        chunks = [*(row.first_chunk for row in plan.rows), plan.chunks]
        if not per_group:
            return cls(kept(chunks), kept(chunks), None, None)
        groups = [row.group for row in plan.rows]
        first = [bisect_left(groups, group) for group in range(len(plan.rules) + 1)]
        return cls(kept([chunks[row] for row in first]), kept(chunks), kept(first), kept(groups))


@dataclass(frozen=True)
class Agreement:
    """The agreement of several processes on a window that ends.

    Attributes:
        divisor: of the window's sums, once they are added up: fp64, shape [].
        missing: flags parameters that have gradients in other processes only.
        others_close: whether the others close the window with `last`: bool, shape []. None: this process has
            micro-batches, so it knows.
    """

    divisor: Tensor
    missing: list[bool]
    others_close: Tensor | None = None


class Exchange:
    """How this process's gradients, weights and norms meet those of others; here it has all gradients itself.

    distributed/exchange.py has those with others.
    """

    adds_up = False  # it adds up all processes' accumulators: p.grad is this process's own
    has_means = False  # gradients are means over processes before they are folded
    is_alone = True  # neither
    bundled_bytes = 0  # accumulators below this travel together

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Before a window begins: refuses gradients that it would misread (as means, say)."""

    def agree(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, seed: int, last: bool
    ) -> Agreement | None:
        """Agrees with other processes on a window that ends; None: there is nothing to agree on."""
        return None

    def add_up(self, flats: Iterable[Tensor]) -> None:
        """Replaces flat tensors, accumulators or fp64 numbers, by their sums over all processes."""

    def total(self, plan: Plan, total: float | Tensor, is_weighted: bool | None) -> float | Tensor:
        """The sum of weights that a checkpoint of an open window holds."""
        return total

    def shares_norm(self, plan: Plan) -> bool:
        """Whether a norm is one over several processes: then all of them take it in each step."""
        return False

    def found_inf(self, found_inf: Tensor | None) -> Tensor | None:
        """A scaler's flag, of all processes that share the norm."""
        return found_inf

    def segment_norms(self, plan: Plan, partials: Tensor, segments: Segments) -> Tensor:
        """`Backend.segment_norms`, over all shards of the parameters."""
        return plan.backend.segment_norms(plan, partials, segments.bounds)

    def sums_of_squares(self, plan: Plan, partials: Sequence[Tensor]) -> Tensor:
        """The sum of each of these lists of chunks' sums, over all shards of the parameters: fp64 [lists]."""
        bounds = torch.arange(len(partials) + 1, device=plan.device) * plan.chunks
        return plan.backend.segment_norms(plan, torch.cat(list(partials)), bounds)


@dataclass(eq=False)
class Plan:
    """One row per parameter. `plans.build` makes it; a tensor that moves outdates it."""

    rows: list[Row]
    rules: list[type[Rule]]  # per group
    chunks: int
    device: torch.device  # where its kernels run
    devices: set[torch.device] = field(default_factory=set)  # of all parameters with memory
    dtype: torch.dtype = torch.float32  # of factors, sums of squares and coefficients
    backend: Backend = field(init=False)  # has added its tables
    exchange: Exchange = field(init=False)
    skips: Skips = field(init=False)  # of the optimizer's steps; the next plan on this device has it, too
    is_valid: bool = True  # False: the optimizer's state was replaced
    reader: Any = field(init=False)  # a TensorReader, or the table
    table: Any = None  # the rows' addresses (_C.Table), for native kernels
    functors: list[int] = field(default_factory=list)  # of each group's rule, as native kernels know it
    parts: list[Plan] = field(default_factory=list)  # with several devices: the plan of each
    _table_grads: weakref.ref[Grads] | None = None  # the lists to which the table's rows point
    _table_sums: weakref.ref[Grads] | None = None
    _checked: set[int] = field(default_factory=set)  # parameters, if no table checks them
    _partials: Tensor | None = None  # sums of squares of gradients from p.grad

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

    def read_grads(self) -> tuple[Grads, int]:
        """Every p.grad, to which the table then points, and how many are not None."""
        read, present, refused = self.reader.read_grads(OWN_REFERENCES)
        grads = Grads(read)
        if self.table is not None:
            self._table_grads = weakref.ref(grads) if refused < 0 else None
        return grads, present

    def adopts_all(self, grads: Grads) -> bool:
        """Whether a window may keep these gradients, just read, as its sums: nobody else can write any of them.

        If so, the table points at them as sums.
        """
        if self.reader is not self.table or self._table_grads is None or self._table_grads() is not grads:
            return False
        if self.bundles or graphs.has_static_memory(self.device):
            return False
        if not self.table.adoptable(grads, storage_uses, OWN_USES):
            return False
        self.table.keep_grads()
        self._table_sums = weakref.ref(grads)
        return True

    def releasing_grads(self, param_ids: Container[int] | None) -> partial[Any]:
        """The call of a C function that sets p.grad = None: of all parameters, or of those with these ids."""
        if param_ids is None and self.reader is self.table:
            return partial(self.table.release_grads)
        params = [param for param in self.params if param_ids is None or id(param) in param_ids]
        return setting_grads(params, repeat(None))

    def cleared_partials(self, has_all_grads: bool) -> Tensor:
        """Memory for the sums of squares; zero for rows without a gradient."""
        if self._partials is None:
            self._partials = torch.zeros(self.chunks, dtype=self.dtype, device=self.device)
        elif not has_all_grads:
            self._partials.zero_()
        return self._partials

    # ---- rows ------------------------------------------------------------------------------------------------------

    def hypers(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[float | Tensor, ...]]:
        """The groups' numbers in the order of their rules' `hypers`; a tensor is not read."""
        return [
            tuple(rule.hyper(group, name) for name in rule.hyper_names)
            for rule, group in zip(self.rules, param_groups, strict=True)
        ]

    def lacks_state(self, grads: Grads) -> bool:
        """Whether a parameter with a gradient has no state yet."""
        return any(g is not None and row.storage is None for g, row in zip(grads, self.rows, strict=True))

    def match(self, grads: Grads) -> Grads:
        """Returns the gradients as kernels read them: dense, laid out as their parameters. The table points at them.

        A gradient of another layout is copied (slower).

        Raises:
            RuntimeError: a gradient is sparse or complex, or its device or shape is not the parameter's.
            TypeError: a parameter or gradient is of another dtype.
        """
        if self.table is not None and self._set_grads(grads) < 0:
            return grads
        return Grads([None if g is None else self._match(i, g) for i, g in enumerate(grads)])

    def point_at(self, grads: Grads, sums: Grads | None = None, *, overwrites: bool = False) -> None:
        """Points the table's rows at these (matched) gradients, and at sums, as long as the lists live."""
        refused = self._set_grads(grads)
        if refused >= 0:
            raise RuntimeError(f"the gradient of parameter {refused} cannot be read natively; use backend='torch'")
        if sums is None:
            return
        if self._table_sums is None or self._table_sums() is not sums:
            refused = self.table.set_sums(sums)
            self._table_sums = weakref.ref(sums) if refused < 0 else None
            if refused >= 0:
                raise RuntimeError(f"the accumulator of parameter {refused} no longer fits it; call zero_grad()")
        both = -1 if overwrites else self.table.overwritten()
        if both >= 0:
            raise overwritten(both)

    def forget_sums(self) -> None:
        """Before a list of sums that the table may point at changes."""
        self._table_sums = None

    def _set_grads(self, grads: Grads) -> int:
        """Points the table's rows at gradients. Returns the first row whose gradient kernels cannot read, or -1."""
        if self._table_grads is not None and self._table_grads() is grads:
            return -1
        if self._table_sums is not None and self._table_sums() is grads:  # a step takes what the last fold has written
            self.table.take_sums()
            refused = -1
        else:
            refused = int(self.table.set_grads(grads))
        self._table_grads = weakref.ref(grads) if refused < 0 else None
        return refused

    def _match(self, index: int, grad: Tensor) -> Tensor:
        tensor = self.rows[index].tensor
        if index not in self._checked:
            check_parameter(self.rows[index].owned)
            self._checked.add(index)
        check_gradient(tensor, grad, TORCH_DTYPES if self.dtype == torch.float64 else DTYPES)
        in_memory = type(grad) is Tensor and not grad.is_neg() and not grad._is_zerotensor()
        if in_memory and is_freed(grad):  # torch's kernels read at address 0
            check_size(grad, "gradient")
        if in_memory and grad.stride() == tensor.stride():
            return grad
        return torch.empty_like(tensor, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


Step = Callable[[Plan, Grads, Hypers, Outcome, Commit], None]  # as `Backend.step`
