"""How gradients, parts of gradients and parts of parameters travel between processes: torch.distributed's collectives.

What is large travels as it lies, in a collective of its own. Small accumulators lie side by side (`arena.py`), small
parts are copied to buffers. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accumfused import shards
from accumfused.arena import flat
from accumfused.plan import Grads, Plan

BUCKET_BYTES = 32 * 2**20
_UNDER_WAY = 4  # collectives

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport:
    """Args: group: torch.distributed.ProcessGroup; wire_dtype: in which gradients travel, None: as they are.

    Attributes:
        scatters: by a reduce-scatter. Not over gloo, which would add up all of it, in a copy.
    """

    def __init__(self, group: Any, wire_dtype: torch.dtype | None) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.scatters = dist.get_backend(group) != dist.Backend.GLOO
        self._wire_dtype = wire_dtype

    def add_up(self, flats: Iterable[Tensor]) -> None:
        """Replaces these (flat) tensors by their sums over all processes, in buckets."""
        under_way = _UnderWay()
        for bucket in (bucket for whole in flats for bucket in _split(whole)):
            wire = self._wire(bucket)
            under_way.add(dist.all_reduce(wire, group=self.group, async_op=True), bucket, wire)
        under_way.finish()

    def scatter(self, plan: Plan, sums: Grads) -> None:
        """Replaces this process's part of every gradient by its sum over all processes; other parts are left undefined.

        Args:
            plan: of the parts.
            sums: this process's, of the whole parameters; None: no process has one.
        """
        pairs = list(zip(sums, plan.shards, strict=True))
        self.add_up(flat(grad) for grad, shard in pairs if grad is not None and shard is None)
        wholes = {row: grad for row, (grad, shard) in enumerate(pairs) if grad is not None and shard is not None}
        under_way, staged = _UnderWay(), []
        for row, whole in wholes.items():
            if self._lies_in_parts(plan, row, whole):
                memory = flat(whole)
                wire = self._wire(memory)
                own = self._own(wire)
                under_way.add(_reduce_scatter(own, wire, group=self.group, async_op=True), self._own(memory), own)
            else:
                staged.append(row)
        under_way.finish()
        for bucket, starts in self._buckets(plan, staged, 4):
            first = wholes[bucket[0]]
            every = torch.empty(self.size, starts[-1], dtype=self._wire_dtype or first.dtype, device=first.device)
            for row, start in zip(bucket, starts, strict=False):
                for ranks, block in self._blocks(wholes[row]):
                    every[ranks, start : start + block[0].numel()].view(block.shape).copy_(block)
            own = every.new_empty(starts[-1])
            _reduce_scatter(own, every.view(-1), group=self.group)
            for row, start in zip(bucket, starts, strict=False):
                shard = plan.shards[row]
                assert shard is not None
                part = shards.own_part(wholes[row], shard)
                part.copy_(own[start : start + part.numel()].view(part.shape))

    def gather(self, plan: Plan, present: Sequence[object | None]) -> None:
        """Writes the parts that other processes have updated into the parameters.

        Args:
            plan: of the parts.
            present: None for parameters that were not updated.
        """
        cut = [row for row, flag in enumerate(present) if flag is not None and plan.shards[row] is not None]
        under_way, staged = _UnderWay(), []
        for row in cut:
            whole = plan.params[row].detach()
            if not self.scatters and not plan.bundled[row] and whole.is_contiguous():
                for rank, part in enumerate(torch.split(whole, self._rows_each(whole))):
                    under_way.add(dist.broadcast(part, group=self.group, group_src=rank, async_op=True), part, part)
            elif self._lies_in_parts(plan, row, whole):
                whole = flat(whole)
                under_way.add(_all_gather(whole, self._own(whole), group=self.group, async_op=True), whole, whole)
            else:
                staged.append(row)
        under_way.finish()
        for dtype in dict.fromkeys(plan.params[row].dtype for row in staged):
            rows = [row for row in staged if plan.params[row].dtype == dtype]
            for bucket, starts in self._buckets(plan, rows, dtype.itemsize):
                own = torch.empty(starts[-1], dtype=dtype, device=plan.params[bucket[0]].device)
                for row, start in zip(bucket, starts, strict=False):
                    part = plan.owned[row]
                    own[start : start + part.numel()].view(part.shape).copy_(part)
                every = own.new_empty(self.size, starts[-1])
                _all_gather(every.view(-1), own, group=self.group)
                for row, start in zip(bucket, starts, strict=False):
                    for ranks, block in self._blocks(plan.params[row].detach()):
                        block.copy_(every[ranks, start : start + block[0].numel()].view(block.shape))

    def _wire(self, tensor: Tensor) -> Tensor:
        return tensor if self._wire_dtype is None else tensor.to(self._wire_dtype)

    def _lies_in_parts(self, plan: Plan, row: int, whole: Tensor) -> bool:
        """Whether the parts of a parameter are equal runs of its memory, worth a collective of their own."""
        return not plan.bundled[row] and whole.shape[0] % self.size == 0 and whole.is_contiguous()

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.size)[dist.get_rank(self.group)]

    def _buckets(self, plan: Plan, rows: list[int], itemsize: int) -> Iterator[tuple[list[int], list[int]]]:
        """Rows, and where their parts start in a buffer of one process, with its end: the same in all of them."""
        bucket: list[int] = []
        starts = [0]
        for row in rows:
            bucket.append(row)
            starts.append(starts[-1] + plan.params[row][: self._rows_each(plan.params[row])].numel())
            if starts[-1] * self.size * itemsize >= BUCKET_BYTES:
                yield bucket, starts
                bucket, starts = [], [0]
        if bucket:
            yield bucket, starts

    def _rows_each(self, whole: Tensor) -> int:
        """Of all processes but the last that have any, as DTensor's Shard(0) cuts."""
        return max(-(-whole.shape[0] // self.size), 1)

    def _blocks(self, whole: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Processes whose parts are equal, and these: [processes, rows, ...]; at most two such blocks."""
        rows, each = whole.shape[0], self._rows_each(whole)
        full = rows // each
        if full:
            yield slice(0, full), whole.narrow(0, 0, full * each).view(full, each, *whole.shape[1:])
        if rows % each:
            yield slice(full, full + 1), whole.narrow(0, full * each, rows % each).unsqueeze(0)


class _UnderWay:
    """Collectives that were begun, in order."""

    def __init__(self) -> None:
        self._begun: deque[tuple[Any, Tensor, Tensor]] = deque()

    def add(self, work: Any, target: Tensor, result: Tensor) -> None:
        """Args: result: what the collective writes; target: where it is wanted, the same memory or another."""
        if len(self._begun) == _UNDER_WAY:
            self._finish_first()
        self._begun.append((work, target, result))

    def finish(self) -> None:
        while self._begun:
            self._finish_first()

    def _finish_first(self) -> None:
        work, target, result = self._begun.popleft()
        work.wait()
        if result.data_ptr() != target.data_ptr():
            target.copy_(result)


def _split(whole: Tensor) -> list[Tensor]:
    each = BUCKET_BYTES // whole.element_size()
    return [whole[start : start + each] for start in range(0, len(whole), each)]
