"""Tables that take one call apart: their parts and what is left sum to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.stored import Row, Stored, name

WHOLE, REST = "the whole step()", "the rest"
_KEY = "microseconds"


def with_rest(rows: Sequence[Row]) -> list[Row]:
    """The rows, with what no part has taken before the whole; as they are where they are not parts, or sum to more."""
    whole = next((row[_KEY] for row in rows if name(row) == WHOLE), None)
    rest = 0.0 if whole is None else whole - _sum(rows)
    if rest <= 0 or any(name(row) == REST for row in rows):
        return list(rows)
    left: dict[str, Any] = {"name": REST, _KEY: rest}
    return [*(row for row in rows if name(row) != WHOLE), left, *(row for row in rows if name(row) == WHOLE)]


def _sum(rows: Sequence[Row]) -> float:
    return sum(float(row[_KEY]) for row in rows if name(row) != WHOLE)


def completed(table: Stored) -> Stored:
    """A stored table with its rest, or with a note where its parts, timed apart, sum to more than the whole."""
    rows, notes = with_rest(table.rows), table.notes
    whole = next((row[_KEY] for row in rows if name(row) == WHOLE), None)
    if whole is not None and _sum(rows) > 1.001 * whole:
        more = (
            f"the parts sum to {_sum(rows) / whole:.0%} of the whole ({_sum(rows):,.0f} of {whole:,.0f} us): this run "
            "timed each by itself and not within step(), where the part before it leaves other data in the caches"
        )
        notes = [*notes, more]
    return replace(table, rows=rows, notes=notes)
