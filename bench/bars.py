"""Bars and stacks: each row's name above its bar, for beside it a long name would leave no room on a narrow page."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.readings import Reading, gap, losses, number, ours, readings
from bench.stored import Row, Stored, name, text

OUR_COLOR, THEIR_COLOR, LOST_COLOR = "#0072b2", "#9a9a9a", "#b03a2e"
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#777777", "#8c564b")
WIDTH = 5.0  # inches
_NEXT = 0.62  # from one bar of a row to the next, where 1.15 and the further bars are a row
_LETTERS = 68  # of a bold line


def bars(table: Stored) -> Figure | None:
    """The times of each row; None where the table has none.

    Of several times in a row (forward, backward...) those in the first one's unit are drawn.
    """
    times = [{found.key: found for found in readings(row) if found.is_time} for row in table.rows]
    unit = next((reading.unit for several in times for reading in several.values()), None)
    if unit is None:
        return None
    keys = list(dict.fromkeys(key for several in times for key, reading in several.items() if reading.unit == unit))
    figure, axes, places = _rows(table, len(keys), {index: why[0] for index, why in losses(table).items()})
    widest = max(several[key].value for several in times for key in keys if key in several)
    for row, mine, several, place in zip(table.rows, ours(table), times, places, strict=True):
        if not several:
            axes.text(0, place, short(gap(row) or "no time", _LETTERS), fontsize=8, style="italic", va="center")
        for index, key in enumerate(keys):
            if key in several:
                end = _bar(axes, row, several[key], place + _NEXT * index, mine)
                said = _said(table, row, several[key], len(keys) > 1)
                axes.text(end + 0.015 * widest, place + _NEXT * index, said, fontsize=8, va="center")
    at_ceiling = any(number(row.get("share")) for row in table.rows)
    meaning = "; thick mark: at the machine's ceiling for these bytes, %: share of it" if at_ceiling else ""
    axes.set(xlim=(0, widest * 1.45), xlabel=f"{unit}{meaning}")
    return figure


def _bar(axes: Axes, row: Row, reading: Reading, y: float, mine: bool) -> float:
    """A bar, the line between its quartiles and the mark of its ceiling. Returns where they end."""
    ends = [reading.value]
    axes.barh(y, reading.value, 0.5, color=OUR_COLOR if mine else THEIR_COLOR)
    first, third = _value(row, "first_quartile"), _value(row, "third_quartile")
    if reading.spread > 0 and first is not None and third is not None:
        axes.plot([first, third], [y, y], color="0.2", linewidth=1)
        ends.append(third)
    share = _value(row, "share")
    if share is not None and reading.key == "median":
        axes.plot([reading.value * share] * 2, [y - 0.3, y + 0.3], color="black", linewidth=1.8)
        ends.append(reading.value * share)
    return max(ends)


def _said(table: Stored, row: Row, reading: Reading, several: bool) -> str:
    share = _value(row, "share") if reading.key == "median" else None
    said = f"{text(reading.value)} {reading.unit}" + (f", {share:.0%}" if share is not None else "")
    return f"{said} ({_heading(table, reading.key)})" if several else said


def memory(table: Stored) -> Figure | None:
    """Stacks: what stays and what only the first call needs; or the parts that the rows count in bytes."""
    rows = table.rows
    stacks = _first_and_later(rows) or _parts(table)
    if not stacks:
        return None
    why = {index: next((word for word in words if " larg" in word), None) for index, words in losses(table).items()}
    figure, axes, places = _rows(table, 1, {index: word for index, word in why.items() if word is not None})
    before = [0.0] * len(rows)
    for (heading, values), color in zip(stacks.items(), COLORS, strict=False):
        axes.barh(places, [value or 0.0 for value in values], 0.5, left=before, color=color, label=heading)
        before = [left + (value or 0.0) for left, value in zip(before, values, strict=True)]
    widest = max(before) or 1.0
    for index, (y, row, total) in enumerate(zip(places, rows, before, strict=True)):
        counted = any(values[index] is not None for values in stacks.values())
        said = text(total) if counted else short(gap(row) or "not measured", _LETTERS)
        axes.text(total + 0.015 * widest, y, said, fontsize=8, va="center", style="normal" if counted else "italic")
    axes.set_xlim(0, widest * 1.25)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
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


def _rows(table: Stored, bars_of_a_row: int, marks: dict[int, str]) -> tuple[Figure, Axes, list[float]]:
    """Axes with the rows' names, ours bold, lost ones with their mark. Returns also where each row's first bar is."""
    step = 1.15 + _NEXT * (bars_of_a_row - 1)
    places = [index * step for index in range(len(table.rows))]
    figure = Figure(figsize=(WIDTH, 0.9 + 0.37 * step * len(places)), layout="constrained")
    axes = figure.subplots()
    for index, (y, row, mine) in enumerate(zip(places, table.rows, ours(table), strict=True)):
        called = name(row)
        if index in marks:
            whole = f"{called}  ({marks[index]})"
            called = whole if len(whole) <= _LETTERS else f"{short(called, _LETTERS - 20)}  (beaten: see below)"
        axes.text(0, y - 0.53, short(called, _LETTERS), fontsize=8, va="center", weight="bold" if mine else "normal",
                  color=LOST_COLOR if index in marks else "black")  # fmt: skip
    axes.set(ylim=(len(places) * step - 0.6, -0.9), yticks=[], title=wrapped(table.title))
    axes.spines["left"].set_visible(False)
    return figure, axes, places


def _value(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if number(value) and value is not None else None


def _heading(table: Stored, key: str) -> str:
    return next((column["heading"] for column in table.columns if column["key"] == key), key.replace("_", " "))


def wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 66))


def short(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: letters - 3].rstrip() + "..."
