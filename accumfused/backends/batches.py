"""Batches: torch's own kernels work on several pieces of a plan's tensors together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.formats.kinds import Format
from accumfused.formats.numeric import CHUNK, LANES, memory_order

WHOLE = 0  # in place of a number of elements: tensors stay whole

Tensors = list[Tensor]


@dataclass
class Stored:
    """The tensors that a step of the batch updates: lists with one piece per row."""

    params: Tensors
    masters: list[Tensor | None]
    states: list[Tensors]  # per state of the rule
    scales: list[list[Tensor | None]]
    steps: Tensors  # step counts; empty if the format and the rule count none
    seeds: Tensors


@dataclass
class Batch:
    """Whole small tensors of one group and format, or one piece of a large tensor."""

    group: int
    form: Format
    rows: list[int]
    begin: int = 0  # the piece's first element, in memory order; a multiple of CHUNK
    end: int | None = None  # None: the tensors are whole

    def of(self, tensors: Sequence[Tensor | None]) -> Tensors:
        """Takes the batch's pieces from the tensors of all rows of the plan."""
        return self.cut([tensors[row] for row in self.rows])

    def cut(self, tensors: Sequence[Tensor | None]) -> Tensors:
        """Cuts the batch's pieces from the tensors of its rows; leaves out None."""
        present = [tensor for tensor in tensors if tensor is not None]
        if self.end is None and self.form == Format():
            return present
        return [memory_order(tensor)[self.begin : self.end] for tensor in present]

    def apart(self, kinds: Sequence[Any]) -> Iterator[Batch]:
        """Splits the batch by the kind of its rows; leaves out rows whose kind is false."""
        kinds_here = [kinds[row] for row in self.rows]
        for kind in dict.fromkeys(kinds_here):
            if kind:
                rows = [row for row, kind_here in zip(self.rows, kinds_here, strict=True) if kind_here == kind]
                yield self if len(rows) == len(self.rows) else replace(self, rows=rows)

    def scaled(self, grads: Tensors, coefficient: float | Tensor | list[Any], scratch: Tensor) -> Tensors:
        """Multiplies gradients by the coefficient, or by each row's, into new tensors of the format's dtype."""
        dtype = self.form.dtype
        if isinstance(coefficient, list):
            factors = [coefficient[row] for row in self.rows]
            return [torch.mul(grad.to(dtype), factor) for grad, factor in zip(grads, factors, strict=True)]
        if self.end is None:
            return list(torch._foreach_mul([grad.to(dtype) for grad in grads], coefficient))
        (grad,) = grads
        out = scratch.view(dtype)[: len(grad)]
        if grad.dtype == dtype:
            return [torch.mul(grad, coefficient, out=out)]
        return [out.copy_(grad).mul_(coefficient)]

    def measure(self, plan: Plan, values: Tensors, partials: Tensor) -> None:
        """Writes each chunk's sum of squares: torch's fp32 norm of 8M elements at once is off by 2e-4 (CPU)."""
        values = [value.to(partials.dtype) for value in values]
        if self.end is None:
            sums = [norm * norm for norm in torch._foreach_norm(values)]
        else:
            (value,) = values
            whole = len(value) // CHUNK * CHUNK
            norms = torch.linalg.vector_norm(value[:whole].view(-1, LANES), dim=1)
            sums = [norms.square_().view(-1, CHUNK // LANES).sum(1)]
            if whole < len(value):
                sums = [torch.cat([sums[0], value[whole:].square().sum().view(1)])]
        for first, squares in zip(self._first_chunks(plan), sums, strict=True):
            partials[first : first + squares.numel()] = squares

    def _first_chunks(self, plan: Plan) -> list[int]:
        return [plan.rows[row].first_chunk + self.begin // CHUNK for row in self.rows]


def cut(plan: Plan, size: int) -> Iterator[Batch]:
    """Cuts a plan into batches of about `size` elements; the row of a large tensor into pieces."""
    gathered: dict[tuple[int, Format], tuple[Batch, int]] = {}
    for index, row in enumerate(plan.rows):
        group, form, numel = row.group, row.form, row.tensor.numel()
        if size != WHOLE and numel > CHUNK:
            length = size if form == Format() else size // 4  # decoding takes more memory
            for begin in range(0, numel, length):
                yield Batch(group, form, [index], begin, min(begin + length, numel))
        elif numel:
            batch, count = gathered.pop((group, form), (Batch(group, form, []), 0))
            batch.rows.append(index)
            if size != WHOLE and count + numel >= size:
                yield batch
            else:
                gathered[group, form] = batch, count + numel
    for batch, _ in gathered.values():
        yield batch
