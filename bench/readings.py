"""What a row of a results file says: its times, its sizes, or why it has none; and how it stands beside others."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bench.owners import OURS, rivals
from bench.stored import Row, Stored, name

NOISE = 0.05  # times without quartiles: what two runs lie apart
_UNITS = {"milliseconds": "ms", "ms": "ms", "microseconds": "us", "us": "us", "seconds": "s"}
_NANOSECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns/param": 1.0}
_SMALLEST = {"MB": 0.5}  # differences below say nothing: the kernel counts pages to about 0.25 MB


@dataclass(frozen=True)
class Reading:
    """One figure. `quartiles`: None where they are not known."""

    key: str
    value: float
    unit: str
    quartiles: tuple[float, float] | None = None

    @property
    def is_time(self) -> bool:
        return self.unit in _NANOSECONDS

    @property
    def spread(self) -> float:
        """Between the quartiles, as a share of the figure; 0 where it is not known."""
        return (
            0.0 if self.quartiles is None or self.value <= 0 else (self.quartiles[1] - self.quartiles[0]) / self.value
        )

    def common(self) -> float:
        """In nanoseconds, or as it is: the same in every file."""
        return self.value * _NANOSECONDS.get(self.unit, 1.0)

    def matters(self, other: float) -> bool:
        """Whether it differs from another value of its unit by more than its unit can say."""
        return abs(self.value - other) > _SMALLEST.get(self.unit, 0.0)


@dataclass(frozen=True)
class Verdict:
    """How one row stands beside another.

    Args:
        factor: as many times as fast, or as small, as the other; below 1: slower, or larger.
        noise: they do not lie further apart than the rounds, so the factor says nothing.
    """

    factor: float
    noise: bool

    @property
    def lost(self) -> bool:
        return not self.noise and self.factor < 1

    def words(self, reading: Reading, other: str = "") -> str:
        """Of a loss: "20% slower than the other", "2.5 times as large as the other"."""
        times = 1 / self.factor if self.factor > 0 else math.inf
        more, much = ("slower", "slow") if reading.is_time else ("larger", "large")
        if times < 2:
            return f"{times - 1:.0%} {more}" + (f" than {other}" if other else "")
        return f"{times:.1f} times as {much}" + (f" as {other}" if other else "")


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
        return Reading(key, value, unit, _quartiles(row)) if unit in _NANOSECONDS else None
    if key in ("first", "last") and number(row.get("first")) and number(row.get("last")):
        return Reading(key, value, "ns/param")  # suite zeros: the two ends of a run
    ending = key.rpartition("_")[2]
    if ending in _UNITS:
        alone = key in _UNITS  # the row's own time, which its quartiles belong to
        return Reading(key, value, _UNITS[ending], _quartiles(row) if alone else None)
    if ending == "megabytes":
        return Reading(key, value, "MB")
    return Reading(key, value, "B") if ending == "bytes" or key == "bytes_per_parameter" else None


def _quartiles(row: Row) -> tuple[float, float] | None:
    first, third = row.get("first_quartile"), row.get("third_quartile")
    if number(first) and number(third):
        return float(str(first)), float(str(third))
    written = re.fullmatch(r"([\d.]+) - ([\d.]+)", str(row.get("quartiles", "")))
    return (float(written[1]), float(written[2])) if written else None


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


def compared(table: Stored, mine: int, other: int, key: str) -> Verdict | None:
    """Two rows of a table by one of their figures; None where one of them lacks it.

    The factor is the table's own ratio within rounds where it has one. It is noise where the quartiles overlap; where
    they are not known, below NOISE; and where the ratio within rounds and that of the medians point to different sides.
    """
    found = [{reading.key: reading for reading in readings(table.rows[index])}.get(key) for index in (mine, other)]
    own, theirs = found
    if own is None or theirs is None:
        return None
    plain = theirs.value / own.value if own.value > 0 else (math.inf if theirs.value > 0 else 1.0)
    if not own.is_time:
        return Verdict(plain, not own.matters(theirs.value) or abs(plain - 1) < 0.01)
    within = _ratio(table, mine, other) if key == main_time(table) else None
    factor = plain if within is None else within
    if own.quartiles is not None and theirs.quartiles is not None:
        noise = own.quartiles[0] <= theirs.quartiles[1] and theirs.quartiles[0] <= own.quartiles[1]
    else:
        noise = max(factor, 1 / factor if factor > 0 else math.inf) <= 1 + NOISE
    return Verdict(factor, noise or (factor - 1) * (plain - 1) < 0)


def _ratio(table: Stored, mine: int, other: int) -> float | None:
    """The table's column of ratios to the other row: it is 1 there."""
    row, reference = table.rows[mine], table.rows[other]
    keys = (key for key in reference if key.startswith("over_") and reference[key] == 1 and number(row.get(key)))
    key = next(keys, None)
    return None if key is None else float(row[key])


def best(table: Stored, among: list[int], key: str) -> int | None:
    """Of these rows the one with the least of a figure."""
    found = [(reading.value, index) for index in among for reading in readings(table.rows[index]) if reading.key == key]
    return min(found)[1] if found else None


def losses(table: Stored) -> dict[int, list[str]]:
    """Number of a row of ours -> by how much the best of its rivals is faster or smaller. Every figure counts."""
    found: dict[int, list[str]] = {}
    mine = [index for index, row in enumerate(table.rows) if OURS in name(row)]
    for index, reading in [(i, reading) for i in mine for reading in readings(table.rows[i])]:
        other = best(table, rivals(table, index), reading.key)
        verdict = None if other is None else compared(table, index, other, reading.key)
        if other is not None and verdict is not None and verdict.lost:
            of = "" if reading.key == main_time(table) else f" ({reading.key.replace('_', ' ')})"
            found.setdefault(index, []).append(verdict.words(reading, name(table.rows[other])) + of)
    return found
