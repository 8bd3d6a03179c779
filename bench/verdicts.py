"""Whose a row is, and how a row of ours stands beside the others: faster, slower, or within the noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.tables import TIMES, Row, Table, compared, headings, median

OURS, TORCH, OTHERS = "accumfused", "PyTorch alone", "other packages"
NOISE = 0.05  # what two runs lie apart, where quartiles are not known
_PACKAGES = re.compile(
    r"optimi|FlashAdamW|torchao|bitsandbytes|heavyball|DeepSpeedCPUAdam|apex|TransformerEngine|one Triton launch"
)


def owner(row: Row, table: Table) -> str:
    """Returns whose a row is; a table in which no row bears our name is about our own parts."""
    if OURS in row["name"] or not any(OURS in each["name"] for each in table.rows):
        return OURS
    return OTHERS if _PACKAGES.search(row["name"]) else TORCH


def interval(figure: Any) -> tuple[float, float]:
    """Returns the quartiles, or what takes their place."""
    if isinstance(figure, list):
        return figure[0], figure[2]
    return figure * (1 - NOISE / 2), figure * (1 + NOISE / 2)


@dataclass(frozen=True)
class Verdict:
    """Says how a row stands beside another one.

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
        """Says it: "1.29 times as fast as X", "20% slower than X", "within the noise of X"."""
        fast, slow = ("fast", "slow") if is_time(self.heading) else ("small", "large")
        if self.noise:
            return f"{'within the noise of' if is_time(self.heading) else 'as large as'} {self.other}"
        if self.factor >= 1:
            return f"{self.factor:.2f} times as {fast} as {self.other}"
        if self.factor <= 0.5:
            return f"{1 / self.factor:.1f} times as {slow} as {self.other}"
        return f"{1 / self.factor - 1:.0%} {slow.removesuffix('e')}er than {self.other}"


def is_time(heading: str) -> bool:
    return heading.rpartition(" ")[2] in TIMES


def main_time(table: Table) -> str | None:
    """Returns the table's first heading of times."""
    return next((heading for heading in headings(table) if is_time(heading)), None)


def verdict(row: Row, other: Row, heading: str) -> Verdict:
    """Compares two rows by a heading that both have.

    The factor is the ratio within rounds where the table has it. Rows are within the noise where their quartiles
    overlap, and where the ratio within rounds and that of the medians name different winners.
    """
    (low, high), (other_low, other_high) = interval(row[heading]), interval(other[heading])
    mine = median(row[heading])
    plain = factor = median(other[heading]) / mine if mine > 0 else float("inf")
    ratio = next((key for key in other if key.startswith("x ") and other[key] == 1 and row.get(key)), None)
    if ratio is not None and heading == next(filter(is_time, row), None):
        factor = float(row[ratio])
    noise = (low <= other_high and other_low <= high) or (factor - 1) * (plain - 1) < 0
    return Verdict(row["name"], other["name"], heading, factor, noise)


def best_rival(table: Table, heading: str, owners: Sequence[str] = (TORCH, OTHERS)) -> Row | None:
    """Returns the row with the least of a figure among those of others."""
    having = [row for row in table.rows if heading in compared(row) and owner(row, table) in owners]
    return min(having, key=lambda row: compared(row)[heading], default=None)


def headline(table: Table, heading: str, owners: Sequence[str] = (TORCH, OTHERS)) -> Verdict | None:
    """Compares our row with the best of the others; None where one is missing.

    In time that is our first row, which is the plain one; in size our smallest: each format has a row of its own.
    """
    mine = [row for row in table.rows if heading in compared(row) and owner(row, table) == OURS]
    other = best_rival(table, heading, owners)
    if not mine or other is None:
        return None
    row = mine[0] if is_time(heading) else min(mine, key=lambda row: compared(row)[heading])
    return verdict(row, other, heading)


def losses(table: Table) -> list[Verdict]:
    """Returns every time and size in which the best of the others beats a row of ours."""
    found = []
    for row in table.rows:
        for heading in compared(row) if owner(row, table) == OURS else ():
            other = best_rival(table, heading)
            if other is not None and verdict(row, other, heading).lost:
                found.append(verdict(row, other, heading))
    return found


def loss_lines(table: Table) -> list[str]:
    return [f"{each.name}: {each.words()} ({each.heading})" for each in losses(table)]


def summary(tables: Sequence[Table]) -> str:
    """Says in one sentence how often ours is faster than the best recipe of PyTorch alone, slower, or neither."""
    found = [headline(table, heading, [TORCH]) for table in tables if (heading := main_time(table))]
    verdicts = [each for each in found if each is not None]
    fast = sorted(each.factor for each in verdicts if not each.noise and not each.lost)
    said = f"accumfused beside the best recipe of PyTorch alone: faster in {len(fast)} of {len(verdicts)} comparisons"
    said += f" (by {' to '.join(dict.fromkeys(f'{each:.2f}' for each in (fast[0], fast[-1])))} times)" if fast else ""
    counts = {"slower": sum(each.lost for each in verdicts), "within the noise": sum(each.noise for each in verdicts)}
    return said + "".join(f", {how} in {count}" for how, count in counts.items() if count)
