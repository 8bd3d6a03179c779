"""Exchanges: the agreement of processes before a window closes, the sums over all of them, and the norm.

`select` chooses an optimizer's exchange: none (`Alone`), sums over a process group (`Summed`), or gradients that are
means over processes already (`Means`), as those of DTensors are.

Only a process with parameters that had no gradient waits for a GPU. It asks whether others had one, because its host
must then step these parameters too. Frozen parameters ask for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.arena import padded, travels
from accumfused.core.plan import Plan
from accumfused.core.protocol import Agreement, Exchange, Segments
from accumfused.core.rounding import begin
from accumfused.core.rows import Row
from accumfused.distributed.groups import default_seed, has_processes, refuse_sharded
from accumfused.distributed.likeness import NUMBERS, Likeness
from accumfused.distributed.wrapping import Wrappers
from accumfused.formats import codecs
from accumfused.formats.numeric import chunk_count, ieee, sum_partials, sum_segments
from accumfused.settings import Settings

BUNDLED_BYTES = 2 * 2**20  # accumulators below this travel together; larger ones have collectives of their own
_PIECE_BYTES = 32 * 2**20  # the most that one collective sends
_UNDER_WAY = 4  # collectives at a time
_SHORTEST = 1024  # numbers of the message of a window that ends
_HEADER = 4 + NUMBERS  # of these before the flags of parameters

Kinds = list[tuple[tuple[Any, ...], Tensor | None]]  # process groups that shard parameters; a mask of their chunks


def select(settings: Settings, plan: Plan, previous: Exchange | None) -> Exchange:
    """Chooses the exchange for a plan's gradients; `previous` is that of the plan before."""
    refuse_sharded(plan.params)
    if settings.norm_group is not None and plan.is_spread:
        raise RuntimeError(
            "parameters are DTensors, whose norm is one over all processes already; leave norm_group out"
        )
    exchange: Processes = Alone()
    if settings.process_group is not None:
        if isinstance(previous, Summed) and previous.group is settings.process_group:
            return previous  # it remembers on what all processes agreed
        exchange = Summed(settings, plan.params)
    elif plan.is_spread or settings.grads_are_reduced:
        if isinstance(previous, Means) and previous.has_means:
            return previous
        exchange = Means(settings, plan.params)
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
    """Gradients are means over processes before they are folded: DTensors', or with grads_are_reduced=True.

    Args:
        params: the optimizer's.
    """

    def __init__(self, settings: Settings, params: list[Tensor]) -> None:
        self.has_means = has_processes()
        self.is_alone = not self.has_means
        self._settings = settings
        self._likeness: Likeness | None = None
        self._wrappers = Wrappers(params if settings.grads_are_reduced else ())
        self._wrappers.watch()
        self._kinds: WeakKeyDictionary[Plan, Kinds] = WeakKeyDictionary()

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        if self.has_means and weight is not None and not in_loss:
            raise RuntimeError(
                "the gradients are means over processes already (DTensors, or grads_are_reduced=True), and a weight "
                "would come too late; call optimizer.backward(loss, weight=...) in place of loss.backward() and "
                "accumulate(weight)"
            )
        self._wrappers.refuse_unsynchronized()
        if has_processes() and not self._settings.grads_are_reduced:
            _refuse_unreduced(plan)

    def agree(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, seed: int, last: bool
    ) -> Agreement | None:
        """Agrees on the mean of all processes' weights.

        Raises:
            ValueError: on every process of a mesh, if the parameters or settings of some differ, or did in the last
                window. (Without DTensors each process may have parameters of its own.)
        """
        if not self.has_means:
            return None
        if plan.is_spread:
            self._likeness = self._likeness or Likeness(*_processes(plan))
            self._likeness.describe(plan, self._settings, [p.requires_grad for p in plan.params], seed)
            if self._likeness.have_differed():
                self._likeness.compare()
        return Agreement(_mean_of_totals(plan, total, is_weighted, self._likeness), [False] * len(present))

    def total(self, plan: Plan, total: float | Tensor, is_weighted: bool | None) -> float | Tensor:
        """Takes the mean over processes, the divisor for sums of such gradients."""
        return _mean_of_totals(plan, total, is_weighted) if self.has_means and is_weighted else total

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


def reads_at_once(device: torch.device) -> bool:
    """Whether the host may read a number at once, because it waits for nothing."""
    return device.type == "cpu"


