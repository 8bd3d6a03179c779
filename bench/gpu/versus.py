"""Ours beside torch's own recipes, by the suite `graph`: clip and AdamW step, eager and captured, on the GPU and on the
host. A step that differs from fp64 is not timed. `of copy` counts the bytes that each recipe's own passes move.
"""

from __future__ import annotations

import statistics

import torch

from bench.gpu.card import card, elements
from bench.gpu.journal import Journal
from bench.measure import Variant
from bench.shapes import GPT2, Shapes, model
from bench.suites import Bench, graph
from bench.tables import Row, median

LARGE = 1_200_000_000
_BYTES = 60  # an element: parameter, gradients of two micro-batches, two states, copies of these, and torch's recipes


def main() -> None:
    bench, own = card(), Journal("versus")
    # A graph of one empty kernel takes what is in every captured figure.
    empty = (lambda: None) if bench.quick else lambda: torch.cuda._sleep(1)
    (floor,) = bench.interleave([Variant("floor", graph.captured(empty, bench.device)[0])], 5 * bench.rounds)
    copies = [bench.ceilings.measure(["scale"])["scale"] for _ in range(bench.rounds)]
    own.write("rates", copy_TBs=statistics.median(copies) / 1e12, floor_us=1e6 * floor.median)
    large = elements(bench, LARGE, _BYTES)
    models = {
        "1000 tensors of 64": [(64,)] * (20 if bench.quick else 1000),
        "one tensor of 2M": [(elements(bench, 2_000_000, _BYTES),)],
        GPT2: model(GPT2, bench.quick),
        f"one tensor of {large:.2g}": [(large,)],
        "10,000 tensors of 64": [(64,)] * (30 if bench.quick else 10_000),
    }
    for name, of in models.items():
        with own.section("versus", model=name):
            measure(bench, own, name, of)
        bench.release()


def measure(bench: Bench, own: Journal, name: str, of: Shapes) -> None:
    for where, table in zip(("on the GPU", "host, cold", "host, warm"), graph.model(bench, name, of), strict=True):
        for row in table.rows:
            failed = {"ok": False} if "cannot" in row else {}
            own.write(where, **failed, model=name, **facts(row))


def facts(row: Row) -> Row:
    """Returns a row's figures, the time in microseconds, and the share of a copy's rate."""
    found = {heading: figure for heading, figure in row.items() if heading not in ("name", "moved B/param")}
    for unit, us in {"us": 1, "ms": 1e3}.items():
        if unit in row:
            found["us"] = us * median(found.pop(unit))
    if "% of ceiling" in row:
        found["of copy"] = found.pop("% of ceiling") / 100
    return {"by": row["name"], **found}


if __name__ == "__main__":
    main()
