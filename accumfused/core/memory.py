"""Checks that memory exists, is writable and belongs to one parameter: kernels get addresses, and cannot ask."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor


def check(params: Sequence[Tensor]) -> None:
    """Refuses parameters (with elements) whose memory cannot be updated.

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
