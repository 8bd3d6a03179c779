"""A whole step as a CUDA graph, captured once and replayed: the host sends one launch. Beside it the same, eager."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import shapes
from bench.peers import FOREACH, FUSED, KNOWN, TRICK, Checked
from bench.shapes import Shapes
from bench.suites import Bench
from bench.suites.window import window
from bench.tables import Table, timed

FOLLOWS = ("backend", "model")
RECIPES = (FUSED, TRICK, FOREACH)
_AGAINST = {"fused": FUSED, "captured trick": f"{TRICK}, captured"}


def run(bench: Bench) -> list[Table]:
    several = bench.models(shapes.GPT2)
    for tensors in (1000, 10_000):
        several[f"{tensors} tensors of 64 elements"] = [(64,)] * (50 if bench.quick else tensors)
    return [table for name, of in several.items() for table in model(bench, name, of)]


def model(bench: Bench, name: str, of: Shapes, recipes: Sequence[str] = RECIPES) -> list[Table]:
    """Times eager and captured steps: on the GPU, on the host cold, and warm; "launches" are those of a replay."""
    work = bench.workload(of)
    second = work.random()
    work.set_grads()
    checked = Checked(work)
    launches: dict[str, int] = {}

    def add(name: str, run: Callable[[], Any], passes: tuple[str, ...] | None, sets: Any = None) -> None:
        def made() -> Callable[[], Any]:
            if not name.endswith(", captured"):
                return run
            with work.put_back(sets):
                replay, launches[name] = captured(run, bench.device)
            return replay

        checked.attempt(name, made, passes, sets)

    for how in ("", ", captured"):
        for recipe in recipes:
            make, passes = KNOWN[recipe]
            add(recipe + how, make(work, capturable=bool(how) and bench.device.type == "cuda"), passes)
        for label, optimizer in bench.ours(work).items():  # others: a capture's tables are its own
            work.set_grads()
            add(label + how, optimizer.step, ("read", "step"))
    for label, optimizer in bench.ours(work).items():
        whole = window(work, optimizer, [work.grads, second])
        add(f"{label}, window of 2, captured", whole, ("scale", "accumulate", "step"), [work.grads, second])

    factor, unit = (1, "ms") if work.count > 5e7 else (3, "us")
    timings = bench.interleave(checked.variants, factor * bench.rounds)
    title = f"graph, {name}"
    table = timed(f"{title}, on the GPU", timings, work.count, _AGAINST, unit)
    for row in table.rows:
        row["launches"] = launches.get(row["name"])
    hosts = bench.host_times(checked.variants, factor * bench.rounds)
    return [
        checked.explain(table),
        *(timed(f"{title}, on the {where}", each, work.count, _AGAINST, "us") for where, each in hosts.items()),
    ]


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], int]:
    """Makes the call three times (the tables and the kernels are there then), and captures it.

    Returns:
        Its replay, and the number of the graph's nodes. Without a GPU the call itself, and 0.
    """
    if device.type != "cuda":
        return run, 0
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    nodes = ctypes.c_size_t()
    # By the driver, whose library has the same name everywhere.
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes: CUDA error {status}")
    graph.instantiate()

    def replay(run: Any = run) -> None:  # which has the tensors whose addresses the graph has
        graph.replay()

    return replay, int(nodes.value)
