"""ns per parameter from 10M to 1B parameters: norm + step, ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import accumfused as af
from bench.exact import LR, MAX_GRAD_NORM
from bench.measure import Variant, interleave
from bench.report import Column, Table
from bench.shapes import flat
from bench.suites import Bench, add_gaps
from bench.workload import random_tensors

_BYTES = 16  # parameter, gradient and two states, fp32
_STEP = ("read", "step")


def run(bench: Bench) -> list[Table]:
    sizes = [n * (10_000 if bench.quick else 1_000_000) for n in (10, 50, 100, 250, 500, 1000)]
    fits = [n for n in sizes if bench.fits(n * _BYTES)]
    columns = [
        Column("parameters", "parameters", "{:,}"),
        Column("nanoseconds_per_parameter", "ns/param", "{:.3f}"),
        Column("median_ms", "ms", "{:.1f}"),
        Column("gigabytes_per_second", "GB/s", "{:.1f}"),
        Column("ratio", "to the smallest", "{:.2f}"),
    ]
    table = Table("scale: accumfused, norm + AdamW step from p.grad, one flat tensor", columns)
    left_out = [(n, bench.skipped(n * _BYTES)) for n in sizes if n not in fits]
    if fits:
        _fill(table, bench, fits)
    add_gaps(table, [{"name": f"{n:,}", "parameters": n, "cannot": why} for n, why in left_out])
    return [table]


def _fill(table: Table, bench: Bench, sizes: Sequence[int]) -> None:
    # One allocation for all sizes: each works on the beginning of the same memory.
    param, grad, first, second = (random_tensors(flat(sizes[-1]), scale)[0] for scale in (0.02, 1e-3, 1e-3, 1e-3))
    second.square_().add_(1e-6)
    variants = []
    for n in sizes:
        tensor = torch.nn.Parameter(param[:n])
        tensor.grad = grad[:n]
        optimizer = af.AdamW([tensor], lr=LR, max_grad_norm=MAX_GRAD_NORM, backend=bench.backends[0])
        optimizer.state[tensor] = {"step": torch.tensor(10.0), "exp_avg": first[:n], "exp_avg_sq": second[:n]}
        variants.append(Variant(f"{n:,}", optimizer.step, passes=_STEP))
    timings = interleave(variants, min(3, bench.rounds))
    for n, timing in zip(sizes, timings, strict=True):
        nanoseconds, moved = timing.median * 1e9 / n, timing.variant.bytes_per_parameter
        assert moved is not None
        table.rows.append(
            {
                "name": timing.variant.name, "parameters": n, "median_ms": timing.median * 1e3,
                "nanoseconds_per_parameter": nanoseconds, "gigabytes_per_second": moved / nanoseconds,
                "ratio": nanoseconds * sizes[0] / timings[0].median / 1e9,
            }
        )  # fmt: skip
