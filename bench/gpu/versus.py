"""Ours beside torch's own recipes, by the suite `graph`: clip and AdamW step, eager and captured, on the GPU and on the
host. A step that differs from fp64 is not timed. `of a copy` counts the bytes that each recipe's own passes move.

`python -m bench.gpu.versus small` times ours alone, on small models.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial

import torch

from bench.gpu.card import card, elements, run
from bench.measure import Variant
from bench.shapes import GPT2, Shapes, model
from bench.suites import Bench, graph
from bench.tables import Row, median

LARGE = 1_200_000_000
_BYTES = 60  # an element: parameter, gradients of two micro-batches, two states, copies of these, and torch's recipes


def main(small: bool) -> int:
    bench = card()
    # A graph of one empty kernel takes what is in every captured figure.
    empty = (lambda: None) if bench.quick else lambda: torch.cuda._sleep(1)
    (floor,) = bench.interleave([Variant("floor", graph.captured(empty, bench.device)[0])], 5 * bench.rounds)
    copies = [bench.ceilings.measure(["scale"])["scale"] for _ in range(bench.rounds)]
    print(f"a copy: {statistics.median(copies) / 1e12:.4g} TB/s; an empty graph: {1e6 * floor.median:.1f} us")
    large = elements(bench, LARGE, _BYTES)
    one = {"one tensor of 64": [(64,)], "one tensor of 2M": [(elements(bench, 2_000_000, _BYTES),)]}
    some = {f"{n:,} tensors of 64": [(64,)] * (min(n, 20) if bench.quick else n) for n in (148, 1000, 10_000)}
    if small:
        return run({name: partial(measure, bench, name, of, ()) for name, of in (some | one).items()})
    many = {name: some[name] for name in ("1,000 tensors of 64", "10,000 tensors of 64")}
    models = many | one | {GPT2: model(GPT2, bench.quick), f"one tensor of {large:.2g}": [(large,)]}
    return run({name: partial(measure, bench, name, of) for name, of in models.items()})


def measure(bench: Bench, name: str, of: Shapes, recipes: Sequence[str] = graph.RECIPES) -> None:
    """Prints a line for each recipe.

    Raises:
        RuntimeError: ours is wrong, or does not run.
    """
    on_gpu, *of_host = graph.model(bench, name, of, recipes)
    hosts = [{row["name"]: row for row in table.rows} for table in of_host]
    wrong = []
    for row in on_gpu.rows:
        by = row["name"]
        if "cannot" in row:
            print(f"{name}, {by}: cannot: {row['cannot']}")
            wrong += [by] if "accumfused" in by else []
            continue
        cold, warm = (1e6 * _seconds(rows[by]) for rows in hosts)
        share = f", {row['% of ceiling'] / 100:.3f} of a copy" if "% of ceiling" in row else ""
        launches = f", {row['launches']} launches" if row["launches"] else ""
        of_gpu = f"GPU {1e6 * _seconds(row):.4g} us{share}{launches}"
        print(f"{name}, {by}: {of_gpu}, host cold {cold:.4g} us, warm {warm:.4g} us")
    bench.release()
    if wrong:
        raise RuntimeError(f"not right: {', '.join(wrong)}")


def _seconds(row: Row) -> float:
    return median(row["us"]) / 1e6 if "us" in row else median(row["ms"]) / 1e3


if __name__ == "__main__":
    sys.exit(main("small" in sys.argv[1:]))
