"""Peak memory of a step and of a window on a GPU, beyond parameters, gradients, accumulators and states.

As torch's allocator counts it: all that accumfused uses on a GPU comes from there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from bench import shapes, stock
from bench.report import Column, Table
from bench.suites import Bench
from bench.suites.window import set_grad_dtype, window
from bench.workload import Workload

Make = Callable[[Workload], Callable[[], object]]


def run(bench: Bench) -> list[Table]:
    makes: dict[str, Make] = {
        "clip + AdamW(fused), step": _stock(fused=True),
        "clip + AdamW(foreach), step": _stock(foreach=True),
    }
    for backend in bench.backends:
        label = bench.label(backend)
        makes[f"{label}, step from p.grad"] = _step(backend)
        makes[f"{label}, window of fp32 gradients"] = _window(backend, torch.float32)
        makes[f"{label}, window of bf16 gradients"] = _window(backend, torch.bfloat16)
    columns = [
        Column("name", ""),
        Column("first_megabytes", "first, MB", "{:.2f}"),
        Column("later_megabytes", "later, MB", "{:.2f}"),
    ]
    table = Table(f"memory: peak beyond parameters, gradients and states, {shapes.GPT2}", columns)
    for name, make in makes.items():
        work = bench.workload(bench.shapes(shapes.GPT2))
        run = make(work)
        first, later = peak_megabytes(run), peak_megabytes(run)
        table.rows.append({"name": name, "first_megabytes": first, "later_megabytes": later})
        del work, run
        gc.collect()
    table.notes.append(
        "first: with the optimizer's tables, and in a window of bf16 gradients with the fp32 accumulators, which are "
        f"kept ({4 * shapes.count(bench.shapes(shapes.GPT2)) / 1e6:.2f} MB)"
    )
    return [table]


def _stock(*, fused: bool = False, foreach: bool = False) -> Make:
    def make(work: Workload) -> Callable[[], object]:
        work.set_grads()
        return stock.clip_and_step(work.params, work.stock(fused=fused, foreach=foreach))

    return make


def _step(backend: str) -> Make:
    def make(work: Workload) -> Callable[[], object]:
        work.set_grads()
        return work.ours(backend).step

    return make


def _window(backend: str, dtype: torch.dtype) -> Make:
    def make(work: Workload) -> Callable[[], object]:
        set_grad_dtype(work.params, dtype)
        sets = [work.random(dtype=dtype) for _ in range(2)]
        return window(work, work.ours(backend), sets)

    return make


def peak_megabytes(run: Callable[[], object]) -> float:
    """How far the allocator's count rises above where it was, during the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
