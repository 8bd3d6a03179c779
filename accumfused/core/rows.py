"""Rows: each holds one parameter, validated, in the form that the backends work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accumfused.formats import shards
from accumfused.formats.kinds import DTYPES, TORCH_DTYPES, Format, Storage, format_of, names, storage_of
from accumfused.formats.numeric import layout
from accumfused.formats.shards import Shard
from accumfused.rules import Rule
from accumfused.settings import Settings


class Grads(list[Tensor | None]):
    """A gradient for each row, or None. A table that points at them knows the list weakly."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class Row:
    """One parameter, in the form that the backends work on."""

    param: Tensor  # as the user has it
    owned: Tensor  # this process's shard; the parameter itself, if it is not sharded
    tensor: Tensor  # the kernels write it: `owned`, or a dense copy if that memory is not dense
    group: int
    rule: type[Rule]
    form: Format
    storage: Storage | None  # None: nobody has made it yet
    first_chunk: int
    shard: Shard | None  # how `owned` lies in the parameter; None: it is the parameter
    # The shard's first element in the whole tensor, in memory order: elements keep the rounding noise that they have in
    # the whole. With 8-bit states it is a multiple of a quantisation block.
    origin: int
    is_bundled: bool = False  # its accumulator is small, and travels together with others

    @property
    def is_copy(self) -> bool:
        """Whether the kernels write a dense copy."""
        return self.tensor is not self.owned


def row_of(
    param: Tensor, group: int, rule: type[Rule], entries: Mapping[str, Any] | None, settings: Settings, chunk: int
) -> Row:
    """Makes a row. `entries` is the optimizer's state of the parameter, `chunk` the row's first chunk."""
    shard = shards.shard_of(param)
    tensor = owned = shards.owned(param, shard)
    if layout(owned) == "strided":
        tensor = torch.empty_like(owned, requires_grad=False)
    form = format_of(rule, param, settings)
    if shard is not None and entries is not None:
        entries = shard.parts(entries) if shard.has_placed(entries, names(rule, form)) else None
    storage, origin = storage_of(rule, form, tensor, entries), 0 if shard is None else shard.origin
    return Row(param, owned, tensor, group, rule, form, storage, chunk, shard, origin)


def has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def is_freed(tensor: Tensor) -> bool:
    """Whether its storage was resized to nothing, as frozen parameters' may be for a while."""
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def check_parameter(param: Tensor) -> None:
    """Refuses a parameter that no backend can update."""
    if param.is_complex():
        raise RuntimeError("complex parameters are not supported; optimize torch.view_as_real(parameter) instead")
    if param.dtype not in TORCH_DTYPES:
        dtypes = ", ".join(str(dtype) for dtype in TORCH_DTYPES)
        raise TypeError(f"a parameter is {param.dtype}; supported are {dtypes}")
    if is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"a parameter is a {type(param).__name__}, whose memory is that of other tensors; leave it to an optimizer "
            "of torch's own, and the others to this one"
        )
    if param.is_neg():
        raise RuntimeError("a parameter is lazily negated, so its memory holds other values; use param.resolve_neg()")
    if not has_memory(param) or is_freed(param):
        raise RuntimeError(
            f"a parameter has no memory to update (layout {param.layout}, device {param.device}); materialize it first"
        )
    if layout(param) == "overlapping":
        raise RuntimeError(
            f"a parameter of shape {list(param.shape)} and strides {list(param.stride())} overlaps itself in memory "
            "(expanded?); clone() it first"
        )


def check_gradient(param: Tensor, grad: Tensor, taken: Sequence[torch.dtype] = DTYPES) -> None:
    """Refuses a gradient that no backend can read, or whose dtype is not `taken`."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"sparse gradients are not supported (a gradient has layout {grad.layout}); "
            "use Embedding(sparse=False), or keep these parameters in an optimizer of torch's own"
        )
    if grad.dtype not in taken:
        dtypes = ", ".join(str(dtype) for dtype in taken)
        kind = RuntimeError if grad.is_complex() else TypeError
        raise kind(f"a gradient is {grad.dtype}; supported are {dtypes}")
    if grad.device != param.device:
        raise RuntimeError(f"a gradient is on {grad.device}, its parameter on {param.device}; move one of them")
    if grad.shape != param.shape:
        raise RuntimeError(f"a gradient has shape {list(grad.shape)}, its parameter {list(param.shape)}")
