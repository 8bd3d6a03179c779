"""Bytes per parameter against nanoseconds per parameter, with the machine's ceilings as lines."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench.bars import OUR_COLOR, THEIR_COLOR, WIDTH, short
from bench.readings import number, ours
from bench.stored import Results, Row, name

LINES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP*Xhd<>"
_HEIGHT = 3.6  # inches, of the plot; the words below it take what they need
_LINE = 0.132  # inches, of words


def roofline(results: Results) -> Figure | None:
    """Every row that has bytes and a time, numbered; None where there is none."""
    both = ("bytes_per_parameter", "nanoseconds_per_parameter")
    tables = [table for table in results.tables if any(_positive(row, *both) for row in table.rows)]
    if not tables:
        return None
    points = [
        (table, row, mine)
        for table in tables
        for row, mine in zip(table.rows, ours(table), strict=True)
        if _positive(row, *both)
    ]
    ceilings = _ceilings(results)
    below = _LINE * (len(points) + len(tables) + 1.3 * len(ceilings) + 1)
    figure = Figure(figsize=(WIDTH, _HEIGHT + below), layout="constrained")
    axes, words = figure.subplots(2, 1, height_ratios=(_HEIGHT, below))
    moved = [row["bytes_per_parameter"] for _, row, _ in points]
    _lines(axes, ceilings, min(moved) / 1.4, max(moved) * 1.4)
    listed: dict[str, list[str]] = {}
    for index, (table, row, mine) in enumerate(points, 1):
        place = tuple(row[key] for key in both)
        marker = _MARKERS[tables.index(table) % len(_MARKERS)]
        axes.plot(*place, marker, color=OUR_COLOR if mine else THEIR_COLOR, markersize=5)
        right = index % 2 == 1  # neighbours often lie on each other
        axes.annotate(str(index), place, (4, 3) if right else (-4, -9), textcoords="offset points", fontsize=7,
                      ha="left" if right else "right")  # fmt: skip
        listed.setdefault(table.title, []).append(f"   {index}  {name(row)}")
    axes.set(xscale="log", yscale="log", xlabel="bytes per parameter", ylabel="nanoseconds per parameter",
             title="medians; lines: the machine's ceilings; blue: ours")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(FuncFormatter(_plain))
    words.axis("off")
    if ceilings:
        words.legend(*axes.get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=7.5,
                     borderpad=0, borderaxespad=0, labelspacing=0.15)  # fmt: skip
    lines = [line for title, several in listed.items() for line in (title, *several)]
    written = "\n".join(short(line, 72) for line in lines)
    words.text(0, 0, written, transform=words.transAxes, va="bottom", fontsize=7.5, in_layout=False)
    return figure


def _lines(axes: Axes, ceilings: list[tuple[str, float]], narrowest: float, widest: float) -> None:
    for index, (mix, rate) in enumerate(ceilings):
        shade = str(0.25 + 0.5 * index / max(1, len(ceilings) - 1))
        axes.plot((narrowest, widest), (narrowest / rate, widest / rate), LINES[index % 4], color=shade, linewidth=0.8,
                  label=f"ceiling {mix}: {rate:.1f} GB/s")  # fmt: skip


def _ceilings(results: Results) -> list[tuple[str, float]]:
    """Mix -> its median rate in GB/s, the fastest first: the points are medians too."""
    rows = [row for table in results.tables if table.suite == "ceilings" for row in table.rows]
    rates = {name(row): float(row["median"]) for row in rows if _positive(row, "median")}
    return sorted(rates.items(), key=lambda pair: -pair[1])


def _plain(value: float, _: int | None = None) -> str:
    """1, 2 and 5 of each power of ten."""
    return f"{value:g}" if f"{value:.0e}"[0] in "125" else ""


def _positive(row: Row, *keys: str) -> bool:
    return all(number(row.get(key)) and row[key] > 0 for key in keys)
