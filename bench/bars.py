"""Bars and stacks: each row's name above its bar, for beside it a long name would leave no room on a narrow page.

A row that has no figure is in the table, with the reason, and not here. Bars many times as long as ours end early, with
a break and their figure, so that the others can be told apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter

from bench.owners import COLORS, NOBODY, OURS, owners, rivals
from bench.readings import Reading, best, compared, number, readings
from bench.stored import Row, Stored, name, text

LOST_COLOR = "#b03a2e"
NOISE_MARK = "within the noise"
WIDTH = 5.0  # inches
FONT = 8.5  # points, of labels
_INCHES = 0.37  # of a row's unit of height
_NEXT = 0.62  # from one bar of a row to the next, where 1.15 and the further bars are a row
_LONG = 4  # times the longest of ours: what is far longer ends there
_GAP = 4  # points, between a bar and its label


def bars(table: Stored) -> Figure | None:
    """The times of each row; None where the table has none.

    Of several times in a row (forward, backward...) those in the first one's unit are drawn.
    """
    times = [{found.key: found for found in readings(row) if found.is_time} for row in table.rows]
    unit = next((reading.unit for several in times for reading in several.values()), None)
    if unit is None:
        return None
    keys = list(dict.fromkeys(key for several in times for key, reading in several.items() if reading.unit == unit))
    drawn = [index for index, several in enumerate(times) if any(key in several for key in keys)]
    figure, axes, places = _rows(table, drawn, len(keys), bytes_too=True)
    owned, fastest = owners(table), {key: _least(table, key) for key in keys}
    limit = _limit([(owned[index], times[index][key].value) for index in drawn for key in keys if key in times[index]])
    labels = []
    for index, place in zip(drawn, places, strict=True):
        for number_, key in enumerate(keys):
            if key in times[index]:
                reading, y = times[index][key], place + _NEXT * number_
                end = _bar(axes, table.rows[index], reading, y, COLORS[owned[index]], limit)
                said = _said(table, table.rows[index], reading, len(keys) > 1)
                labels.append(_label(axes, end, y, said, _mark(table, index, reading, fastest[key], "fastest")))
    meaning = f"{unit}, medians"
    if any(reading.spread for several in times for reading in several.values()):
        meaning += "; thin line: between the quartiles"
    if any(number(row.get("share")) for row in table.rows):
        meaning += "; thick mark: at the machine's ceiling for the same bytes; %: the share of it"
    if any(number(row.get("persistent_bytes")) for row in table.rows):
        meaning += "; keeps: bytes per parameter, weights and states"
    axes.set_xlabel(wrapped(meaning), fontsize=FONT)
    _legend(figure, [owned[index] for index in drawn])
    _fit(figure, axes, labels)
    return figure


def _limit(values: list[tuple[str, float]]) -> float:
    """Where bars end that are far longer than ours; infinite where none is."""
    mine = [value for owner, value in values if owner == OURS]
    others = [value for owner, value in values if owner not in (OURS, NOBODY)]
    if not mine or not others:
        return float("inf")
    limit = max(_LONG * max(mine), 1.25 * min(others))
    return limit if max(others) > 2 * limit else float("inf")


def _bar(axes: Axes, row: Row, reading: Reading, y: float, color: str, limit: float) -> float:
    """A bar, the line between its quartiles and the mark of its ceiling. Returns where they end."""
    if reading.value > limit:
        axes.barh(y, limit, 0.5, color=color)
        axes.plot([limit * 0.955, limit * 0.975], [y + 0.32, y - 0.32], color="white", linewidth=3)
        return limit
    ends = [reading.value]
    axes.barh(y, reading.value, 0.5, color=color)
    if reading.spread > 0 and reading.quartiles is not None:
        axes.plot(reading.quartiles, [y, y], color="0.2", linewidth=1)
        ends.append(reading.quartiles[1])
    share = _value(row, "share")
    if share is not None and reading.key == "median":
        axes.plot([reading.value * share] * 2, [y - 0.3, y + 0.3], color="black", linewidth=1.8)
        ends.append(reading.value * share)
    return max(ends)


def _said(table: Stored, row: Row, reading: Reading, several: bool) -> str:
    share = _value(row, "share") if reading.key == "median" else None
    said = f"{text(reading.value)} {reading.unit}" + (f", {share:.0%}" if share is not None else "")
    part = _heading(table, reading.key).replace(reading.unit, "").strip(", ")
    return f"{said} ({short(part, 24)})" if several else said


def _least(table: Stored, key: str) -> int | None:
    """The row with the least of a figure, where rows of several owners have it."""
    owned = owners(table)
    having = [i for i, row in enumerate(table.rows) if owned[i] != NOBODY and any(r.key == key for r in readings(row))]
    return best(table, having, key) if len({owned[i] for i in having}) > 1 else None


def _mark(table: Stored, index: int, reading: Reading, least: int | None, called: str) -> str:
    """`called`, or how a row of ours stands behind the best of the others; empty for all else."""
    owned = owners(table)
    if index == least:
        others = [i for i, owner in enumerate(owned) if owner not in (owned[index], NOBODY)]
        second = best(table, others, reading.key)
        verdict = None if second is None else compared(table, index, second, reading.key)
        return called if verdict is None or not verdict.noise else ""
    other = best(table, rivals(table, index), reading.key) if OURS in name(table.rows[index]) else None
    verdict = None if other is None else compared(table, index, other, reading.key)
    if verdict is None or other is None:
        return ""
    if verdict.noise and reading.is_time and other == least:
        return NOISE_MARK
    return verdict.words(reading, "the best other") if verdict.lost else ""


def memory(table: Stored) -> Figure | None:
    """Stacks: what stays and what only the first call needs; or the parts that the rows count in bytes."""
    stacks = _first_and_later(table.rows) or _parts(table)
    drawn = [i for i in range(len(table.rows)) if any(values[i] is not None for values in stacks.values())]
    if not drawn:
        return None
    key = "later_megabytes" if "later_megabytes" in table.rows[drawn[0]] else "persistent_bytes"
    figure, axes, places = _rows(table, drawn, 1, bytes_too=False)
    owned, least, labels = owners(table), _least(table, key), []
    for index, y in zip(drawn, places, strict=True):
        end = 0.0
        for values, alpha in zip(stacks.values(), (1, 0.45, 0.2), strict=False):
            axes.barh(y, values[index] or 0.0, 0.5, left=end, color=COLORS[owned[index]], alpha=alpha)
            end += values[index] or 0.0
        reading = next((found for found in readings(table.rows[index]) if found.key == key), None)
        mark = "" if reading is None else _mark(table, index, reading, least, "fewest")
        said = text(end) if reading is None else f"{text(end)} {reading.unit}"
        labels.append(_label(axes, end, y, said, mark))
    several = f" (pale: {list(stacks)[1]})" if len(stacks) > 1 else ""
    axes.set_xlabel(wrapped(f"{next(iter(stacks))}{several}"), fontsize=FONT)
    _legend(figure, [owned[index] for index in drawn])
    _fit(figure, axes, labels)
    return figure


def _first_and_later(rows: list[Row]) -> dict[str, list[float | None]]:
    first = [_value(row, "first_megabytes") for row in rows]
    later = [_value(row, "later_megabytes") for row in rows]
    if all(value is None for value in later):
        return {}
    more = [None if a is None or b is None else max(0.0, a - b) for a, b in zip(first, later, strict=True)]
    return {"MB, every call": later, "MB more, only the first call": more}


def _parts(table: Stored) -> dict[str, list[float | None]]:
    """What is kept, by part where rows count the parts; not what is moved or sent."""
    keys = dict.fromkeys(key for row in table.rows for key in row if key.endswith("_bytes") and number(row[key]))
    parts = [key for key in keys if key not in ("moved_bytes", "wire_bytes", "persistent_bytes")]
    parts = parts or [key for key in keys if key == "persistent_bytes"]
    return {_heading(table, key): [_value(row, key) for row in table.rows] for key in parts}


def _rows(
    table: Stored, drawn: Sequence[int], bars_of_a_row: int, *, bytes_too: bool
) -> tuple[Figure, Axes, list[float]]:
    """Axes with the rows' names, ours bold. Returns also where each row's first bar is.

    Args:
        bytes_too: what a row keeps stands behind its name.
    """
    step = 1.15 + _NEXT * (bars_of_a_row - 1)
    places = [index * step for index in range(len(drawn))]
    title = wrapped(table.title)
    figure = Figure(
        figsize=(WIDTH, 1.25 + 0.15 * title.count("\n") + _INCHES * step * len(places)), layout="constrained"
    )
    axes = figure.subplots()
    for index, y in zip(drawn, places, strict=True):
        row, kept = table.rows[index], _value(table.rows[index], "persistent_bytes") if bytes_too else None
        called = name(row) + (f": keeps {kept:.3g} B" if kept is not None else "")
        weight = "bold" if OURS in name(row) else "normal"
        axes.text(0, y - 0.53, called, fontsize=FONT, va="center", weight=weight, in_layout=False)
    axes.set(ylim=(len(places) * step - 0.6, -0.9), yticks=[], title=title)
    axes.spines["left"].set_visible(False)
    return figure, axes, places


def _label(axes: Axes, end: float, y: float, said: str, mark: str) -> Annotation:
    """A figure beside its bar; a row of ours that is behind is red."""
    won, lost = mark in ("fastest", "fewest"), mark not in ("", "fastest", "fewest", NOISE_MARK)
    label = axes.annotate(
        f"{said}, {mark}" if mark else said, (end, y), (_GAP, 0), textcoords="offset points", va="center",
        fontsize=FONT, weight="bold" if won else "normal", color=LOST_COLOR if lost else "black",
        annotation_clip=False,
    )  # fmt: skip
    label.set_in_layout(False)  # the axes are as wide as the page, and their limits follow the labels: see _fit
    return label


def _legend(figure: Figure, owned: Sequence[str]) -> None:
    """The owners that have a bar, below."""
    if len(set(owned)) > 1:
        handles = [Patch(color=color, label=owner) for owner, color in COLORS.items() if owner in owned]
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=FONT, ncols=4)


def _fit(figure: Figure, axes: Axes, labels: Sequence[Annotation]) -> None:
    """Makes the axes so long that every bar, whisker and label ends within them, and shortens names that do not."""
    axes.set_xlim(0, 1.02 * (axes.dataLim.x1 or 1.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    figure.draw_without_rendering()
    width = axes.bbox.width
    limits = [axes.get_xlim()[1]]
    for label in labels:
        taken = label.get_window_extent().width + (_GAP + 1) * figure.dpi / 72
        limits.append(label.xy[0] * width / max(width - taken, 0.2 * width))
    axes.set_xlim(0, max(limits))
    for words in (words for words in axes.texts if words not in labels):
        shorten(words, width)


def shorten(words: Text, width: float) -> None:
    """Takes letters away until the words are no wider than so many pixels."""
    while words.get_window_extent().width > width:
        words.set_text(short(words.get_text(), len(words.get_text()) - 2))


def _value(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if number(value) and value is not None else None


def _heading(table: Stored, key: str) -> str:
    return next((column["heading"] for column in table.columns if column["key"] == key), key.replace("_", " "))


def wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 66))


def short(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: letters - 3].rstrip() + "..."