def _refuse_unreduced(plan: Plan) -> None:
    """Refuses plain parameters whose gradients nothing would reduce. Frozen ones pass."""
    if any(row.shard is None and row.param.requires_grad for row in plan.rows):
        raise RuntimeError(
            "there is more than one process, and accumulate() takes gradients out of the reach of "
            "DistributedDataParallel; call accumfused.attach_ddp(ddp, optimizer), without a DDP give the optimizer "
            "process_group=, or say grads_are_reduced=True if every micro-batch's gradients are reduced already, "
            "and none of it is within no_sync()"
        )


@dataclass
class Layout:
    """The memory of the sums of an optimizer, as all processes add it up: `Arena.memory_of` lists it."""

    wire_dtype: torch.dtype | None = None  # in which fp32 travels
    bundles: list[tuple[torch.dtype, int]] = field(default_factory=list)  # with their elements
    rows: list[tuple[torch.dtype, int] | None] = field(default_factory=list)  # None: in a bundle, or frozen

    @classmethod
    def of(cls, plan: Plan, settings: Settings) -> Layout:
        """Returns the layout of a plan's sums."""
        bundles: dict[tuple[torch.device, torch.dtype], int] = {}
        rows: list[tuple[torch.dtype, int] | None] = []
        for row in plan.rows:
            numel, key = row.tensor.numel(), (row.sum_device, row.sum_dtype)
            if travels(row):
                bundles[key] = bundles.get(key, 0) + padded(numel)
            rows.append((row.sum_dtype, numel) if row.param.requires_grad and not row.is_bundled else None)
        return cls(settings.reduce_dtype, [(dtype, numel) for (_, dtype), numel in bundles.items()], rows)

    def stand_ins(self, used: Sequence[bool], device: torch.device) -> list[Tensor]:
        """Makes memory of the same sizes, for a process whose own parameters are others.

        Args:
            used: flags rows with a sum in some process.
        """
        if True not in used:
            return []
        sent = [*self.bundles, *(row for row, is_used in zip(self.rows, used, strict=False) if row and is_used)]
        longest = {dtype: max(numel for other, numel in sent if other == dtype) for dtype, _ in sent}
        memory = {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in longest.items()}
        return [memory[dtype][:numel] for dtype, numel in sent]


