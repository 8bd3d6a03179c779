"""Interpreted Triton kernels whose launches wait, as those of a GPU do, and know a tensor by its address alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.formats.numeric import ieee


class Launches:
    """As a checked module of the emulation, it takes launches for `synchronize`, or for a captured graph's `replay`."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._captured: list[Callable[[], None]] = []
        self._graph = 0

    def put_off(self, kernel: Any) -> _Kernel:
        """The kernel, with launches that wait."""
        return _Kernel(self, kernel)

    def add(self, launch: Callable[[], None]) -> None:
        (self._captured if self._graph else self._waiting).append(launch)

    def allow(self, address: int, size: int) -> None:
        """Nothing is refused."""

    def capture(self, graph: int) -> None:
        self._graph = graph

    def is_capturing(self, device: torch.device) -> bool:
        return self._graph != 0

    def synchronize(self) -> None:
        waiting, self._waiting = self._waiting, []
        _run(waiting)

    def replay(self) -> None:
        _run(self._captured)


class _Kernel:
    def __init__(self, launches: Launches, kernel: Any) -> None:
        self._launches, self._kernel = launches, kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            makers = [_maker(arg) for arg in args]
            self._launches.add(lambda: self._kernel[grid](*(make() for make in makers), **options))

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
