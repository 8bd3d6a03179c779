"""Bytes per parameter against nanoseconds per parameter, with the machine's ceilings as lines."""

from __future__ import annotations

from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from bench.bars import FONT, WIDTH, short
from bench.owners import COLORS, OURS, TORCH, owners
from bench.readings import best, number
from bench.stored import Results, Row, Stored, name

_BOTH = ("bytes_per_parameter", "nanoseconds_per_parameter")
_LABELLED = 8  # points; more cannot be read


def roofline(results: Results) -> Figure | None:
    """Every row that has bytes and a time; None where there is none.

    Labelled are the first of ours and the best of torch's in each suite's first table.
    """
    tables = [table for table in results.tables if any(_positive(row, *_BOTH) for row in table.rows)]
    if not tables:
        return None
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    axes = figure.subplots()
    moved = [row["bytes_per_parameter"] for table in tables for row in table.rows if _positive(row, *_BOTH)]
    rates = _ceilings(results)
    for rate in rates.values():
        ends = min(moved) / 1.4, max(moved) * 4  # room for the labels of ours, which lie to the lower right
        axes.plot(ends, [end / rate for end in ends], color="0.75", linewidth=0.8, zorder=1)
    points, there = [], set()
    for table in tables:
        for row, owner in zip(table.rows, owners(table), strict=True):
            if _positive(row, *_BOTH):
                axes.plot(*(row[key] for key in _BOTH), "o", color=COLORS[owner], markersize=5, zorder=2)
                points.append((row[_BOTH[0]], row[_BOTH[1]]))
                there.add(owner)
    axes.set(xscale="log", yscale="log", xlabel="bytes per parameter", ylabel="nanoseconds per parameter",
             title="What the work moves, and the time that it takes; medians")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(FuncFormatter(_plain))
    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLORS[owner], label=owner) for owner in COLORS if owner in there
    ]
    if rates:
        slowest, fastest = min(rates.values()), max(rates.values())
        words = f"{slowest:.1f} to {fastest:.1f} GB/s, by mix" if len(rates) > 1 else f"{fastest:.1f} GB/s"
        handles.append(Line2D([], [], color="0.75", label=f"the machine's ceilings: {words}"))
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=FONT, ncols=2)
    named = [pair for table in _first_tables(tables) for pair in _chosen(table)][:_LABELLED]
    _name_points(figure, axes, points, named)
    return figure


def _first_tables(tables: list[Stored]) -> list[Stored]:
    return list({table.suite: table for table in reversed(tables)}.values())[::-1]


def _chosen(table: Stored) -> list[tuple[str, Row, str]]:
    owned = owners(table)
    having = [index for index, row in enumerate(table.rows) if _positive(row, *_BOTH)]
    mine = [index for index in having if owned[index] == OURS]
    other = best(table, [index for index in having if owned[index] == TORCH], "median")
    found = ([mine[-1]] if other is None and mine else mine[:1]) + ([] if other is None else [other])
    return [
        (f"{table.suite}: {short(name(table.rows[index]), 32)}", table.rows[index], owned[index]) for index in found
    ]


def _name_points(
    figure: Figure, axes: Axes, points: list[tuple[float, float]], named: list[tuple[str, Row, str]]
) -> None:
    """A label beside each point, with a line to it, where it covers no point and no other label."""
    figure.draw_without_rendering()
    scale, taken = (
        figure.dpi / 72,
        [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(points)],
    )
    # From the outside in: then a line to a label does not cross another one's words.
    for words, row, owner in sorted(named, key=lambda one: one[1][_BOTH[1]] * (-1 if one[2] == OURS else 1)):
        place = tuple(row[key] for key in _BOTH)
        label = axes.annotate(
            words, place, (0, 0), textcoords="offset points", fontsize=FONT, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.4", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        size = label.get_window_extent()
        x, y = axes.transData.transform(place)
        side = 1 if owner == OURS else -1  # ours are the lower ones: their labels lie to the lower right
        for (right, up), far in product(((side, -side), (side, -2 * side), (side, 0), (-side, 0)), range(14, 150, 12)):
            left = x + far * scale if right > 0 else x - far * scale - size.width
            box = Bbox.from_bounds(left, y + up * far * scale * 0.6 - size.height / 2, size.width, size.height)
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1
            if inside and not any(box.padded(2).overlaps(other) for other in taken):
                label.set_position(((box.x0 - x) / scale, (box.y0 + size.height / 2 - y) / scale))
                taken.append(box)
                break
        else:
            label.remove()  # a label that cannot be read says nothing


def _ceilings(results: Results) -> dict[str, float]:
    """Mix -> its median rate in GB/s: the points are medians too."""
    rows = [row for table in results.tables if table.suite == "ceilings" for row in table.rows]
    return {name(row): float(row["median"]) for row in rows if _positive(row, "median")}


def _plain(value: float, _: int | None = None) -> str:
    """1, 2 and 5 of each power of ten."""
    return f"{value:g}" if f"{value:.0e}"[0] in "125" else ""


def _positive(row: Row, *keys: str) -> bool:
    return all(number(row.get(key)) and row[key] > 0 for key in keys)
