"""What a run leaves: tables for people, JSON for programs. Both show the same rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.console import Console

import accumfused
from bench.ceilings import MIXES, Ceilings, seconds_at
from bench.measure import Timing
from bench.stored import FORMAT

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A key of the rows, its heading, and how a number is written."""

    key: str
    heading: str
    format: str = "{}"


@dataclass
class Table:
    """One table. `Column`s choose what is printed; JSON has every key of the rows."""

    title: str
    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def timed(
    title: str,
    timings: Sequence[Timing],
    parameters: int,
    ceilings: Ceilings,
    against: Mapping[str, str] | None = None,
    unit: str = "ms",
) -> Table:
    """A table of timings: time, bytes, rate, share of the ceiling, and ratios.

    Args:
        parameters: how many the variants work on.
        against: heading -> name of the variant that the others are compared with; 1.5 means: 1.5 times as fast as it.
        unit: "ms" or "us".

    Ratios and shares are medians of the ratios within each round; "best / best" compares the best rates of the run.
    """
    against = dict(against or {})
    if ceilings.reason is not None or not any(timing.at_ceiling for timing in timings):
        shares = []
    else:
        shares = [Column("share", "of ceiling", "{:.0%}"), Column("share_best", "best / best", "{:.0%}")]
    factor = {"ms": 1e3, "us": 1e6}[unit]
    decimals = 1 if min(timing.median for timing in timings) * factor >= 10 else 3
    table = Table(
        title,
        [
            Column("name", ""),
            Column("median", unit, f"{{:.{decimals}f}}"),
            Column("quartiles", "quartiles"),
            Column("bytes_per_parameter", "B/param", "{:g}"),
            Column("gigabytes_per_second", "GB/s", "{:.1f}"),
            *shares,
            *(Column(f"over_{heading}", f"x {heading}", "{:.2f}") for heading in against),
        ],
    )
    by_name = {timing.variant.name: timing for timing in timings}
    for timing in timings:
        first, third = timing.quartiles
        moved = timing.variant.bytes_per_parameter
        at_best = seconds_at(ceilings.best_rates(), timing.variant.passes)
        row: Row = {
            "name": timing.variant.name,
            "unit": unit,
            "median": timing.median * factor,
            "first_quartile": first * factor,
            "third_quartile": third * factor,
            "best": timing.best * factor,
            "quartiles": f"{first * factor:.{decimals}f} - {third * factor:.{decimals}f}",
            "rounds": len(timing.seconds),
            "nanoseconds_per_parameter": timing.median * 1e9 / parameters,
            "bytes_per_parameter": moved,
            "gigabytes_per_second": None if moved is None else moved * parameters / timing.median / 1e9,
            "share": timing.share_of_ceiling(parameters),
            "share_best": None if at_best is None else at_best * parameters / timing.best,
        }
        for heading, name in against.items():
            row[f"over_{heading}"] = timing.times_as_fast_as(by_name[name])
        table.rows.append(row)
    return table


def ceiling_table(ceilings: Ceilings) -> Table:
    """The rates that the shares refer to."""
    columns = [
        Column("name", ""),
        Column("bytes", "read + written"),
        Column("best", "GB/s, best", "{:.1f}"),
        Column("median", "median", "{:.1f}"),
        Column("meaning", "stands for"),
    ]
    table = Table("Ceilings: streaming loops of the same mixes, measured in the same rounds", columns)
    if ceilings.reason is not None:
        table.notes.append(f"not measured, and the share of the ceiling is left out: {ceilings.reason}")
    best, median, loops = ceilings.best_rates(), ceilings.median_rates(), ceilings.fastest_loops()
    for name, mix in MIXES.items():
        if name in best:
            row = {"name": name, "bytes": f"{mix.read} + {mix.written}", "meaning": mix.meaning}
            table.rows.append({**row, "best": best[name] / 1e9, "median": median[name] / 1e9, "loop": loops[name]})
    return table


def show(table: Table, console: Console) -> None:
    drawn = rich.table.Table(title=table.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE)
    for index, column in enumerate(table.columns):
        drawn.add_column(column.heading, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        values = [(column, row.get(column.key)) for column in table.columns]
        drawn.add_row(*("-" if value is None else column.format.format(value) for column, value in values))
    if table.rows:
        console.print(drawn)
    else:
        console.print(table.title, style="bold")
    for note in table.notes:
        console.print(f"  {note}", markup=False, highlight=False)


def write_json(
    path: Path, about: dict[str, Any], suites: Mapping[str, Sequence[Table]], *, interrupted: bool = False
) -> None:
    """`{"format", "accumfused", "machine", "suites": {name: [{"title", "columns", "rows", "notes"}]}}`.

    Args:
        interrupted: the run was; the file says so.
    """
    tables = {
        suite: [
            {
                "title": table.title,
                "columns": [asdict(column) for column in table.columns],
                "rows": table.rows,
                "notes": table.notes,
            }
            for table in found
        ]
        for suite, found in suites.items()
    }
    whole = {"format": FORMAT, "accumfused": accumfused.__version__, "machine": about, "suites": tables}
    if interrupted:
        whole["interrupted"] = True
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")  # what was there stays whole if this is interrupted
    written.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
