"""Exchanges: the agreement of processes before a window closes, the sums over all of them, and the norm.

`select` chooses an optimizer's exchange: none (`Alone`), sums over a process group (`Summed`), or gradients that are
means over processes already (`Means`), as those of DTensors are.

Only a process with parameters that had no gradient waits for a GPU. It asks whether others had one, because its host
must then step these parameters too. Frozen parameters ask for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.protocol import Agreement, Exchange, Segments
from accumfused.core.rows import Row
from accumfused.distributed.groups import has_processes, refuse_sharded
from accumfused.formats.kinds import SEED
from accumfused.formats.numeric import chunk_count, ieee, sum_partials, sum_segments
from accumfused.settings import Settings

BUNDLED_BYTES = 2 * 2**20  # accumulators below this travel together; larger ones have collectives of their own
_PIECE_BYTES = 32 * 2**20  # the most that one collective sends
_UNDER_WAY = 4  # collectives at a time

Kinds = list[tuple[tuple[Any, ...], Tensor | None]]  # process groups that shard parameters; a mask of their chunks


def select(settings: Settings, plan: Plan, previous: Exchange | None) -> Exchange:
    """Chooses the exchange for a plan's gradients; `previous` is that of the plan before."""
    refuse_sharded(plan.params)
    if settings.norm_group is not None and plan.is_spread:
        raise RuntimeError(
            "parameters are DTensors, whose norm is one over all processes already; leave norm_group out"
        )
    group, exchange = settings.process_group, Alone()  # type: Any, Processes
    if group is not None:
        if isinstance(previous, Summed) and previous.serves(group, settings.reduce_dtype):
            return previous  # it remembers the parameters on which all processes agreed
        exchange = Summed(group, settings.reduce_dtype, bool(settings.noise_scale))
    elif plan.is_spread or settings.grads_are_reduced:
        exchange = Means(settings)
    exchange.norm_group = settings.norm_group
    return exchange


class Processes(Exchange):
    """Gradients, or their norm, may be those of several processes."""

    norm_group: Any = None

    def shares_norm(self, plan: Plan) -> bool:
        """Whether parameters are sharded, or other processes have more of them."""
        return plan.is_spread or self.norm_group is not None

    def found_inf(self, found_inf: Tensor | None) -> Tensor | None:
        """Combines a scaler's flag over all processes that share the norm."""
        if self.norm_group is None or found_inf is None:
            return found_inf
        flag = found_inf.clone()
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.norm_group)
        return flag

    def sums_of_squares(self, plan: Plan, partials: Sequence[Tensor]) -> Tensor:
        """Adds up sums of squares over the processes of `norm_group`."""
        sums = super().sums_of_squares(plan, partials)
        if self.norm_group is not None:
            dist.all_reduce(sums, group=self.norm_group)
        return sums


class Alone(Processes):
    """No exchange: this process has all gradients."""

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        if has_processes() and self.norm_group is None:  # which says that the gradients are whole
            _refuse_unreduced(plan)


class Means(Processes):
    """Gradients are means over processes before they are folded: DTensors', or with grads_are_reduced=True."""

    def __init__(self, settings: Settings) -> None:
        self.has_means = has_processes()
        self.is_alone = not self.has_means
        self._all_are = settings.grads_are_reduced
        self._kinds: WeakKeyDictionary[Plan, Kinds] = WeakKeyDictionary()

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        if self.has_means and weight is not None and not in_loss:
            raise RuntimeError(
                "the gradients are means over processes already (DTensors, or grads_are_reduced=True), and a weight "
                "would come too late; call optimizer.backward(loss, weight=...) in place of loss.backward() and "
                "accumulate(weight)"
            )
        if has_processes() and not self._all_are:
            _refuse_unreduced(plan)

    def agree(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, seed: int, last: bool
    ) -> Agreement | None:
        """Agrees on the mean of all processes' weights."""
        if not self.has_means:
            return None
        return Agreement(mean_of_totals(plan, total, is_weighted), [False] * len(present))

    def total(self, plan: Plan, total: float | Tensor, is_weighted: bool | None) -> float | Tensor:
        """Takes the mean over processes, the divisor for sums of such gradients."""
        return mean_of_totals(plan, total, is_weighted) if self.has_means and is_weighted else total

    def sums_of_squares(self, plan: Plan, partials: Sequence[Tensor]) -> Tensor:
        """Adds up sums of squares over all shards, by one all-reduce of a few numbers for each dimension of a mesh.

        One NaN or inf anywhere makes a sum non-finite.
        """
        if not plan.is_spread:
            return super().sums_of_squares(plan, partials)
        if plan not in self._kinds:
            self._kinds[plan] = _kinds(plan)
        kinds = self._kinds[plan]
        parts = [[sum_partials(p if m is None else torch.where(m, p, 0.0)) for p in partials] for _, m in kinds]
        sums = torch.stack([torch.stack(part) for part in parts])
        _all_reduce([groups for groups, _ in kinds], sums)
        return sums.sum(0)

    def segment_norms(self, plan: Plan, partials: Tensor, segments: Segments) -> Tensor:
        """Adds up the segments' sums of squares over the shards of all processes."""
        if not plan.is_spread:
            return super().segment_norms(plan, partials, segments)
        squares = plan.backend.segment_norms(plan, partials, segments.row_bounds)
        _all_reduce([() if row.shard is None else row.shard.groups for row in plan.rows], squares)
        if segments.first_rows is None:
            return squares
        with ieee():
            return sum_segments(squares, segments.first_rows)


