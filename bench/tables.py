"""Tables of figures: how a suite makes them, a terminal shows them, and a JSON file keeps them.

A row is a mapping from headings to figures. A heading that ends in a unit ("ms", "kept B/param") has times or sizes, of
which less is better; these are compared. A figure is a number or [first quartile, median, third quartile].
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.ceilings import MIXES, Ceilings
from bench.measure import Timing

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 2
TIMES = ("ms", "us")
UNITS = (*TIMES, "B/param", "MB")

Row = dict[str, Any]


class ResultsError(ValueError):
    """Says in one line why a file cannot be used."""


@dataclass
class Table:
    """`rows`: each has a "name"; one without figures says under "cannot" why. `notes`: lines below the table."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Results:
    """Holds what one file holds. `interrupted`: suites are missing, for the run was stopped."""

    machine: dict[str, Any]
    suites: dict[str, list[Table]]
    interrupted: bool = False

    def where(self) -> str:
        """Says the machine, the versions and the date in a line."""
        about = self.machine
        parts = [about.get("gpu"), about.get("cpu"), about.get("instruction_set"), f"{about.get('threads')} threads"]
        parts += [f"{name} {about[name]}" for name in ("accumfused", "torch") if about.get(name)]
        return ", ".join(str(part) for part in [*parts, about.get("date")] if part)


def quartiles(values: Sequence[float], factor: float = 1.0) -> list[float]:
    """Returns [first quartile, median, third quartile], each times the factor."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return [factor * value for value in found]


def timed(
    title: str,
    timings: Sequence[Timing],
    parameters: int,
    against: Mapping[str, str] | None = None,
    unit: str = "ms",
) -> Table:
    """Makes a table of timings: time, bytes, share of the ceiling, and ratios, which are medians over the rounds.

    Args:
        parameters: how many the variants work on.
        against: heading -> name of the variant that the others are compared with; 1.5 means: 1.5 times as fast as it.
        unit: "ms" or "us".
    """
    by_name = {timing.variant.name: timing for timing in timings}
    table = Table(title)
    for timing in timings:
        row: Row = {"name": timing.variant.name, unit: quartiles(timing.seconds, {"ms": 1e3, "us": 1e6}[unit])}
        if timing.variant.passes is not None:
            row["moved B/param"] = sum(MIXES[mix].bytes for mix in timing.variant.passes)
        share = timing.share_of_ceiling(parameters)
        if share is not None:
            row["% of ceiling"] = 100 * share
        for heading, other in (against or {}).items():
            if other in by_name:
                row[f"x {heading}"] = timing.times_as_fast_as(by_name[other])
        table.rows.append(row)
    return table


def ceiling_table(ceilings: Ceilings) -> Table:
    """Makes the table of the rates that the shares refer to."""
    table = Table("Ceilings: streaming loops of the same mixes, measured in the same rounds")
    if ceilings.reason is not None:
        table.notes.append(f"not measured, and the share of the ceiling is left out: {ceilings.reason}")
    for mix, rates in ceilings.rates.items():
        middle, best = statistics.median(rates) / 1e9, max(rates) / 1e9
        table.rows.append({"name": mix, "GB/s": middle, "best GB/s": best, "stands for": MIXES[mix].meaning})
    return table


def headings(table: Table) -> list[str]:
    return list(dict.fromkeys(heading for row in table.rows for heading in row if heading != "name"))


def show(table: Table, console: Console, losses: Sequence[str] = ()) -> None:
    """Prints a table; `losses`: lines about rows of ours that another row beats."""
    import rich.box
    import rich.table

    drawn = rich.table.Table("", title=table.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE)
    columns = headings(table)
    for heading in columns:
        drawn.add_column(heading, justify="left" if heading == "cannot" else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(row["name"], *(text(row.get(heading)) for heading in columns))
    console.print(drawn)
    for line in losses:
        console.print(f"  {line}", style="red", markup=False, highlight=False)
    for note in table.notes:
        console.print(f"  {note}", markup=False, highlight=False)


def text(value: Any) -> str:
    """Writes a figure with three digits, or all of its integer part; quartiles in brackets; "-" for None."""
    if isinstance(value, list):
        return f"{text(value[1])} ({text(value[0])} - {text(value[2])})"
    if isinstance(value, float | int):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def median(figure: Any) -> float:
    return float(figure[1] if isinstance(figure, list) else figure)


def compared(row: Row) -> dict[str, float]:
    """Returns heading -> median of a row's times and sizes."""
    found = {heading: figure for heading, figure in row.items() if heading.rpartition(" ")[2] in UNITS}
    return {heading: median(figure) for heading, figure in found.items() if figure is not None}


def write(path: Path, results: Results) -> None:
    """Writes a results file: a line a row, four digits a figure."""
    suites = {
        suite: [{"title": table.title, "rows": table.rows, "notes": table.notes} for table in tables]
        for suite, tables in results.suites.items()
    }
    rounded = json.loads(json.dumps(suites), parse_float=lambda figure: float(f"{float(figure):.4g}"))
    whole = {"format": FORMAT, "machine": results.machine, "interrupted": results.interrupted, "suites": rounded}
    lines = json.dumps(whole).replace('{"title"', '\n{"title"').replace('{"name"', '\n{"name"')
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # an interruption leaves the older file whole
    part.write_text(lines + "\n", encoding="utf-8")
    part.replace(path)


def load(path: Path) -> Results:
    """Reads a results file.

    Raises:
        ResultsError: it is not there, is no such file, or has another format number.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    try:
        if found["format"] != FORMAT:
            raise ResultsError(f"{path} has format {found['format']!r}, and this version reads {FORMAT}")
        suites = {suite: [Table(**table) for table in tables] for suite, tables in found["suites"].items()}
        _ = [compared(row) for tables in suites.values() for table in tables for row in table.rows if row["name"]]
        return Results(dict(found["machine"]), suites, found["interrupted"])
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ResultsError(f"{path} is no results file of python -m bench --json ({why})") from error
