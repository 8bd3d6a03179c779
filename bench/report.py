"""`python -m bench report FILE`: a results file as one page of bars, PNG and SVG.

Each table has a panel for its first time, and one for each size that is kept. Colours are owners. A bar is a median, a
thin line goes from quartile to quartile, a thick mark is the ceiling of the same bytes. Under the title stands how our
first row compares with the best of the others; a row of ours that another one beats has a red figure.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.compare import doubts
from bench.tables import Results, ResultsError, Row, Table, compared, headings, load, median, text
from bench.verdicts import OTHERS, OURS, TORCH, Verdict, interval, is_time, losses, owner, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {OURS: "#0072b2", TORCH: "#9a9a9a", OTHERS: "#e69f00"}
LOST = "#b03a2e"
_HOW = "Bars: medians. Thin lines: quartiles. Thick marks: this machine's ceiling for the same bytes."
_LONG = 4  # times our longest: bars that are far longer end there
_COLUMNS = 3
# Inches of a column, the names in it, a row, a panel's title with the gap above it, and the lines at the top.
_WIDTH, _NAMES, _ROW, _HEAD, _TOP = 6.2, 2.8, 0.25, 0.75, 0.7
SETTINGS: Any = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "accumfused", "text.parse_math": False}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of python -m bench --json")
    parser.add_argument("--output", type=Path, default=Path("build/report"), metavar="NAME",
                        help="of the pictures, without .png and .svg; default: %(default)s")  # fmt: skip
    chosen = parser.parse_args(arguments)
    try:
        import matplotlib

        results = load(chosen.file)
    except (ImportError, ResultsError) as error:
        missing = "matplotlib draws the report, and is not installed; pip install --group bench"
        print(missing if isinstance(error, ImportError) else error, file=sys.stderr)
        return 2
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        figure = page(results)
        for ending in (".png", ".svg"):
            figure.savefig(chosen.output.with_name(chosen.output.name + ending), dpi=110)
            print(chosen.output.with_name(chosen.output.name + ending))
    return 0


def panels(results: Results) -> list[tuple[Table, str]]:
    """Returns the tables that are drawn, with the heading of the panel's bars."""
    tables = [table for suite, several in results.suites.items() if suite != "ceilings" for table in several]
    found = []
    for table in tables:
        first = next((heading for heading in headings(table) if is_time(heading)), None)
        sizes = [heading for heading in headings(table) if heading.startswith(("kept ", "peak "))]
        found += [(table, heading) for heading in (first, *sizes) if heading is not None]
    return found


def page(results: Results) -> Figure:
    """Draws all panels, each in the column that is the shortest so far."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places, columns = [], [_TOP] * _COLUMNS
    for panel in panels(results):
        column = columns.index(min(columns))
        columns[column] += _HEAD + _ROW * len(_rows(*panel))
        places.append((panel, column, columns[column]))
    width, height = _COLUMNS * _WIDTH, max(columns) + 0.2
    figure = Figure(figsize=(width, height))
    lines = [results.where(), _HOW, *(f"This run {words}." for words in doubts(results))]
    figure.text(0.15 / width, 1 - 0.15 / height, "\n".join(lines), fontsize=9, va="top")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=3, frameon=False, fontsize=9)
    for (table, heading), column, bottom in places:
        left, size = (column * _WIDTH + _NAMES) / width, (_WIDTH - _NAMES - 0.2) / width
        axes = figure.add_axes((left, 1 - bottom / height, size, _ROW * len(_rows(table, heading)) / height))
        _panel(axes, table, heading)
    return figure


def _rows(table: Table, heading: str) -> list[Row]:
    return [row for row in table.rows if heading in compared(row)]


def headline(table: Table, heading: str) -> Verdict | None:
    """Compares our first row, which is the plain one; in size our smallest: each format has a row of its own."""
    rows = [row for row in _rows(table, heading) if owner(row, table) == OURS]
    if rows and not is_time(heading):
        rows.sort(key=lambda row: compared(row)[heading])
    return verdict(rows[0], table, heading) if rows else None


def _panel(axes: Any, table: Table, heading: str) -> None:
    rows, beaten = _rows(table, heading), {each.name for each in losses(table) if each.heading == heading}
    found, limit = headline(table, heading), _limit(table, heading)
    at: Any = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    left = 8 - 72 * _NAMES
    axes.annotate(textwrap.fill(f"{table.title}: {heading}", 75), xytext=(left, 15), weight="bold", **at)
    if found is not None:
        color = LOST if found.lost else "0.3" if found.noise else COLORS[OURS]
        said = textwrap.shorten(f"{found.name}: {found.words()}", 95, placeholder="...")
        axes.annotate(said, xytext=(left, 3), color=color, fontsize=7, **at)
    names = [textwrap.fill(textwrap.shorten(row["name"], 90, placeholder="..."), 46) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6.5)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    ends = []
    for y, row in enumerate(rows):
        value, (low, high) = median(row[heading]), interval(row[heading])
        ceiling = value * row.get("% of ceiling", 0) / 100 if heading in ("ms", "us") else 0.0
        axes.barh(y, min(value, limit), 0.62, color=COLORS[owner(row, table)])
        if value > limit:  # a break near the end
            axes.plot([0.93 * limit, 0.95 * limit], [y + 0.36, y - 0.36], color="white", linewidth=2.5)
        elif isinstance(row[heading], list):
            axes.plot([low, min(high, limit)], [y, y], color="0.2", linewidth=1)
        if 0 < ceiling <= limit:
            axes.plot([ceiling, ceiling], [y - 0.36, y + 0.36], color="black", linewidth=1.8)
        ends.append(min(limit, max(high, ceiling)))
        figure = {"textcoords": "offset points", "va": "center", "color": LOST if row["name"] in beaten else "black"}
        axes.annotate(text(value), (ends[-1], y), (3, 0), **figure)
    axes.set(xlim=(0, 1.35 * max(ends) or 1.0), ylim=(len(rows) - 0.5, -0.5), xticks=[])


def _limit(table: Table, heading: str) -> float:
    """Returns where bars that are far longer than ours end, and lines that are far longer than any bar."""
    found = [(compared(row)[heading], owner(row, table)) for row in _rows(table, heading)]
    mine = [value for value, whose in found if whose == OURS]
    others = [value for value, whose in found if whose != OURS]
    limit = max(_LONG * max(mine), 1.25 * min(others)) if mine and others else float("inf")
    longest = max(mine + others)
    return limit if longest > 2 * limit else 1.5 * longest