class Summed(Processes):
    """The accumulators of all processes are added up.

    Args:
        params: the optimizer's.
    """

    adds_up = True
    is_alone = False

    def __init__(self, settings: Settings, params: list[Tensor]) -> None:
        self.bundled_bytes = BUNDLED_BYTES
        self.group: Any = settings.process_group
        self.size: int = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._settings = settings
        # What all processes have agreed on, whatever becomes of this one's parameters: so their messages meet.
        self._likeness = Likeness([self.group], self.size)
        self._layout = Layout()
        self._wrappers = Wrappers(params)
        self._roundings: Tensor | None = None  # int64, shape []: a word as those of `SumNoise`

    @property
    def _length(self) -> int:
        """Of the message: a power of two, so that it seldom changes with the number of parameters."""
        return max(_SHORTEST, 1 << (_HEADER + len(self._layout.rows) - 1).bit_length())

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        self._wrappers.refuse_joined()
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
            ValueError: on every process, if the parameters or settings of some differ, or did in the last window.
            RuntimeError: a frozen parameter has a gradient (ValueError if others have none).
        """
        self._wrappers.refuse_joined()
        likeness = self._likeness
        marks = [p.requires_grad or (here and "a gradient") for p, here in zip(plan.params, present, strict=True)]
        likeness.describe(plan, self._settings, marks, seed)
        if not likeness.is_agreed or likeness.have_differed():
            likeness.compare()
            self._layout = Layout.of(plan, self._settings)
        message = torch.zeros(self._length, dtype=torch.float64, device=plan.device)
        weights, weighted, unweighted, closed = message[: _HEADER - NUMBERS].unbind()
        weights += total  # not assigned: to assign a number would wait for a GPU
        weighted.fill_(is_weighted is True)
        unweighted.fill_(is_weighted is False)
        closed.fill_(last)
        likeness.write(message[_HEADER - NUMBERS : _HEADER])
        flags = message[_HEADER : _HEADER + len(present)]
        flags.fill_(1.0)
        zeros = [flag for flag, here in zip(flags.unbind(), present, strict=False) if not here]
        if zeros:
            torch._foreach_zero_(zeros)  # to copy flags from the host would wait for a GPU
        dist.all_reduce(message, group=self.group)
        differ = likeness.read(message[_HEADER - NUMBERS : _HEADER])
        if reads_at_once(plan.device) and likeness.have_differed():
            likeness.compare()
        if likeness.has_changed:
            if bool(differ):  # the others may not know it yet: they go on, and add up
                stand_ins = self._layout.stand_ins((message[_HEADER:] > 0).tolist(), plan.device)
                return Agreement(torch.full_like(weights, torch.nan), [False] * len(present), stand_ins=stand_ins)
            likeness.agree()
            self._layout = Layout.of(plan, self._settings)
            if len(flags) < len(present):
                return self.agree(plan, total, is_weighted, present, seed=seed, last=last)
        if "a gradient" in marks:
            raise RuntimeError(
                "a parameter that requires no gradient has one, and other processes may have none; freeze "
                "parameters between windows, and set their p.grad to None"
            )
        number = torch.full_like(weights, float(self.size))
        divisor = torch.where(unweighted == 0, weights, torch.where(weighted == 0, number, torch.nan))
        divisor = torch.where(differ, torch.nan, divisor)
        others_close = closed > 0 if is_weighted is None else None
        if is_weighted is not None:
            divisor = torch.where((closed == 0) | (closed == weighted + unweighted), divisor, torch.nan)
        missing = [p.requires_grad and not here for p, here in zip(plan.params, present, strict=True)]
        if True in missing:
            elsewhere = (flags > 0).tolist()
            missing = [lacks and there for lacks, there in zip(missing, elsewhere, strict=True)]
        return Agreement(divisor, missing, others_close)

    def add_up(self, flats: Iterable[Tensor]) -> None:
        """Replaces these flat tensors by their sums over all processes, piece by piece in memory order.

        fp32 ones may travel in another dtype. bf16 ones travel in fp32, unless `reduce_dtype` is bf16, and their sums
        are rounded with the same noise in all processes.
        """
        transfers, wire_dtype = deque[tuple[Any, Tensor, Tensor]](), self._layout.wire_dtype

        def finish_first() -> None:
            work, piece, wire = transfers.popleft()
            work.wait()
            if piece.dtype is torch.bfloat16 and wire is not piece:
                wire = self._rounded(wire)
            if wire is not piece:
                piece.copy_(wire)

        for flat in flats:
            length = _PIECE_BYTES // flat.element_size()
            for start in range(0, len(flat), length):
                if len(transfers) == _UNDER_WAY:
                    finish_first()
                piece = flat[start : start + length]
                wire = piece
                if piece.dtype in (torch.float32, torch.bfloat16):
                    wire = piece.to(wire_dtype or torch.float32)
                transfers.append((dist.all_reduce(wire, group=self.group, async_op=True), piece, wire))
        while transfers:
            finish_first()

    def _rounded(self, values: Tensor) -> Tensor:
        """Rounds fp32 sums to bf16, stochastically; the count of these calls, on the device, is the noise's."""
        if self._roundings is None or self._roundings.device != values.device:
            graphs.refuse_new_tensors({values.device})
            seed = self._settings.rounding_seed
            self._roundings = begin(default_seed() if seed is None else seed, 1).to(values.device)[0]
        noise = codecs.noise(codecs.mix(self._roundings), len(values))
        self._roundings.add_(1)
        return codecs.to_bfloat16_stochastic(values, noise)


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


def _processes(plan: Plan) -> tuple[list[Any], int]:
    """Returns the process groups of the parameters' (largest) mesh, or that of all, and the number of processes."""
    meshes = [row.shard.mesh for row in plan.rows if row.shard is not None]
    mesh = max(meshes, key=lambda mesh: mesh.size()) if meshes else None
    if mesh is None:
        return [dist.group.WORLD], dist.get_world_size()
    return [mesh.get_group(dim) for dim in range(mesh.ndim)], mesh.size()


def _mean_of_totals(
    plan: Plan, total: float | Tensor, is_weighted: bool | None, likeness: Likeness | None = None
) -> Tensor:
    """Takes the mean of windows' weights over processes. It divides sums of gradients that are means over them.

    Returns:
        fp64, shape []: 1 without weights, and NaN if some processes have weights and some have not, or if they differ.
    """
    groups, size = _processes(plan)
    message = torch.zeros(3 if likeness is None else 3 + NUMBERS, dtype=torch.float64, device=plan.device)
    weights, weighted, unweighted = message[:3].unbind()
    weights += total
    weighted.fill_(is_weighted is True)
    unweighted.fill_(is_weighted is False)
    if likeness is not None:
        likeness.write(message[3:])
    for group in groups:
        dist.all_reduce(message, group=group)
    mean = weights / size
    mean = torch.where(unweighted == 0, mean, torch.where(weighted == 0, torch.ones_like(mean), torch.nan))
    if likeness is None:
        return mean
    differ = likeness.read(message[3:])
    if reads_at_once(plan.device) and likeness.have_differed():
        likeness.compare()
    return torch.where(differ, torch.nan, mean)
