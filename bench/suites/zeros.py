"""1000 steps of zero gradients, as unused embedding rows get them: the moments sink towards the subnormal numbers."""

from __future__ import annotations

import statistics
import time

import torch

from bench.report import Column, Table
from bench.shapes import flat
from bench.suites import Bench
from bench.workload import Workload

_EDGE = 50  # steps at either end


def run(bench: Bench) -> list[Table]:
    parameters, steps = (10_000, 200) if bench.quick else (1_000_000, 1000)
    columns = [
        Column("name", ""),
        Column("first", f"ns/param, first {_EDGE}", "{:.2f}"),
        Column("last", f"last {_EDGE}", "{:.2f}"),
        Column("ratio", "last / first", "{:.2f}"),
        Column("smallest", "smallest |exp_avg|", "{:.1e}"),
    ]
    table = Table(f"zeros: {steps} steps of zero gradients after one other, {parameters:,} parameters", columns)
    for name in ("AdamW(fused)", "accumfused"):
        work = Workload(flat(parameters))
        work.states[0]["exp_avg"].zero_(), work.states[0]["exp_avg_sq"].zero_()
        optimizer = work.ours() if name == "accumfused" else work.stock(fused=True)
        work.set_grads()
        optimizer.step()
        (param,) = work.params
        param.grad = torch.zeros_like(param)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        first, last = (statistics.median(part) * 1e9 / parameters for part in (seconds[:_EDGE], seconds[-_EDGE:]))
        smallest = float(optimizer.state[param]["exp_avg"].abs().min())
        table.rows.append({"name": name, "first": first, "last": last, "ratio": last / first, "smallest": smallest})
    return [table]
