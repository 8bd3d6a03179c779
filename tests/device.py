"""What a device does and a CPU does not: launches wait, memory is given away, and reads make the host wait.

`NoReads` refuses to read a tensor's value. `Kernels` names torch's own kernels. `DeviceMemory` is the memory of the
emulated GPU. `Launches` are those of interpreted Triton kernels: it records them, and makes them wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accumfused.formats.numeric import ieee

aten: Any = torch.ops.aten
NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
READS = {getattr(aten, name).default for name in NAMES}
LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # tensor[i] = 2.0 makes a tensor of the CPU of it


class NoReads(TorchDispatchMode):
    """Refuses to read a tensor's value.

    On a CPU a waiting call costs nothing and changes nothing, so the calls themselves are watched: every one that reads
    a value goes through one of a few operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self._literals: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device"
        result = func(*args, **(kwargs or {}))
        if func in LITERALS:
            self._literals.append(result)
        copies_one = func is aten.copy_.default and any(args[1] is literal for literal in self._literals)
        assert not copies_one, "a number that is assigned to an element goes through the CPU's memory, and waits"
        return result


class Kernels(TorchDispatchMode):
    """What torch itself would launch on a GPU in a block, by name and in order: no views, and no new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "_record_function")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


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
            if torch._C._storage_Use_Count(storage._cdata) == 1 and stream not in streams:
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


class Launches:
    """Of interpreted Triton kernels: at once, or when the test synchronizes, or replays what it has captured."""

    def __init__(self, module: Any, patch: pytest.MonkeyPatch, *, wait: bool) -> None:
        self.made: dict[str, list[tuple[int, tuple[Any, ...]]]] = {"norm": [], "accumulate": [], "step": []}
        self.options: list[dict[str, Any]] = []  # of each launch
        self.fits = 1  # what a launch tells, as Triton's do, of the kernel that it has loaded: so many programs fit
        self._waits, self._waiting, self._captured = wait, list[Callable[[], None]](), list[Callable[[], None]]()
        self._graph = 0
        for owner, verb in ((module.kernels, "norm"), (module.kernels, "accumulate"), (module, "step")):
            patch.setattr(owner, f"{verb}_kernel", _Kernel(self, verb, getattr(owner, f"{verb}_kernel")))

    def add(self, launch: Callable[[], None]) -> None:
        (self._captured if self._graph else self._waiting).append(launch)
        if not self._waits:
            self.synchronize()

    def allow(self, address: int, size: int) -> None:
        """Nothing is refused."""

    def capture(self, graph: int, stream: int) -> None:
        self._graph = graph

    def is_relaxed(self) -> bool:
        return False

    def launches(self) -> int:
        return sum(map(len, self.made.values()))

    def tables(self) -> int:
        """How many different ones the launches have read: each was copied to the device."""
        read = [args[0] for made in self.made.values() for _, args in made]
        return len({*map(id, read + [args[3] for _, args in self.made["step"]])})

    def synchronize(self) -> None:
        waiting, self._waiting = self._waiting, []
        _run(waiting)

    def replay(self) -> None:
        _run(self._captured)


class _Kernel:
    def __init__(self, launches: Launches, verb: str, kernel: Any) -> None:
        self._launches, self._verb, self._kernel = launches, verb, kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            makers = [_maker(arg) for arg in args]
            self._launches.made[self._verb].append((*grid, args))
            self._launches.options.append(options)
            self._launches.add(lambda: self._kernel[grid](*(make() for make in makers), **options))
            return SimpleNamespace(fits=self._launches.fits)

        return launch


def _run(launches: list[Callable[[], None]]) -> None:
    with ieee():
        for launch in launches:
            launch()


def _maker(arg: Any) -> Callable[[], Any]:
    """Makes a launch's argument when it runs; a tensor from the memory that is then at its address."""
    if not isinstance(arg, Tensor):
        return lambda: arg
    return partial(_at, arg.data_ptr(), arg.nbytes, arg.dtype)


def _at(address: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
