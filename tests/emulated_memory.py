"""The memory of the emulated device: what tensors have, and what becomes of it when nobody has them any more."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceMemory(TorchDispatchMode):
    """While it is entered, new tensors lie on the device; kernels of a checked module are refused all else.

    Their memory stays, so that no address comes twice.
    """

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self.stream = 0  # the current one
        self._machine = machine
        self._storages: dict[
            int, tuple[torch.UntypedStorage, set[int]]
        ] = {}  # by address, with the streams they are for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage, {self.stream}
            self._machine.allow(storage.data_ptr(), storage.nbytes())

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        self._storages[tensor.untyped_storage().data_ptr()][1].add(stream)

    def poison(self, stream: int) -> None:
        """Others, who get what nobody has any more, write NaN there.

        Not where it was made, or recorded, for the stream: its launches, or a captured graph's, are in front of theirs.
        """
        for storage, streams in self._storages.values():
            if torch._C._storage_Use_Count(storage._cdata) == 1 and stream not in streams:  # noqa: SLF001  # not the package's
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
