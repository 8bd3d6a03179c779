"""`python -m bench report FILE`: a results file as one page of bars, PNG and SVG.

Each table has a panel for its first time, and one for what is kept. Colours are owners. A bar is a median, a thin line
goes from quartile to quartile, a thick mark is the ceiling of the same bytes. Under the title stands how our first row
does beside the best of the others; a row of ours that another one beats has a red figure.
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
from bench.verdicts import OTHERS, OURS, TORCH, headline, interval, losses, main_time, owner, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {OURS: "#0072b2", TORCH: "#9a9a9a", OTHERS: "#e69f00"}
_LOST = "#b03a2e"
# Inches of a panel: names, bars with room for their figures, and the height of title, row and gap.
_NAMES, _BARS, _FIGURES, _LINE, _ROW, _GAP, _TOP = 2.7, 2.5, 0.9, 0.15, 0.25, 0.4, 1.25
_WIDTH = _NAMES + _BARS + _FIGURES + 0.3
_HOW = "Bars: medians. Thin lines: quartiles. Thick marks: this machine's ceiling for the same bytes."
_LONG = 4  # times our longest: bars that are far longer end there
_SETTINGS: Any = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "accumfused", "text.parse_math": False}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of python -m bench --json")
    parser.add_argument("--output", type=Path, default=Path("build/report"), metavar="NAME",
                        help="of the pictures, without .png and .svg; default: %(default)s")  # fmt: skip
    chosen = parser.parse_args(arguments)
    try:
        import matplotlib
    except ImportError:
        print("matplotlib draws the report, and is not installed; pip install --group bench", file=sys.stderr)
        return 2
    try:
        results = load(chosen.file)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_SETTINGS):
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
        kept = [heading for heading in headings(table) if heading.startswith(("kept ", "peak "))]
        found += [(table, heading) for heading in (main_time(table), *kept) if heading is not None]
    return found


def page(results: Results) -> Figure:
    """Draws all panels, each in the column that is the shortest so far."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = panels(results)
    columns = [_TOP] * max(1, min(3, len(drawn)))
    places = []
    for table, heading in drawn:
        column = columns.index(min(columns))
        places.append((column, columns[column]))
        columns[column] += _height(table, heading)
    width, height = max(2, len(columns)) * _WIDTH, max(columns)
    figure = Figure(figsize=(width, height))
    tables = [table for several in results.suites.values() for table in several]
    lines = [summary(tables), results.where(), _HOW, *(f"This run {words}." for words in doubts(results))]
    top = 1 - 0.15 / height
    figure.text(0.2 / width, top, textwrap.fill(lines[0], int(12 * width)), weight="bold", size=11, va="top")
    figure.text(0.2 / width, top - 0.45 / height, "\n".join(lines[1:]), va="top")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=3, frameon=False, bbox_to_anchor=(1, 1 - 0.4 / height))
    for (table, heading), (column, down) in zip(drawn, places, strict=True):
        _panel(figure, table, heading, column * _WIDTH / width, down, width, height)
    return figure


def _rows(table: Table, heading: str) -> list[Row]:
    return [row for row in table.rows if heading in compared(row)]


def _head(table: Table, heading: str) -> tuple[str, str, bool, bool]:
    """Returns the title, how ours does, and whether that is a loss, or noise."""
    found = headline(table, heading)
    title = textwrap.fill(f"{table.title}: {heading}", 75)
    if found is None:
        return title, "", False, False
    return title, textwrap.fill(f"{found.name}: {found.words()}", 85), found.lost, found.noise


def _height(table: Table, heading: str) -> float:
    title, words, *_ = _head(table, heading)
    lines = title.count("\n") + 1 + (words.count("\n") + 1 if words else 0)
    return _LINE * lines + _ROW * len(_rows(table, heading)) + _GAP


def _panel(figure: Figure, table: Table, heading: str, left: float, down: float, width: float, height: float) -> None:
    """Draws the panel whose upper left corner is there: `left` in shares of the page, `down` in inches."""
    title, words, lost, noise = _head(table, heading)
    rows, beaten = _rows(table, heading), {each.name for each in losses(table) if each.heading == heading}
    left += 0.2 / width
    figure.text(left, 1 - down / height, title, weight="bold", va="top")
    below = down + _LINE * (title.count("\n") + 1)
    color = _LOST if lost else "0.3" if noise else COLORS[OURS]
    figure.text(left, 1 - below / height, words, color=color, va="top")
    bottom = down + _height(table, heading) - _GAP + 0.1
    size = (_BARS + _FIGURES) / width, _ROW * len(rows) / height
    axes = figure.add_axes((left + _NAMES / width, 1 - bottom / height, *size))
    limit = _limit(table, heading)
    ends = [min(limit, max(interval(row[heading])[1], _ceiling(row, heading))) for row in rows]
    right = max(0.0, *ends) * (_BARS + _FIGURES) / _BARS
    axes.set(xlim=(0, right or 1.0), ylim=(len(rows) - 0.5, -0.5), xticks=[], yticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    for y, (row, end) in enumerate(zip(rows, ends, strict=True)):
        whose = owner(row, table)
        _bar(axes, y, row, heading, limit, COLORS[whose])
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        color = _LOST if row["name"] in beaten else "black"
        axes.annotate(text(median(row[heading])), (end, y), (3, 0), color=color, **beside)
        called = textwrap.fill(textwrap.shorten(row["name"], 90, placeholder="..."), 46)
        weight = "bold" if whose == OURS else "normal"
        axes.annotate(called, (0, y), (-4, 0), ha="right", size=6.5, weight=weight, **beside)


def _bar(axes: Any, y: int, row: Row, heading: str, limit: float, color: str) -> None:
    """Draws a bar, the line between its quartiles, and the mark of its ceiling."""
    value, (low, high), ceiling = median(row[heading]), interval(row[heading]), _ceiling(row, heading)
    axes.barh(y, min(value, limit), 0.62, color=color)
    if value > limit:  # a break near the end
        axes.plot([0.93 * limit, 0.95 * limit], [y + 0.36, y - 0.36], color="white", linewidth=2.5)
    elif isinstance(row[heading], list):
        axes.plot([low, min(high, limit)], [y, y], color="0.2", linewidth=1)
    if 0 < ceiling <= limit:
        axes.plot([ceiling, ceiling], [y - 0.36, y + 0.36], color="black", linewidth=1.8)


def _ceiling(row: Row, heading: str) -> float:
    """Returns the time at the ceiling; 0 where it is not known."""
    return median(row[heading]) * row.get("% of ceiling", 0) / 100 if heading in ("ms", "us") else 0.0


def _limit(table: Table, heading: str) -> float:
    """Returns where bars that are far longer than ours end, and lines that are far longer than any bar."""
    found = [(compared(row)[heading], owner(row, table)) for row in _rows(table, heading)]
    mine = [value for value, whose in found if whose == OURS]
    others = [value for value, whose in found if whose != OURS]
    limit = max(_LONG * max(mine), 1.25 * min(others)) if mine and others else float("inf")
    longest = max(mine + others)
    return limit if longest > 2 * limit else 1.5 * longest
