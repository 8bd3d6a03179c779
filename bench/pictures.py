"""The pictures of a results file: narrow, so that a telephone shows them without shrinking their letters."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from bench.bars import WIDTH, bars, memory, short, wrapped
from bench.owners import COLORS, OURS, owners
from bench.readings import number
from bench.roofline import roofline
from bench.stored import Results, Stored, name

_LINES = ("-", "--", "-.", ":")
_SETTINGS: Any = {
    "font.size": 9, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "accumfused",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.titlelocation": "left",
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """`kind`: roofline, bars, memory, scale or losses. `title`: what it shows, for those who do not see it too."""

    kind: str
    title: str
    figure: Figure

    def write(self, path: Path, prefix: str) -> str:
        """Writes a PNG, and returns the same as SVG for a page.

        The SVG has its text as text and needs nothing from elsewhere.

        Args:
            prefix: of the names in the SVG, which are unique within a picture only: an inline picture has the page's.
        """
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # matplotlib describes them with links
        with matplotlib.rc_context(_SETTINGS):
            self.figure.savefig(path, dpi=140)
            self.figure.set_layout_engine("none")  # the layout that was found is kept: finding it takes long
            self.figure.savefig(drawn, format="svg", metadata=nothing)
        svg = drawn.getvalue()
        svg = svg[svg.index("<svg") :]
        # An inline picture needs no name spaces, and the page has the one style that matplotlib writes.
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"|<defs>\s*<style.*?</style>\s*</defs>', "", svg, flags=re.DOTALL)
        svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
        svg = re.sub(r"(url\(|href=\")#", rf"\g<1>#{prefix}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1)


def of_all(results: Results) -> Picture | None:
    """The roofline; None where no row has bytes and a time."""
    with matplotlib.rc_context(_SETTINGS):
        return _picture("roofline", "bytes and nanoseconds per parameter", roofline(results))


def of(table: Stored) -> Iterator[Picture]:
    """The pictures of a table: all for which it has figures."""
    makers: dict[str, Callable[[Stored], Figure | None]] = {
        "scale": _scale, "bars": bars, "memory": memory, "losses": _loss_curves,
    }  # fmt: skip
    if table.suite == "ceilings":
        return  # they are the roofline's lines
    for kind, make in makers.items():
        if kind == "bars" and _is_scale(table):
            continue  # its line says it
        with matplotlib.rc_context(_SETTINGS):
            picture = _picture(kind, table.title, make(table))
        if picture is not None:
            yield picture


def _picture(kind: str, title: str, figure: Figure | None) -> Picture | None:
    return None if figure is None else Picture(kind, f"{kind}: {title}", figure)


def _is_scale(table: Stored) -> bool:
    """Whether the rows are of several sizes."""
    timed = [row for row in table.rows if number(row.get("nanoseconds_per_parameter"))]
    return len({row["parameters"] for row in timed if number(row.get("parameters"))}) > 1


def _scale(table: Stored) -> Figure | None:
    """A line for each name, or one where the rows have no names of their own."""
    if not _is_scale(table):
        return None
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        if number(row.get("parameters")) and number(row.get("nanoseconds_per_parameter")):
            point = (row["parameters"], row["nanoseconds_per_parameter"])
            lines.setdefault(str(row.get("name", "")), []).append(point)
    if all(len(points) == 1 for points in lines.values()):  # names of sizes
        lines = {"": [point for points in lines.values() for point in points]}
    figure = Figure(figsize=(WIDTH, 3.0 + 0.17 * len(lines)), layout="constrained")
    axes = figure.subplots()
    owned = dict(zip(map(name, table.rows), owners(table), strict=True))
    for index, (label, points) in enumerate(lines.items()):
        color = COLORS[owned.get(label, OURS)]
        axes.plot(*zip(*sorted(points), strict=True), "o", linestyle=_LINES[index % 4], color=color, label=label)
    axes.set(xscale="log", xlabel="parameters", ylabel="nanoseconds per parameter", title=wrapped(table.title))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
    _legend_below(figure, axes, [label for label in lines if label])
    return figure


def _loss_curves(table: Stored) -> Figure | None:
    rows = [row for row in table.rows if isinstance(row.get("losses"), list) and any(map(number, row["losses"]))]
    if not rows:
        return None
    figure = Figure(figsize=(WIDTH, 3.0 + 0.17 * len(rows)), layout="constrained")
    axes = figure.subplots()
    owned = dict(zip(map(name, table.rows), owners(table), strict=True))
    for row in rows:  # equal curves lie on each other: ours is thin, and the others show on both sides of it
        found = [float(loss) if number(loss) else float("nan") for loss in row["losses"]]
        owner = owned[name(row)]
        width, above = (1.5, 3) if owner == OURS else (5, 2)
        axes.plot(range(1, len(found) + 1), found, color=COLORS[owner], linewidth=width, zorder=above, label=name(row))
    axes.set(xlabel="update", ylabel="loss", title=wrapped(table.title))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure, axes, [name(row) for row in rows])
    return figure


def _legend_below(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    if labels:
        handles = axes.get_legend_handles_labels()[0]
        labels = [short(label, 60) for label in labels]
        figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8)
