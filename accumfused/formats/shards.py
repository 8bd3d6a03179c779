"""Sharded parameters: DTensors (`fully_shard`, tensor parallelism); each process holds one shard.

Kernels work on the shard, a plain tensor; the optimizer's state has DTensors with the parameter's placement.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from accumfused.formats.codecs import BLOCK


def is_dtensor(value: Any) -> bool:
    """Whether `value` is a DTensor. The check imports nothing: a process with a DTensor has imported the class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def initialized(tensor: Any) -> Any:
    """The memory of a lazy module's parameter, which is empty as long as nobody knows its shape; others unchanged."""
    return tensor.data if is_lazy(tensor) else tensor


def local(tensor: Any) -> Any:
    """This process's shard of a DTensor, always the same object; any other value unchanged, if it is initialized."""
    return tensor._local_tensor if is_dtensor(tensor) else initialized(tensor)


@dataclass(frozen=True)
class Shard:
    """The place of a process's shard in the whole parameter."""

    mesh: Any  # torch.distributed.device_mesh.DeviceMesh
    placements: tuple[Any, ...]  # one for each dimension of the mesh
    shape: torch.Size  # of the whole
    stride: tuple[int, ...]
    part_shape: tuple[int, ...]
    offset: tuple[int, ...]  # index of the shard's first element, in each dimension
    origin: int  # index of the shard's first element in memory order, for the rounding noise
    groups: tuple[Any, ...]  # process groups whose members hold different shards

    def whole(self, part: Tensor) -> Tensor:
        """A DTensor with the parameter's placement, from a shard of the same shape (or rows, with other columns)."""
        from torch.distributed.tensor import DTensor

        if part.dim() == 0:
            return part
        shape, stride = self.shape, self.stride
        if part.shape != self.part_shape:
            shape = torch.Size((self.shape[0], *part.shape[1:])) if self.groups else part.shape
            stride = torch.empty(shape, device="meta").stride()
        whole: Tensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        return whole

    def part(self, name: str, value: Tensor) -> Tensor:
        """This process's shard of a state, which comes as a DTensor or as a whole tensor.

        Raises:
            RuntimeError: the DTensor has another placement than the parameter.
        """
        if not is_dtensor(value):
            if value.dim() == 0 or value.shape == self.part_shape or value.shape[:1] != self.shape[:1]:
                return value
            for dim in range(value.dim() if value.shape == self.shape else 1):
                value = value.narrow(dim, self.offset[dim], self.part_shape[dim])
            return value.clone()  # the rest need not live on
        spec: Any = value
        if spec.device_mesh != self.mesh or spec.placements != self.placements:
            raise RuntimeError(
                f"state {name!r} is placed as {spec.placements} on {spec.device_mesh}, its parameter as "
                f"{self.placements} on {self.mesh}; load checkpoints by torch.distributed.checkpoint, which moves them"
            )
        return local(value)  # type: ignore[no-any-return]

    def parts(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter as shards, for `state_of` and the kernels."""
        return {name: self.part(name, value) if isinstance(value, Tensor) else value for name, value in entries.items()}

    def wholes(self, parts: Mapping[str, Any], entries: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
        """The state with these shards, of `entries` what has them already; `wanted` holds the names of our own."""
        wholes = dict[str, Any]()
        for name, part in parts.items():
            known = entries.get(name)
            is_known = local(known) is part and not (name in wanted and _lacks_place(known))
            wholes[name] = known if is_known else self.whole(part) if isinstance(part, Tensor) else part
        return wholes

    def has_placed(self, entries: Mapping[str, Any], wanted: Sequence[str]) -> bool:
        """Whether the whole state has the parameter's placement; a checkpoint of one process loads plain tensors."""
        return not any(_lacks_place(entries.get(name)) for name in wanted)


def _lacks_place(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not is_dtensor(value)


def replicated(value: Tensor) -> Tensor:
    """A DTensor's full value, the same on all processes, as a plain tensor; it holds one number."""
    whole: Any = value
    return whole.full_tensor() if is_dtensor(value) else value


def shard_of(param: Tensor) -> Shard | None:
    """The place of this process's shard in a parameter; None if the parameter is a plain tensor.

    Raises:
        RuntimeError: the DTensor's placement is a pending sum, or its mesh has no process groups.
    """
    if not is_dtensor(param):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = param
    mesh, placements = spec.device_mesh, tuple(spec.placements)
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(
            f"a parameter is placed as {placements}: a sum that is pending; put "
            "Parameter(param.detach().redistribute(...)) in its place"
        )
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    try:
        groups = tuple(mesh.get_group(dim) for dim in cut)
    except (RuntimeError, KeyError, IndexError) as error:
        raise RuntimeError(
            f"a parameter is on {mesh}, which has no process groups ({error}); make it by init_device_mesh()"
        ) from error
    shape, offset = compute_local_shape_and_global_offset(param.shape, mesh, placements)
    origin = 0
    if cut:
        row = math.prod(param.shape[1:])
        if all(type(placements[dim]).__name__ == "Shard" and placements[dim].dim == 0 for dim in cut) and (
            param.stride(0) == row
        ):
            origin = offset[0] * row
        else:  # the shard is no run of memory: each process has its own noise
            place = 0
            for dim in cut:
                place = place * mesh.size(dim) + mesh.get_local_rank(dim)
            origin = place * param.numel()
    return Shard(mesh, placements, param.shape, tuple(param.stride()), tuple(shape), tuple(offset), origin, groups)


def owned(param: Tensor, shard: Shard | None) -> Tensor:
    """The tensor of this process's shard of a parameter."""
    return initialized(param) if shard is None else local(param).detach()  # type: ignore[no-any-return]


def keeps_blocks(param: Tensor) -> bool:
    """Whether sharding keeps the blocks of 8-bit states: it cuts only between rows that whole blocks make up."""
    if not is_dtensor(param):
        return True
    spec: Any = param
    cuts = [placement for placement in spec.placements if not placement.is_replicate()]
    return not cuts or (all(getattr(cut, "dim", None) == 0 for cut in cuts) and has_block_rows(param))


def has_block_rows(param: Tensor) -> bool:
    """Whether each index of the first dimension is a run of whole blocks in memory."""
    row = math.prod(param.shape[1:])
    return param.dim() > 0 and row % BLOCK == 0 and row > 0 and param.is_contiguous()
