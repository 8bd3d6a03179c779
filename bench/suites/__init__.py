"""The suites, one file each. A suite takes a Bench and returns its tables."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

import accumfused as af
from bench import shapes
from bench.ceilings import Ceilings
from bench.clock import Clock, HostClock
from bench.measure import Timing, Variant, interleave
from bench.report import Table
from bench.shapes import Shapes
from bench.workload import CPU, Workload


@dataclass
class Bench:
    """What every suite is given.

    Args:
        quick: tiny sizes, to see that everything runs; the figures mean nothing.
        rounds: of the interleaved variants on the large shapes, after the warm-up rounds.
        on_gpu: whether the GPU's variants are measured.
        clock: times the work; `host_clock`: how long the host is busy with it.
        backends: of ours, by name.
    """

    ceilings: Ceilings
    quick: bool = False
    rounds: int = 9
    on_gpu: bool = False
    device: torch.device = CPU
    clock: Clock = field(default_factory=HostClock)
    host_clock: Clock = field(default_factory=HostClock)
    backends: Sequence[str] = ("auto",)

    def shapes(self, model: str) -> Shapes:
        return shapes.model(model, self.quick)

    def workload(self, of: Shapes) -> Workload:
        gc.collect()  # the last one's optimizers are cycles, and hold up to half of a GPU's memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Workload(of, self.device)

    def ours(self, work: Workload) -> dict[str, af.AdamW]:
        """Name in the tables -> our optimizer, for each backend."""
        return {self.label(backend): work.ours(backend) for backend in self.backends}

    def label(self, backend: str) -> str:
        return "accumfused" if backend == "auto" else f"accumfused {backend}"

    def interleave(
        self, variants: Sequence[Variant], rounds: int | None = None, *, ceilings: bool = True
    ) -> list[Timing]:
        return interleave(variants, rounds or self.rounds, self.ceilings if ceilings else None, self.clock)

    def host_times(self, variants: Sequence[Variant], rounds: int) -> list[Timing]:
        """How long the host is busy with each; no bytes: they are moved later."""
        return interleave([replace(variant, passes=None) for variant in variants], rounds, clock=self.host_clock)


Suite = Callable[[Bench], list[Table]]


def all_suites(on_gpu: bool = False) -> dict[str, Suite]:
    """Name -> suite, in the order in which they run."""
    from bench.suites import graph, lean, memory, memory_gpu, processes, scale, small, tail, verbs, window, zeros

    shared: dict[str, Suite] = {"tail": tail.run, "verbs": verbs.run, "window": window.run, "small": small.run}
    shared["lean"] = lean.run
    if on_gpu:
        return {**shared, "graph": graph.run, "memory": memory_gpu.run}
    alone = {"zeros": zeros.run, "scale": scale.run, "memory": memory.run, "processes": processes.run}
    return {**shared, **alone}


def largest_error(errors: dict[str, float]) -> str:
    """The note on what was checked before the time was taken."""
    worst = max(errors, key=lambda name: errors[name])
    return f"largest error of a parameter after one step, against fp64: {errors[worst]:.1e} ({worst}); all were checked"
