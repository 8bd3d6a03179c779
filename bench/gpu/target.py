"""What a stage runs on: the first GPU, or in a dry run the CPU, with the kernels over the emulation where it compiles.

A stage's process finds two variables: ACCUMFUSED_GPU_DRY, and ACCUMFUSED_GPU_LAUNCHES, the mechanisms that launches
may use (see MECHANISMS; all where it is not set). They are read here and nowhere else.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from accumfused import compiled
from accumfused.backends import why_not
from accumfused.backends.cuda import CudaBackend
from bench.clock import Clock, CudaClock, EnqueueClock, HostClock
from bench.gpu.runner import DRY, LAUNCHES, ROOT
from bench.measure import Variant, interleave
from bench.shapes import flat
from bench.workload import random_tensors

# The arguments of `_C.cuda.allow` (csrc/cuda/launch.h), in the order in which smoke tries them.
MECHANISMS = (
    "queue",  # more thread blocks than the card has room for
    "overlap",  # a launch begins while the one in front of it ends
    "one_launch",  # norm and step in one cooperative launch
)


@dataclass
class Target:
    """A GPU, or the CPU in its place.

    Args:
        kernels: `_C.cuda`, or the emulation of it; None where there are none.
        backend: a name, or a backend.
        rounds: of everything that is timed.
    """

    device: torch.device
    kernels: Any
    backend: Any
    clock: Clock
    host_clock: Clock
    rounds: int

    @classmethod
    def here(cls) -> Target:
        """What this process was started for; its mechanisms are switched."""
        target = cls._dry() if os.environ.get(DRY) else cls._gpu()
        if LAUNCHES in os.environ:
            target.allow(os.environ[LAUNCHES].split(","))
        return target

    @classmethod
    def _gpu(cls) -> Target:
        device = torch.device("cuda", 0)
        reason = why_not("cuda", device)
        kernels = None if reason else compiled.module.cuda
        return cls(device, kernels, "triton" if reason else "cuda", CudaClock(device), EnqueueClock(device), 9)

    @classmethod
    def _dry(cls) -> Target:
        sys.path.insert(0, str(ROOT / "tests"))
        import emulation

        clock, cpu = HostClock(), "torch" if compiled.module is None else "cpu"
        kernels = None if compiled.module is None or emulation.why_not() else emulation.load()
        backend = cpu if kernels is None else CudaBackend(kernels, kernels.Table)
        return cls(torch.device("cpu"), kernels, backend, clock, clock, 1)

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def mechanisms(self) -> tuple[str, ...]:
        """Those that are on."""
        names = os.environ.get(LAUNCHES, ",".join(MECHANISMS)).split(",")
        return tuple(name for name in MECHANISMS if name in names and self.kernels is not None)

    def allow(self, names: Iterable[str]) -> None:
        """Switches these mechanisms on, and all others off."""
        on = set(names)
        if self.kernels is not None:
            self.kernels.allow(**{name: name in on for name in MECHANISMS})

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], int | None]:
        """Calls it three times (tables and kernels are there then), and captures it.

        Returns:
            The replay, and the number of its graph's nodes. In a dry run the call itself, and the launches of one call.
        """
        if self.is_dry:
            counted = self.kernels.launches if self.kernels is not None else lambda: 0
            run()
            before = counted()
            run()
            return run, counted() - before
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run()
        nodes = _nodes(graph.raw_cuda_graph())
        graph.instantiate()

        def replay(kept: Any = run) -> None:  # with the tensors whose addresses the graph has
            graph.replay()

        return replay, nodes

    def elements(self, wanted: int, bytes_each: int) -> int:
        """So many, or as many as fit; in a dry run next to none."""
        if self.is_dry:
            return min(wanted, 40_000)
        self.release()
        return min(wanted, int(0.8 * torch.cuda.mem_get_info(self.device)[0] / bytes_each))

    def release(self) -> None:
        """Gives unused memory back to the device."""
        gc.collect()  # optimizers are cycles, and hold tensors
        if not self.is_dry:
            torch.cuda.empty_cache()

    def copy_rate(self) -> float:
        """Bytes a second of a large copy, read and written."""
        elements = self.elements(1 << 29, 8)
        source = random_tensors(flat(elements), 1.0, device=self.device)[0]
        goal = torch.empty_like(source)
        timing = interleave([Variant("copy", lambda: goal.copy_(source))], self.rounds, clock=self.clock)[0]
        return 8 * elements / timing.median


def _nodes(graph: int) -> int | None:
    """How many nodes a cudaGraph_t has, by the driver, whose library has the same name everywhere."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    return int(count.value) if status == 0 else None
