"""What a results file says in a few lines: ours beside the best stock recipe, table by table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.owners import OTHERS, OURS, TORCH, owners, rivals
from bench.readings import Reading, Verdict, best, compared, main_time, readings
from bench.stored import Results, Stored, name, text


@dataclass(frozen=True)
class Line:
    """One table's times: the first row of ours, which is the plain one, and the fastest of torch's.

    Args:
        faster: another package that is faster than ours, and by how much, in words; empty where none is.
    """

    title: str
    ours: Reading
    stock: Reading
    recipe: str
    verdict: Verdict
    faster: str

    def words(self) -> str:
        if self.verdict.noise:
            said = "within the noise"
        elif self.verdict.lost:
            said = self.verdict.words(self.ours)
        else:
            said = f"{self.verdict.factor:.2f} times as fast"
        return f"{said}; {self.faster}" if self.faster else said


def lines(results: Results) -> list[Line]:
    """One for each table that has a time of ours and one of torch's."""
    return [line for table in results.tables for key in _keys(table) for line in _lines(table, key)]


def _keys(table: Stored) -> list[str]:
    """The main time; of a run's two ends both."""
    key = main_time(table)
    return ["first", "last"] if key == "first" else [key] if key is not None else []


def _lines(table: Stored, key: str) -> list[Line]:
    owned = owners(table)
    having = {
        index: reading for index, row in enumerate(table.rows) for reading in readings(row) if reading.key == key
    }  # fmt: skip
    mine = next((index for index in having if owned[index] == OURS), None)
    if mine is None:
        return []
    stock = best(table, [index for index in rivals(table, mine) if owned[index] == TORCH], key)
    other = best(table, [index for index in rivals(table, mine) if owned[index] == OTHERS], key)
    verdict = None if stock is None else compared(table, mine, stock, key)
    if stock is None or verdict is None:
        return []
    theirs = None if other is None else compared(table, mine, other, key)
    faster = ""
    if other is not None and theirs is not None and theirs.lost:
        faster = theirs.words(having[mine], name(table.rows[other]))
    title = re.sub(r" \([^()]*parameters\)$", "", table.title)
    title = title if key != "first" and key != "last" else f"{title}: {_heading(table, key)}"
    return [Line(title, having[mine], having[stock], name(table.rows[stock]), verdict, faster)]


def _heading(table: Stored, key: str) -> str:
    return next((column["heading"] for column in table.columns if column["key"] == key), key)


def sentence(found: list[Line]) -> str:
    """The whole in one: how often faster, and by how much, how often slower, how often neither."""
    fast = sorted(line.verdict.factor for line in found if not line.verdict.noise and not line.verdict.lost)
    slow = sum(line.verdict.lost for line in found)
    said = [
        f"faster in {len(fast)} of {len(found)} comparisons"
        + (f", by {fast[0]:.2f} to {fast[-1]:.2f} times" if fast else "")
    ]
    said += [f"slower in {slow}"] if slow else []
    said += [f"within the noise in {noise}"] if (noise := sum(line.verdict.noise for line in found)) else []
    return f"accumfused beside the best recipe of PyTorch alone: {', '.join(said)}."


def figures(reading: Reading) -> str:
    return f"{text(reading.value)} {reading.unit}"
