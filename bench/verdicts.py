"""Whose a row is, and how a row of ours compares with the others: faster, slower, or within the noise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bench.tables import TIMES, Row, Table, compared, median

OURS, TORCH, OTHERS = "accumfused", "PyTorch alone", "other packages"
NOISE = 0.05  # the distance of two runs, where quartiles are not known
_PACKAGES = re.compile("torchao|bitsandbytes|DeepSpeed|optimi|FlashAdamW")  # the last two in older results


def owner(row: Row, table: Table) -> str:
    """Returns whose a row is; a table in which no row bears our name is about our own parts."""
    if OURS in row["name"] or not any(OURS in each["name"] for each in table.rows):
        return OURS
    return OTHERS if _PACKAGES.search(row["name"]) else TORCH


def interval(figure: Any) -> tuple[float, float]:
    """Returns the quartiles, or the noise around a single figure."""
    if isinstance(figure, list):
        return figure[0], figure[2]
    return figure * (1 - NOISE / 2), figure * (1 + NOISE / 2)


def is_time(heading: str) -> bool:
    return heading.rpartition(" ")[2] in TIMES


@dataclass(frozen=True)
class Verdict:
    """How a row of ours compares with the best of the others.

    Args:
        factor: as many times as fast, or as small, as the other; below 1: slower, or larger.
        noise: the two lie no further apart than the rounds do, so the factor says nothing.
    """

    name: str
    other: str
    heading: str
    factor: float
    noise: bool

    @property
    def lost(self) -> bool:
        return not self.noise and self.factor < 1

    def words(self) -> str:
        if self.noise:
            return f"{'within the noise of' if is_time(self.heading) else 'as large as'} {self.other}"
        better, worse = ("fast", "slow") if is_time(self.heading) else ("small", "large")
        factor, word = (self.factor, better) if self.factor >= 1 else (1 / self.factor, worse)
        return f"{factor:.2f} times as {word} as {self.other}"


def verdict(row: Row, table: Table, heading: str) -> Verdict | None:
    """Compares a row of ours with the best of the others; None where there is no such pair.

    The factor is the ratio within rounds where the table has it. Rows are within the noise where their quartiles
    overlap, and where the ratio within rounds and that of the medians name different winners.
    """
    others = [each for each in table.rows if heading in compared(each) and owner(each, table) != OURS]
    if not others or heading not in compared(row) or owner(row, table) != OURS:
        return None
    other = min(others, key=lambda each: compared(each)[heading])
    (low, high), (other_low, other_high) = interval(row[heading]), interval(other[heading])
    mine = median(row[heading])
    plain = factor = median(other[heading]) / mine if mine > 0 else float("inf")
    ratio = next((key for key in other if key.startswith("x ") and other[key] == 1 and row.get(key)), None)
    if ratio is not None and heading == next(filter(is_time, row), None):
        factor = float(row[ratio])
    noise = (low <= other_high and other_low <= high) or (factor - 1) * (plain - 1) < 0
    return Verdict(row["name"], other["name"], heading, factor, noise)


def losses(table: Table) -> list[Verdict]:
    """Returns every time and size in which the best of the others beats a row of ours."""
    pairs = ((row, heading) for row in table.rows for heading in compared(row))
    return [found for row, heading in pairs if (found := verdict(row, table, heading)) is not None and found.lost]
