"""A whole step as a CUDA graph, captured once and replayed: the host sends one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import shapes, stock
from bench.measure import Variant
from bench.shapes import Shapes, small
from bench.suites import Bench, largest_error
from bench.suites.window import window
from bench.tables import Table, timed

FOLLOWS = ("backend", "model")
_AGAINST = {"captured trick": "grad_scale trick, captured"}


def run(bench: Bench) -> list[Table]:
    several = bench.models(shapes.GPT2)
    for tensors in (1000, 10_000):
        several[f"{tensors} tensors of 64 elements"] = small(50 if bench.quick else tensors)
    return [table for name, of in several.items() for table in _model(bench, name, of)]


def _model(bench: Bench, name: str, of: Shapes) -> list[Table]:
    work = bench.workload(of)
    second = work.random()
    work.set_grads()
    fused = work.stock(fused=True, capturable=True)
    variants, errors = [], {}

    def add(name: str, run: Callable[[], Any], passes: Sequence[str], sets: Sequence[Any] = (work.grads,)) -> None:
        if name.endswith(", captured"):
            with work.put_back(sets):
                run = captured(run)
        errors[name] = work.error(run, sets)
        variants.append(Variant(name, run, work.set_grads, tuple(passes)))

    add("clip + AdamW(fused), captured", stock.clip_and_step(work.params, fused), stock.CLIP_FUSED)
    add("grad_scale trick, captured", stock.grad_scale_trick(work.params, fused), stock.TRICK)
    for label, optimizer in bench.ours(work).items():
        work.set_grads()
        add(f"{label}, captured", optimizer.step, ("read", "step"))
        add(f"{label}, not captured", optimizer.step, ("read", "step"))
    for label, optimizer in bench.ours(work).items():  # others: a capture's tables are its own
        whole = window(work, optimizer, [work.grads, second])
        add(f"{label}, window of 2, captured", whole, ("accumulate", "step"), [work.grads, second])

    factor, unit = (1, "ms") if work.count > 5e7 else (3, "us")
    timings = bench.interleave(variants, factor * bench.rounds)
    title = f"graph, {name}"
    table = timed(f"{title}, on the GPU", timings, work.count, _AGAINST, unit)
    table.notes.append(largest_error(errors))
    timings = bench.host_times(variants, factor * bench.rounds)
    return [table, timed(f"{title}, on the host", timings, work.count, _AGAINST, "us")]


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the call three times (the tables and the kernels are there then), captures it, and returns its replay.

    That keeps the call, and so the tensors whose addresses the graph has.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, kept: Any) -> None:
    graph.replay()
