"""What a row of a results file says: its times, its sizes, or why it has none."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bench.stored import Row, Stored, name

OURS = "accumfused"
_UNITS = {"milliseconds": "ms", "ms": "ms", "microseconds": "us", "us": "us", "seconds": "s"}
_NANOSECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns/param": 1.0}
_SMALLEST = {"MB": 0.5}  # differences below say nothing: the kernel counts pages to about 0.25 MB


@dataclass(frozen=True)
class Reading:
    """One figure. `spread`: between the quartiles, as a share of the figure; 0 where it is not known."""

    key: str
    value: float
    unit: str
    spread: float = 0.0

    @property
    def is_time(self) -> bool:
        return self.unit in _NANOSECONDS

    def common(self) -> float:
        """In nanoseconds, or as it is: the same in every file."""
        return self.value * _NANOSECONDS.get(self.unit, 1.0)

    def matters(self, other: float) -> bool:
        """Whether it differs from another value of its unit by more than its unit can say."""
        return abs(self.value - other) > _SMALLEST.get(self.unit, 0.0)


def readings(row: Row) -> list[Reading]:
    """All times and sizes of a row. What is derived from another time of the row is left out."""
    found = [_reading(row, key) for key in row]
    kept = [reading for reading in found if reading is not None]
    if not any(reading.is_time for reading in kept) and number(row.get("nanoseconds_per_parameter")):
        kept.append(Reading("nanoseconds_per_parameter", row["nanoseconds_per_parameter"], "ns/param"))
    return kept


def _reading(row: Row, key: str) -> Reading | None:
    value = row[key]
    if not number(value):
        return None
    if key == "median":
        unit = row.get("unit")  # without one it is a rate, of the ceilings
        return Reading(key, value, unit, _spread(row, value)) if unit in _NANOSECONDS else None
    if key in ("first", "last") and number(row.get("first")) and number(row.get("last")):
        return Reading(key, value, "ns/param")  # suite zeros: the two ends of a run
    ending = key.rpartition("_")[2]
    if ending in _UNITS:
        alone = key in _UNITS  # the row's own time, which its quartiles belong to
        return Reading(key, value, _UNITS[ending], _spread(row, value) if alone else 0.0)
    if ending == "megabytes":
        return Reading(key, value, "MB")
    return Reading(key, value, "B") if ending == "bytes" or key == "bytes_per_parameter" else None


def _spread(row: Row, value: float) -> float:
    quartiles = [row.get("first_quartile"), row.get("third_quartile")]
    if not all(map(number, quartiles)):
        written = re.fullmatch(r"([\d.]+) - ([\d.]+)", str(row.get("quartiles", "")))
        quartiles = [float(end) for end in written.groups()] if written else [value, value]
    first, third = (float(end) for end in quartiles if end is not None)
    return (third - first) / value if value > 0 else 0.0


def number(value: object) -> bool:
    """A finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def main_time(table: Stored) -> str | None:
    """The key of the table's first time, which its bars show; None where it has none."""
    found = (reading.key for row in table.rows for reading in readings(row) if reading.is_time)
    return next(found, None)


def gap(row: Row) -> str | None:
    """Why a row has no time: "cannot: ...". None where it says nothing about that."""
    reason = row.get("cannot")
    if not isinstance(reason, str):
        words = (value for key, value in row.items() if key != "name" and isinstance(value, str))
        reason = next((word for word in words if word.startswith(("cannot", "skipped"))), None)
    return reason if reason is None or reason.startswith(("cannot", "skipped")) else f"cannot: {reason}"


def losses(table: Stored) -> dict[int, list[str]]:
    """Number of a row of ours -> by how much others in the table are faster or smaller. Every figure counts."""
    found: dict[int, list[str]] = {}
    mine = ours(table)
    others = [
        (name(row), reading) for row, is_ours in zip(table.rows, mine, strict=True) if not is_ours
        for reading in readings(row)
    ]  # fmt: skip
    for index, (row, is_ours) in enumerate(zip(table.rows, mine, strict=True)):
        if not is_ours:
            continue
        for reading in readings(row):
            same = [(other.value, called) for called, other in others if other.key == reading.key]
            least, called = min(same, default=(math.inf, ""))
            if least < reading.value and reading.matters(least):
                slow, factor = reading.is_time, reading.value / least if least > 0 else math.inf
                by = f"{factor - 1:.0%} {'slower' if slow else 'larger'} than"
                if factor >= 2:
                    by = f"{factor:.1f} times as {'slow' if slow else 'large'} as"
                of = "" if reading.key == main_time(table) else f" ({reading.key.replace('_', ' ')})"
                found.setdefault(index, []).append(f"{by} {called}{of}")
    return found


def ours(table: Stored) -> list[bool]:
    """Which rows are ours. A table in which nobody bears our name is about our own parts or sizes."""
    found = [name(row).startswith(OURS) for row in table.rows]
    return found if any(found) else [True] * len(found)
