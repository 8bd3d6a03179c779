"""The report's pictures, from the tables' rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.numerics.codec_study import KINDS
from bench.numerics.tiny_steps import LEARNING_RATES, SIZES
from bench.report import Row, Table

_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442", "#000000", "#8c564b")
_FLOOR = 1e-5  # biases below are drawn here


def draw(sections: dict[str, list[Table]], folder: Path) -> dict[str, Path]:
    """Writes one PNG for each section that has a picture. Returns: section -> file."""
    found = {}
    for name, picture in PICTURES.items():
        if name in sections:
            found[name] = folder / f"{name}.png"
            figure = picture([table.rows for table in sections[name]])
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(found[name], dpi=90)
    return found


def _weights(tables: list[list[Row]]) -> Figure:
    """Bias of the displacement for both sizes, and what weight decay leaves."""
    moved, _, decayed = tables
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(3, 3, 2))
    names = [row["name"] for row in moved]
    for panel, size in zip(axes, SIZES, strict=False):
        for lr, color in zip(LEARNING_RATES, _COLORS, strict=False):
            cells = [next(c for c in row["cells"] if c["size"] == size and c["lr"] == lr) for row in moved]
            sizes = [max(abs(cell["bias"]), _FLOOR) for cell in cells]
            noise = [max(cell["bias_error"], _FLOOR) for cell in cells]
            panel.hlines(range(len(names)), _FLOOR, noise, color=color, linewidth=5, alpha=0.2)
            panel.plot(sizes, range(len(names)), "o", color=color, label=f"lr {lr:g}", markersize=6)
        panel.axvline(0.005, color="0.5", linestyle=":")
        panel.set(
            xscale="log", xlim=(_FLOOR / 1.5, 2), title=f"|w| about {size:g}", xlabel="|bias| of the displacement"
        )
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LEARNING_RATES), frameon=False
    )
    by_name = {row["name"]: row for row in decayed}
    places = [place for place, name in enumerate(names) if name in by_name]
    axes[2].barh(places, [by_name[names[place]]["ratio"] for place in places], color="#56b4e9")
    if decayed:
        axes[2].axvline(decayed[0]["exact"], color="0.3", linestyle=":")
    axes[2].set(title="what weight decay leaves", xlabel="ratio; dotted: exact")
    figure.suptitle("2000 tiny steps: bias (dots), its statistical error (bands), and half a percent (dotted)")
    return figure


def _states(tables: list[list[Row]]) -> Figure:
    """Largest updates and their errors by kind of gradient, and second moments under zeros."""
    largest, vanishing = tables
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    _by_kind(first, largest, "largest")
    first.axhline(1.5, color="0.5", linestyle=":")
    first.set(yscale="log", title="largest |update| / exact (dotted: 1.5)")
    _by_kind(second, largest, "error")
    second.set(yscale="log", title="error of updates, root mean square")
    second.legend(frameon=False, fontsize=8)
    for row, color in zip(vanishing, _COLORS, strict=False):
        after = {int(key.removeprefix("after ")): value for key, value in row.items() if key.startswith("after")}
        third.plot([0, *after], [1, *after.values()], "o-", color=color)
    third.set(yscale="log", title="second moment / exact", xlabel="steps of zero gradients")
    return figure


def _codes(tables: list[list[Row]]) -> Figure:
    """The formats of the study, with blocks of 128."""
    rows = [{**row, "name": row["format"]} for row in tables[0] if row["block"] == 128]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_kind(left, rows, "largest")
    left.set(yscale="log", title="largest |update| / exact, blocks of 128")
    left.axhline(1.5, color="0.5", linestyle=":")
    _by_kind(right, rows, "error")
    right.set(yscale="log", title="error of updates, root mean square")
    right.legend(frameon=False, fontsize=8)
    return figure


def _by_kind(axes: Axes, rows: list[Row], figure: str) -> None:
    for place, (row, color) in enumerate(zip(rows, _COLORS, strict=False)):
        shift = 0.6 * (place / max(1, len(rows) - 1) - 0.5)
        values = [cell[figure] for cell in row["kinds"]]
        axes.plot([kind + shift for kind in range(len(KINDS))], values, "o", color=color, label=row["name"])
    axes.set_xticks(range(len(KINDS)), [kind.replace(" ", "\n", 1) for kind in KINDS], fontsize=8)


def _text(tables: list[list[Row]]) -> Figure:
    """Loss curves of the first seed, and every final loss beside fp32's spread."""
    (rows,) = tables
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    curves, finals = figure.subplots(1, 2, width_ratios=(4, 5))
    for row, color in zip(rows, _COLORS, strict=False):
        losses = _smooth(row["runs"][0]["losses"])
        curves.plot(range(len(losses)), losses, color=color, linewidth=1, label=row["name"])
    curves.set(title="training loss of the first seed, smoothed", xlabel="update", ylabel="nats per byte")
    curves.legend(frameon=False, fontsize=7)
    exact = rows[0]["final"]
    finals.axvspan(min(exact), max(exact), color="0.9")
    for place, (row, color) in enumerate(zip(rows, _COLORS, strict=False)):
        for marker, final in zip("osD^v", row["final"], strict=False):
            finals.plot(final, place, marker, color=color, markersize=6)
    finals.set_yticks(range(len(rows)), [row["name"] for row in rows])
    finals.invert_yaxis()
    finals.set(title="final loss on held-out text, by seed (grey: fp32's spread)", xlabel="nats per byte")
    return figure


def _smooth(losses: list[float]) -> list[float]:
    found, mean = [], losses[0]
    for loss in losses:
        mean += 0.1 * (loss - mean)
        found.append(mean)
    return found


PICTURES: dict[str, Callable[[list[list[dict[str, Any]]]], Figure]] = {
    "weights": _weights,
    "states": _states,
    "codes": _codes,
    "text": _text,
}
