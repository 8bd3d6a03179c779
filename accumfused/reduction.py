"""What processes tell each other: gradients and weights of a window, sums of squares, slices of parameters.

The collectives are torch.distributed's. Nothing here waits for a GPU, but a process in which parameters had no gradient
asks whether others had one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accumfused import distributed, shards
from accumfused.arena import flat
from accumfused.numeric import chunk_count, sum_partials
from accumfused.plan import Grads, Plan

BUCKET_BYTES = 32 * 2**20
_UNDER_WAY = 4  # buckets

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Reduction:
    """Args: group: torch.distributed.ProcessGroup; wire_dtype: in which gradients travel, None: as they are."""

    def __init__(self, group: Any, wire_dtype: torch.dtype | None) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.scatters = (
            dist.get_backend(group) != dist.Backend.GLOO
        )  # which does it by adding up everything, and copies
        self._wire_dtype = wire_dtype
        self._agreed: list[tuple[Tensor, bool]] = []  # on these parameters, and whether each requires a gradient

    def agree(self, plan: Plan, seed: int) -> None:
        """Refuses parameters that are not those of the other processes; asks once for each list of them.

        Args:
            seed: of states that are not made yet.

        Raises:
            ValueError: on every process.
        """
        params, known = plan.params, self._agreed
        if len(params) == len(known) and all(
            p is own and p.requires_grad is wants for p, (own, wants) in zip(params, known, strict=True)
        ):
            return
        distributed.refuse_reducing(params)
        made = [None if storage is None else storage.seed for storage in plan.storages]
        seeds = [seed if value is None else int(value) for value in made]
        own = [
            (tuple(p.shape), tuple(p.stride()), str(p.dtype), p.requires_grad, form.rounds_updates and seed)
            for p, form, seed in zip(params, plan.formats, seeds, strict=True)
        ]
        every: list[list[Any]] = [[]] * self.size
        dist.all_gather_object(every, own, group=self.group)
        for rank, other in enumerate(every):
            if len(other) != len(every[0]):
                raise ValueError(
                    f"process {rank} of the group has {len(other)} parameters in this optimizer, process 0 has "
                    f"{len(every[0])}; build the same model and optimizer in each"
                )
            for index, (first, there) in enumerate(zip(every[0], other, strict=True)):
                if first != there:
                    raise ValueError(
                        f"parameter {index} is {there} in process {rank} of the group and {first} in process 0 (shape, "
                        "strides, dtype, requires_grad, seed of its noise if there is any); give every optimizer "
                        "the same parameters in the same order, and the same rounding_seed"
                    )
        self._agreed = [(param, param.requires_grad) for param in params]

    def exchange(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, last: bool
    ) -> tuple[Tensor, list[bool]]:
        """What a window is divided by once its sums are added up, and which parameters have a gradient somewhere.

        Args:
            total: of this process's weights.
            is_weighted: None: this process had no micro-batch.
            present: which parameters have a gradient here.
            last: this process divides its sums before they are added up, not after that.

        Returns:
            The sum of all weights, or without weights the number of processes (a mean over them, as DDP takes): fp64,
            shape []; NaN if some have weights or close with last=True, and some do not; 1 for a process without
            micro-batches whose others have divided. And which parameters have a gradient elsewhere only.
        """
        message = torch.zeros(4 + len(present), dtype=torch.float64, device=plan.device)
        weights, weighted, unweighted, closed = message[:4].unbind()
        weights += total  # filled, not assigned: assigning a number waits for a GPU
        weighted.fill_(is_weighted is True)
        unweighted.fill_(is_weighted is False)
        closed.fill_(last)
        if all(present):
            message[4:].fill_(1.0)
        else:
            message[4:].copy_(torch.tensor(present))
        dist.all_reduce(message, group=self.group)
        number = torch.full_like(weights, float(self.size))
        divisor = torch.where(unweighted == 0, weights, torch.where(weighted == 0, number, torch.nan))
        if is_weighted is None:
            divisor = torch.where(closed > 0, 1.0, divisor)
        else:
            divisor = torch.where((closed == 0) | (closed == weighted + unweighted), divisor, torch.nan)
        asked = [p.requires_grad and not here for p, here in zip(plan.params, present, strict=True)]
        if True not in asked:
            return divisor, asked
        elsewhere = (message[4:] > 0).tolist()
        return divisor, [there and ask for there, ask in zip(elsewhere, asked, strict=True)]

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


def sum_of_squares(plan: Plan, partials: Tensor) -> Tensor:
    """Over all parameters, added up over the processes between which each is cut: fp64, shape [], the same in all.

    One all-reduce of a few numbers for each dimension of a mesh. A NaN or inf anywhere makes it one.
    """
    if plan.kinds is None:
        plan.kinds = _kinds(plan)
    kinds = [groups for groups, _ in plan.kinds]
    total = torch.stack([sum_partials(partials if m is None else torch.where(m, partials, 0.0)) for _, m in plan.kinds])
    for group in dict.fromkeys(group for groups in kinds for group in groups):
        which = [index for index, groups in enumerate(kinds) if group in groups]
        if len(which) == len(kinds):
            dist.all_reduce(total, group=group)
            continue
        part = torch.stack([total[index] for index in which])
        dist.all_reduce(part, group=group)
        for index, value in zip(which, part, strict=True):
            total[index].copy_(value)
    return total.sum()


def _kinds(plan: Plan) -> list[tuple[tuple[Any, ...], Tensor | None]]:
    """Process groups between which parameters are cut, and the chunks of those that are cut between these."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for row, shard in enumerate(plan.shards):
        if plan.tensors[row].numel() or shard is not None:
            rows.setdefault(() if shard is None else shard.groups, []).append(row)
    masks: list[Tensor | None] = [None] * len(rows)
    for index, own in enumerate(rows.values() if len(rows) > 1 else ()):
        mask = torch.zeros(plan.chunks, dtype=torch.bool, device="cpu")
        for row in own:
            first = plan.first_chunk[row]
            mask[first : first + chunk_count(plan.tensors[row].numel())] = True
        masks[index] = mask.to(plan.device)
    return list(zip(rows, masks, strict=True))


def mean_of_totals(plan: Plan, total: float | Tensor, is_weighted: bool | None) -> Tensor:
    """The mean of windows' weights over all processes of the parameters' (largest) mesh, or over all: fp64, shape [].

    Where gradients are means over processes, this is what their sum is divided by. 1 without weights, and NaN where
    some have weights and some have not.
    """
    meshes = [shard.mesh for shard in plan.shards if shard is not None]
    mesh = max(meshes, key=lambda mesh: mesh.size()) if meshes else None
    groups = [dist.group.WORLD] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    size = dist.get_world_size() if mesh is None else mesh.size()
    message = torch.zeros(3, dtype=torch.float64, device=plan.device)
    weights, weighted, unweighted = message.unbind()
    weights += total
    weighted.fill_(is_weighted is True)
    unweighted.fill_(is_weighted is False)
    for group in groups:
        dist.all_reduce(message, group=group)
    mean = weights / size
    return torch.where(unweighted == 0, mean, torch.where(weighted == 0, torch.ones_like(mean), torch.nan))