def _refuse_unreduced(plan: Plan) -> None:
    """Refuses plain parameters whose gradients nothing would reduce. Frozen ones pass."""
    if any(row.shard is None and row.param.requires_grad for row in plan.rows):
        raise RuntimeError(
            "there is more than one process, and accumulate() takes gradients out of the reach of "
            "DistributedDataParallel; call accumfused.attach_ddp(ddp, optimizer), without a DDP give the optimizer "
            "process_group=, or say grads_are_reduced=True if every micro-batch's gradients are reduced already"
        )


class Summed(Processes):
    """The accumulators of all processes are added up.

    Args:
        group: torch.distributed.ProcessGroup.
        wire_dtype: the dtype in which gradients travel; None: the accumulators' own.
        measures: the noise scale is measured, whose numbers travel with the sums.
    """

    adds_up = True
    is_alone = False

    def __init__(self, group: Any, wire_dtype: torch.dtype | None, measures: bool) -> None:
        self.bundled_bytes = BUNDLED_BYTES
        self.group = group
        self.size: int = dist.get_world_size(group)
        self._wire_dtype = wire_dtype
        self._measures = measures
        self._agreed_params: list[tuple[Any, ...]] = []  # by what tells one from another

    def serves(self, group: Any, wire_dtype: torch.dtype | None) -> bool:
        """Whether this is the exchange for these settings."""
        return self.group is group and self._wire_dtype is wire_dtype

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        if plan.is_spread and has_processes():
            raise RuntimeError(
                "gradients of DTensors are reduced already; leave process_group to optimizers of plain parameters"
            )

    def agree(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, seed: int, last: bool
    ) -> Agreement | None:
        """Agrees on the window's divisor, once its sums are added up, and on the parameters with a gradient.

        Args:
            total: the sum of this process's weights.
            is_weighted: None: this process had no micro-batch.
            present: flags parameters with a gradient here.
            last: this process closes its window: it divides the sums before its step.

        Returns:
            The agreement. Its divisor is the sum of all weights, or without weights the number of processes (a mean
            over them, as DDP takes); NaN if some processes have weights, or close with last=True, and some do not.

        Raises:
            ValueError: on every process, if the parameters of some differ.
            RuntimeError: a frozen parameter has a gradient.
        """
        self._compare_parameters(plan, seed)
        if any(here and not p.requires_grad for p, here in zip(plan.params, present, strict=True)):
            raise RuntimeError(
                "a parameter that requires no gradient has one, and other processes may have none; freeze "
                "parameters between windows, and set their p.grad to None"
            )
        message = torch.zeros(4 + len(present), dtype=torch.float64, device=plan.device)
        weights, weighted, unweighted, closed = message[:4].unbind()
        weights += total  # not assigned: to assign a number would wait for a GPU
        weighted.fill_(is_weighted is True)
        unweighted.fill_(is_weighted is False)
        closed.fill_(last)
        message[4:].fill_(1.0)
        zeros = [flag for flag, here in zip(message[4:].unbind(), present, strict=True) if not here]
        if zeros:
            torch._foreach_zero_(zeros)  # to copy flags from the host would wait for a GPU
        dist.all_reduce(message, group=self.group)
        number = torch.full_like(weights, float(self.size))
        divisor = torch.where(unweighted == 0, weights, torch.where(weighted == 0, number, torch.nan))
        others_close = closed > 0 if is_weighted is None else None
        if is_weighted is not None:
            divisor = torch.where((closed == 0) | (closed == weighted + unweighted), divisor, torch.nan)
        missing = [p.requires_grad and not here for p, here in zip(plan.params, present, strict=True)]
        if True in missing:
            elsewhere = (message[4:] > 0).tolist()
            missing = [lacks and there for lacks, there in zip(missing, elsewhere, strict=True)]
        return Agreement(divisor, missing, others_close)

    def _compare_parameters(self, plan: Plan, seed: int) -> None:
        """Refuses parameters, and seeds, that differ from those of other processes; asks once for each list of them."""
        params = plan.params
        agreed = [(id(p), p.shape, p.dtype, p.requires_grad) for p in params]  # an address may come back, with others
        if agreed == self._agreed_params:
            return
        seeds = [int(row.entries.get(SEED, seed)) for row in plan.rows]
        description = [
            (
                tuple(p.shape), tuple(p.stride()), str(p.dtype), p.requires_grad, row.form.needs_noise and seed,
                self._measures,
            )
            for p, row, seed in zip(params, plan.rows, seeds, strict=True)
        ]  # fmt: skip
        every: list[list[Any]] = [[]] * self.size
        dist.all_gather_object(every, description, group=self.group)
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
                        "strides, dtype, requires_grad, seed of its noise if there is any, noise_scale); give every "
                        "optimizer the same parameters in the same order, and the same rounding_seed and noise_scale"
                    )
        self._agreed_params = agreed

    def add_up(self, flats: Iterable[Tensor]) -> None:
        """Replaces these flat tensors by their sums over all processes, piece by piece in memory order.

        Only fp32 ones travel in another dtype.
        """
        transfers = deque[tuple[Any, Tensor, Tensor]]()

        def finish_first() -> None:
            work, piece, wire = transfers.popleft()
            work.wait()
            if wire is not piece:
                piece.copy_(wire)

        for flat in flats:
            length = _PIECE_BYTES // flat.element_size()
            for start in range(0, len(flat), length):
                if len(transfers) == _UNDER_WAY:
                    finish_first()
                piece = flat[start : start + length]
                casts = self._wire_dtype is not None and piece.dtype == torch.float32
                wire = piece.to(self._wire_dtype) if casts else piece
                transfers.append((dist.all_reduce(wire, group=self.group, async_op=True), piece, wire))
        while transfers:
            finish_first()


