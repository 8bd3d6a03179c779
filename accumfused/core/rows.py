"""Rows: each holds one parameter, validated, in the form that the backends work on."""

from __future__ import annotations

import contextlib
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
    """Whether kernels may have its address. A wrapper, of a quantized weight say, has none; a DTensor's part has."""
    is_wrapper = is_traceable_wrapper_subclass(tensor) and not shards.is_dtensor(tensor)
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not is_wrapper


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


# ---- memory ----------------------------------------------------------------------------------------------------------


def check_memory(params: Sequence[Tensor]) -> None:
    """Refuses parameters (with elements) whose memory cannot be updated: kernels get addresses, and cannot ask.

    Raises:
        RuntimeError: a storage is smaller than its tensor needs; memory is mapped read-only; two parameters share
            elements.
    """
    foreign = []
    for param in params:
        check_size(param, "parameter")
        if param.device.type == "cpu" and not param.untyped_storage().resizable():  # an array's, a file's...
            foreign.append(param)
    if foreign:
        _check_writable(foreign)
    _check_shared(params)


def check_size(tensor: Tensor, what: str) -> None:
    """Refuses a tensor whose storage is too small (it was resized)."""
    storage = tensor.untyped_storage()
    if tensor.numel() and _end(tensor) > storage.data_ptr() + storage.nbytes():
        raise RuntimeError(
            f"a {what} of shape {list(tensor.shape)} lies in a storage of {storage.nbytes()} bytes, which is too "
            "small (it was resized?); give it memory again"
        )


def _check_writable(params: Sequence[Tensor]) -> None:
    """Refuses memory that is mapped read-only, if the system tells (Linux)."""
    read_only = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, *_ = line.split()
            if "w" not in permissions:
                start, _, end = span.partition("-")
                read_only.append((int(start, 16), int(end, 16)))
    for param in params:
        if any(start < _end(param) and param.data_ptr() < end for start, end in read_only):
            raise RuntimeError(
                f"a parameter of shape {list(param.shape)} lies in memory that is mapped read-only (a file, or an "
                "array that cannot be written); clone() it first"
            )


def _check_shared(params: Sequence[Tensor]) -> None:
    spans = sorted(
        ((p.device.type, p.device.index or 0, p.data_ptr(), _end(p), p) for p in params), key=lambda span: span[:3]
    )
    for index, (*device, _, end, param) in enumerate(spans):
        for *other_device, start, _, other in spans[index + 1 :]:
            if other_device != device or start >= end:
                break
            if param is not other and _overlap(param, other):
                raise RuntimeError(
                    "two parameters share memory, and would be updated twice at once; "
                    "tie them by assigning one Parameter object to both places"
                )


def _end(param: Tensor) -> int:
    """The address behind the last element."""
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(param.stride(), param.shape, strict=True))
    return param.data_ptr() + reach * param.element_size()


def _overlap(param: Tensor, later: Tensor) -> bool:
    """Whether two tensors with overlapping spans share an element: columns of one matrix may not."""
    apart = later.data_ptr() - param.data_ptr()
    if param.element_size() != later.element_size() or apart % param.element_size():
        return True
    offset = apart // param.element_size()
    size = (max(_end(param), _end(later)) - param.data_ptr()) // param.element_size()
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    taken.as_strided(param.shape, param.stride()).fill_(True)
    return bool(taken.as_strided(later.shape, later.stride(), offset).any())
