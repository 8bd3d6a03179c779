"""Rows: each describes one parameter, validated, in the form that the backends work on.

A row owns nothing of the user's. It reads the parameter and its state from where the optimizer has them at that moment,
so what a loop frees is freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accumfused.formats import shards
from accumfused.formats.kinds import DTYPES, TORCH_DTYPES, Format, Storage, format_of, is_stored, names, storage_of
from accumfused.formats.numeric import layout
from accumfused.formats.shards import Shard
from accumfused.rules import Rule
from accumfused.settings import Settings

HOST = torch.device("cpu")


class Grads(list[Tensor | None]):
    """A gradient for each row, or None. A table that points at them knows the list weakly."""

    __slots__ = ("__weakref__",)


class Source(Protocol):
    """The place of a row's tensors."""

    @property
    def param(self) -> Tensor:
        """The parameter."""

    @property
    def entries(self) -> Mapping[str, Any]:
        """Its state; empty if it has none."""


@dataclass(frozen=True)
class InGroup:
    """A place in an optimizer's param_groups and state. (torch refuses to swap a tensor with weak references.)"""

    optimizer: Callable[[], Any]  # a weak reference: callers that read a plan have the optimizer
    group: int
    index: int

    @property
    def param(self) -> Tensor:
        param: Tensor = self.optimizer().param_groups[self.group]["params"][self.index]
        return param

    @property
    def entries(self) -> Mapping[str, Any]:
        return self.optimizer().state.get(self.param) or {}


@dataclass(eq=False)
class Row:
    """One parameter, in the form that the backends work on."""

    source: Source
    group: int
    rule: type[Rule]
    form: Format
    first_chunk: int
    shard: Shard | None  # how this process's part lies in the parameter; None: it is the parameter
    # The shard's first element in the whole tensor, in memory order: elements keep the rounding noise that they have in
    # the whole. With 8-bit states it is a multiple of a quantisation block.
    origin: int
    copy: Tensor | None  # a dense copy, which the kernels write, if the memory is not dense
    has_state: bool  # the state is complete, and in the row's format
    is_initialized: bool  # else it is a lazy module's, and empty
    sum_dtype: torch.dtype  # of a new sum; an open window's may have the other one
    is_offloaded: bool = False  # sum and state lie on the host, wherever the parameter does
    is_bundled: bool = False  # its accumulator is small, and travels together with others

    @property
    def sum_number(self) -> int:
        """`sum_dtype` as csrc/rows.h's number."""
        return DTYPES.index(self.sum_dtype) if self.sum_dtype in DTYPES else 0

    @property
    def sum_device(self) -> torch.device:
        """Where its sum and its state lie."""
        return HOST if self.is_offloaded else self.tensor.device

    @property
    def param(self) -> Tensor:
        """The parameter, as the user has it."""
        return self.source.param

    @property
    def owned(self) -> Tensor:
        """This process's shard; the parameter itself, if it is not sharded."""
        return shards.owned(self.source.param, self.shard)

    @property
    def tensor(self) -> Tensor:
        """What the kernels write."""
        return self.owned if self.copy is None else self.copy

    @property
    def entries(self) -> Mapping[str, Any]:
        """The state, as this process's shards."""
        entries = self.source.entries
        return entries if self.shard is None else self.shard.parts(entries)

    @property
    def storage(self) -> Storage | None:
        """The state in the kernels' order; None: no step has made it yet."""
        return storage_of(self.rule, self.form, self.entries) if self.has_state else None