def _all_reduce(groups_of: list[tuple[Any, ...]], squares: Tensor) -> None:
    """Adds up each number, or row of numbers, over its process groups, in place."""
    for group in dict.fromkeys(group for groups in groups_of for group in groups):
        which = [index for index, groups in enumerate(groups_of) if group in groups]
        if len(which) == len(groups_of):
            dist.all_reduce(squares, group=group)
            continue
        part = torch.stack([squares[index] for index in which])
        dist.all_reduce(part, group=group)
        for index, value in zip(which, part, strict=True):
            squares[index].copy_(value)


def _kinds(plan: Plan) -> Kinds:
    rows_of: dict[tuple[Any, ...], list[Row]] = {}
    for row in plan.rows:
        if row.tensor.numel() or row.shard is not None:
            rows_of.setdefault(() if row.shard is None else row.shard.groups, []).append(row)
    masks: list[Tensor | None] = [None] * len(rows_of)
    for index, rows in enumerate(rows_of.values() if len(rows_of) > 1 else ()):
        mask = torch.zeros(plan.chunks, dtype=torch.bool, device="cpu")
        for row in rows:
            mask[row.first_chunk : row.first_chunk + chunk_count(row.tensor.numel())] = True
        masks[index] = mask.to(plan.device)
    return list(zip(rows_of, masks, strict=True))


def mean_of_totals(plan: Plan, total: float | Tensor, is_weighted: bool | None) -> Tensor:
    """Takes the mean of windows' weights over the processes of the parameters' (largest) mesh, or over all.

    It divides sums of gradients that are means over processes.

    Returns:
        fp64, shape []: 1 without weights, and NaN if some processes have weights and some have not.
    """
    meshes = [row.shard.mesh for row in plan.rows if row.shard is not None]
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
