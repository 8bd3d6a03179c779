"""ns per parameter from 10M to 500M parameters: norm + step, ours."""

from __future__ import annotations

import torch

import accumfused as af
from bench.measure import Variant, interleave
from bench.report import Column, Table
from bench.shapes import count, flat
from bench.suites import Bench
from bench.workload import random_tensors

_BYTES = 16  # parameter, gradient and two states, fp32


def run(bench: Bench) -> list[Table]:
    sizes = [n * (10_000 if bench.quick else 1_000_000) for n in (10, 50, 100, 250, 500)]
    available = available_bytes()
    fits = [n for n in sizes if available is None or n * _BYTES * 1.1 < available]
    columns = [
        Column("parameters", "parameters", "{:,}"),
        Column("nanoseconds_per_parameter", "ns/param", "{:.3f}"),
        Column("median_ms", "ms", "{:.1f}"),
        Column("gigabytes_per_second", "GB/s", "{:.1f}"),
        Column("ratio", "to the smallest", "{:.2f}"),
    ]
    table = Table("scale: accumfused, norm + AdamW step from p.grad, one flat tensor", columns)
    for n in sizes:
        if n not in fits:
            table.notes.append(f"{n:,} parameters need {n * _BYTES / 2**30:.1f} GiB, which are not available: left out")
    if not fits:
        return [table]
    # One allocation for all sizes: each works on the beginning of the same memory.
    param, grad, first, second = (random_tensors(flat(max(fits)), scale)[0] for scale in (0.02, 1e-3, 1e-3, 1e-3))
    second.square_()
    variants = []
    for n in fits:
        assert count(flat(n)) == n
        tensor = torch.nn.Parameter(param[:n])
        tensor.grad = grad[:n]
        optimizer = af.AdamW([tensor], lr=1e-4, max_grad_norm=1.0)
        optimizer.state[tensor] = {"step": torch.tensor(10.0), "exp_avg": first[:n], "exp_avg_sq": second[:n]}
        variants.append(Variant(f"{n:,}", optimizer.step, passes=("read", "step")))
    for n, timing in zip(fits, interleave(variants, bench.rounds), strict=True):
        table.rows.append(
            {
                "parameters": n,
                "median_ms": timing.median * 1e3,
                "nanoseconds_per_parameter": timing.median * 1e9 / n,
                "gigabytes_per_second": 32 * n / timing.median / 1e9,
            }
        )
    for row in table.rows:
        row["ratio"] = row["nanoseconds_per_parameter"] / table.rows[0]["nanoseconds_per_parameter"]
    return [table]


def available_bytes() -> int | None:
    """Free memory, or None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
