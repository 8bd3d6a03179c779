"""The suites, one file each: `run(bench)` returns tables, FOLLOWS names the options that make a difference to it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

import accumfused as af
from bench import shapes
from bench.ceilings import Ceilings, CopyLoops
from bench.clock import Clock, CudaClock, HostClock
from bench.measure import BUDGET, Timing, Variant, back_to_back, interleave
from bench.shapes import Shapes
from bench.workload import CPU, Workload

_SHARED = ("update", "window", "small", "lean", "train", "kernels", "backward")
CPU_SUITES, GPU_SUITES = (*_SHARED, "processes", "allocated", "offload"), (*_SHARED, "graph")


def all_suites(on_gpu: bool = False) -> dict[str, ModuleType]:
    """Returns name -> module, in the order in which they run."""
    return {name: importlib.import_module(f"bench.suites.{name}") for name in (GPU_SUITES if on_gpu else CPU_SUITES)}


@dataclass
class Bench:
    """What every suite is given.

    Args:
        quick: tiny sizes, to see that everything runs; the figures mean nothing.
        rounds: of the interleaved variants on the large shapes, after the warm-up rounds.
        on_gpu: whether the GPU's variants are measured.
        backends: of ours, by name.
        model: name and shapes that take the place of the suites' models.
    """

    ceilings: Ceilings
    quick: bool = False
    rounds: int = 5
    on_gpu: bool = False
    device: torch.device = CPU
    clock: Clock = field(default_factory=HostClock)
    backends: Sequence[str] = ("auto",)
    model: tuple[str, Shapes] | None = None

    def models(self, *names: str) -> dict[str, Shapes]:
        """Returns the models that a suite goes through: the one of --model, or these, or large ones."""
        names = names or ((shapes.GPT2, shapes.LLAMA_1B) if self.on_gpu else (shapes.GPT2,))
        return dict([self.model]) if self.model else {name: shapes.model(name, self.quick) for name in names}

    def release(self) -> None:
        """Gives memory that nobody uses back to the device."""
        gc.collect()  # optimizers are cycles, and hold up to half of a GPU's memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def workload(self, of: Shapes) -> Workload:
        self.release()
        return Workload(of, self.device)

    def ours(self, work: Workload) -> dict[str, af.AdamW]:
        """Name in the tables -> our optimizer, for each backend."""
        return {self.label(backend): work.ours(backend) for backend in self.backends}

    def label(self, backend: str) -> str:
        return "accumfused" if backend == "auto" else f"accumfused {backend}"

    def interleave(
        self, variants: Sequence[Variant], rounds: int | None = None, budget: float = BUDGET
    ) -> list[Timing]:
        return interleave(variants, rounds or self.rounds, self.ceilings, self.clock, budget=budget)

    def host_times(self, variants: Sequence[Variant], rounds: int) -> dict[str, list[Timing]]:
        """How long the host is busy with each, cold and warm; no bytes: they are moved later."""
        unmoved = [replace(variant, passes=None) for variant in variants]
        cold = interleave(unmoved, rounds, clock=self.clock, of_host=True)
        return {"host, cold": cold, "host, warm": back_to_back(unmoved, self.clock)}


def bench_of_gpu(device: torch.device, backends: Sequence[str], rounds: int, *, quick: bool = False) -> Bench:
    """Makes the benchmark of a GPU, whose ceilings are those of a copy."""
    clock = CudaClock(device)
    ceilings = Ceilings(lambda: CopyLoops(device, 1 << (20 if quick else 27)), clock)  # of GPT-2's size, 4 GiB in all
    return Bench(ceilings, quick, rounds, on_gpu=True, device=device, clock=clock, backends=backends)
