"""What a stage runs on: the first GPU, or in a dry run the CPU, with the kernels over the emulation where it compiles.

A stage's process finds two variables: ACCUMFUSED_GPU_DRY, and ACCUMFUSED_GPU_LAUNCHES, the mechanisms that launches
may use (see MECHANISMS; all where it is not set). Only this file reads the second.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable
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
)


class Target:
    """A GPU, or the CPU in its place.

    Attributes:
        kernels: `_C.cuda`, or the emulation of it; None where there are none.
        backend: a name, or a backend.
        rounds: of everything that is timed.
        mechanisms: those that are on.
    """

    def __init__(self) -> None:
        self.is_dry = bool(os.environ.get(DRY))
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", 0)
        self.rounds = 1 if self.is_dry else 9
        self.kernels = self._emulation() if self.is_dry else None
        self.backend: Any = "torch" if compiled.module is None else "cpu" if self.is_dry else "triton"
        if self.kernels is not None:
            self.backend = CudaBackend(self.kernels, self.kernels.Table)
        if not self.is_dry and why_not("cuda", self.device) is None:
            self.kernels, self.backend = compiled.module.cuda, "cuda"
        names = os.environ.get(LAUNCHES, ",".join(MECHANISMS)).split(",")
        self.mechanisms = tuple(name for name in MECHANISMS if name in names and self.kernels is not None)
        self.allow(self.mechanisms)

    def _emulation(self) -> Any:
        sys.path.insert(0, str(ROOT / "tests"))
        import emulation

        return None if compiled.module is None or emulation.why_not() else emulation.load()

    @cached_property
    def clock(self) -> Clock:
        return HostClock() if self.is_dry else CudaClock(self.device)

    @cached_property
    def host_clock(self) -> Clock:
        return HostClock() if self.is_dry else EnqueueClock(self.device)

    def allow(self, names: Iterable[str]) -> None:
        """Switches these mechanisms on, and all others off."""
        on = set(names)
        if self.kernels is not None:
            self.kernels.allow(**{name: name in on for name in MECHANISMS})

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        """Calls it three times (tables and kernels are there then), and captures it.

        Returns:
            The replay, and the number of its graph's nodes. In a dry run the call itself, and its launches of ours.
        """
        if self.is_dry:
            launches = self.kernels.launches if self.kernels is not None else lambda: 0
            run()
            before = launches()
            run()
            return run, launches() - before
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run()
        nodes = ctypes.c_size_t()
        # By the driver, whose library has the same name everywhere.
        status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
            ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes)
        )
        if status != 0:
            raise RuntimeError(f"cuGraphGetNodes: CUDA error {status}")
        graph.instantiate()

        def replay(kept: Any = run) -> None:  # with the tensors whose addresses the graph has
            graph.replay()

        return replay, int(nodes.value)

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

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    def copy_rate(self) -> float:
        """Bytes a second of a large copy, read and written."""
        elements = self.elements(1 << 29, 8)
        source = random_tensors(flat(elements), 1.0, device=self.device)[0]
        goal = torch.empty_like(source)
        timing = interleave([Variant("copy", lambda: goal.copy_(source))], self.rounds, clock=self.clock)[0]
        return 8 * elements / timing.median