def row_of(
    source: Source, group: int, rule: type[Rule], settings: Settings, chunk: int, *, is_fused: bool = False
) -> Row:
    """Makes a row, whose first chunk is `chunk`.

    Args:
        is_fused: products add to its sum, which must be exact for them.
    """
    param = source.param
    shard = shards.shard_of(param)
    tensor, copy = shards.owned(param, shard), None
    if layout(tensor) == "strided":
        tensor = copy = torch.empty_like(tensor, requires_grad=False)
    form, entries = format_of(rule, param, settings), source.entries
    has_state = shard is None or not entries or shard.has_placed(entries, names(rule, form))
    if has_state:
        home = home_of(tensor, settings)
        has_state = is_stored(rule, form, tensor, entries if shard is None else shard.parts(entries), home)
    origin = 0 if shard is None else shard.origin
    sum_dtype = form.dtype
    if settings.sum_dtype is torch.bfloat16 and not is_fused and param.dtype in (torch.float32, torch.bfloat16):
        sum_dtype = torch.bfloat16
    is_initialized, is_offloaded = not is_lazy(param), settings.offload
    return Row(
        source, group, rule, form, chunk, shard, origin, copy, has_state, is_initialized, sum_dtype, is_offloaded
    )  # fmt: skip


def home_of(tensor: Tensor, settings: Settings) -> torch.device:
    """Tells where a parameter's sum and state lie."""
    return HOST if settings.offload else tensor.device


def has_memory(tensor: Tensor) -> bool:
    """Tells whether kernels may have its address. A quantized weight's wrapper has none; a DTensor's part has."""
    is_wrapper = is_traceable_wrapper_subclass(tensor) and not shards.is_dtensor(tensor)
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not is_wrapper


def is_freed(tensor: Tensor) -> bool:
    """Tells whether its storage was resized to nothing, as frozen parameters' may be for a while."""
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def check_parameter(param: Tensor) -> None:
    """Refuses a parameter that no backend can update."""
    if param.is_complex():
        raise RuntimeError(
            "complex parameters are not supported; give them to an optimizer of torch's own, and the others to this one"
        )
    if param.dtype not in TORCH_DTYPES:
        dtypes = ", ".join(str(dtype) for dtype in TORCH_DTYPES)
        raise TypeError(f"a parameter is {param.dtype}; supported are {dtypes}")
    if is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"a parameter is a {type(param).__name__}, whose memory is that of other tensors; leave it to an optimizer "
            "of torch's own, and the others to this one"
        )
    if param.is_neg():
        raise RuntimeError(
            "a parameter is lazily negated, so its memory holds other values; put Parameter(param.detach()"
            ".resolve_neg()) in its place"
        )
    if not has_memory(param) or is_freed(param):
        raise RuntimeError(
            f"a parameter has no memory to update (layout {param.layout}, device {param.device}); materialize it first"
        )
    if layout(param) == "overlapping":
        raise RuntimeError(
            f"a parameter of shape {list(param.shape)} and strides {list(param.stride())} overlaps itself in memory "
            "(expanded?); put Parameter(param.detach().clone()) in its place"
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


def overwritten(row: int) -> RuntimeError:
    """Makes the error of a gradient in memory that the window has adopted: its accumulator holds no sum any more."""
    return RuntimeError(
        f"the gradient of parameter {row} lies where the window's sum does, so one has overwritten the other; call "
        "zero_grad(), and give every micro-batch a gradient in memory of its own (p.grad = buffer.clone())"
    )


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


def is_short(grad: Tensor) -> bool:
    """Tells, in half a microsecond, whether a dense tensor's storage is too small."""
    return grad.untyped_storage().nbytes() < (grad.storage_offset() + grad.numel()) * grad.itemsize


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
                "array that cannot be written); put Parameter(param.detach().clone()) in its place"
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
    """Returns the address after the last element."""
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(param.stride(), param.shape, strict=True))
    return param.data_ptr() + reach * param.element_size()


def _overlap(param: Tensor, later: Tensor) -> bool:
    """Tells whether two tensors with overlapping spans share an element: columns of one matrix may not."""
    apart = later.data_ptr() - param.data_ptr()
    if param.element_size() != later.element_size() or apart % param.element_size():
        return True
    offset = apart // param.element_size()
    size = (max(_end(param), _end(later)) - param.data_ptr()) // param.element_size()
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    taken.as_strided(param.shape, param.stride()).fill_(True)
    return bool(taken.as_strided(later.shape, later.stride(), offset).any())
