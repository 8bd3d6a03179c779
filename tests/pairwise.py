"""Few rows of many axes, in which every two values of two axes meet: a covering array of strength 2.

Most defects need one value or a pair of them, seldom more (Kuhn, Wallace and Gallo 2004, "Software fault interactions
and implications for software testing").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[int, int, int, int]  # an axis and the place of its value, twice
MOST = 10_000  # rows: a test of millions would fill the memory before the first one runs


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All of them; where these are too many, pairs."""
    return [*itertools.product(*axes.values())] if math.prod(map(len, axes.values())) <= MOST else pairwise(axes)


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis, the same ones in every call; greedy, so not the fewest possible."""
    sizes = [len(values) for values in axes.values()]
    left: dict[Pair, None] = {
        (one, i, other, j): None
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[one]), range(sizes[other]))
    }
    rows = []
    while left:
        one, i, other, j = next(iter(left))
        row = {one: i, other: j}
        for axis in (axis for axis in range(len(sizes)) if axis not in row):
            row[axis] = max(range(sizes[axis]), key=lambda value: sum(p in left for p in _pairs(row, axis, value)))
        for axis, value in row.items():
            for pair in _pairs(row, axis, value):
                left.pop(pair, None)
        rows.append(tuple(values[row[axis]] for axis, values in enumerate(axes.values())))
    return rows


def _pairs(row: Mapping[int, int], axis: int, value: int) -> list[Pair]:
    """Those of this value with what the row has already."""
    ordered = [sorted([(axis, value), item]) for item in row.items() if item[0] != axis]
    return [(*one, *other) for one, other in ordered]
