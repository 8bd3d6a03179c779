"""Results files: where they lie, and reading them. A file without a format number is older than the numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
BUSY = 0.5  # load average of the minute before a run, from which others took the cores

Row = dict[str, Any]
Columns = list[dict[str, str]]

_INSTRUCTION_SETS = {"x86_64_v4": "avx512", "x86_64_v3": "avx2"}
_HEADINGS = {"name": "", "parameters": "parameters", "nanoseconds_per_parameter": "ns/param", "share": "of ceiling",
             "share_best": "best / best", "bytes_per_parameter": "B/param", "gigabytes_per_second": "GB/s"}  # fmt: skip
_LEFT_OUT = {"unit", "first_quartile", "third_quartile", "loop", "cannot"}  # in other words elsewhere in the table


class ResultsError(ValueError):
    """A file that cannot be used, and why."""


@dataclass
class Stored:
    """One table of a results file. `columns`: key, heading and format of what is printed."""

    suite: str
    title: str
    rows: list[Row]
    notes: list[str]
    columns: Columns


@dataclass
class Results:
    """What one file holds. `interrupted`: the run was, and the suites after that are missing."""

    path: Path
    machine: dict[str, Any]
    tables: list[Stored] = field(default_factory=list)
    interrupted: bool = False

    @property
    def quick(self) -> bool:
        return bool(self.machine.get("quick"))

    def where(self) -> str:
        """The machine, the versions and the date in a line."""
        about = self.machine
        parts = [about.get("gpu"), about.get("cpu"), about.get("instruction_set")]
        parts += [f"{about['threads']} threads"] if "threads" in about else []
        parts += [f"{name} {about[name]}" for name in ("accumfused", "torch") if about.get(name)]
        return ", ".join(str(part) for part in [*parts, about.get("date")] if part)


def load(path: Path) -> Results:
    """Reads a results file.

    Raises:
        ResultsError: it is not there, is no such file, or has another format number.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    number = found.get("format", FORMAT) if isinstance(found, dict) else FORMAT
    if number != FORMAT:
        raise ResultsError(
            f"{path} has format {number!r}, and this version reads {FORMAT}: use the version that wrote it"
        )
    try:
        tables = [
            Stored(suite, table["title"], [*map(_row, table["rows"])], [*map(str, table["notes"])], columns(table))
            for suite, several in found["suites"].items()
            for table in several
        ]
        return Results(path, dict(found["machine"]), tables, bool(found.get("interrupted", False)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResultsError(
            f"{path} is no results file of python -m bench ({type(error).__name__}: {error}); --json FILE writes one"
        ) from error


def _row(row: Any) -> Row:
    if not isinstance(row, dict):
        raise TypeError(f"a row is a mapping, not {type(row).__name__}")
    return row


def name(row: Row) -> str:
    """What the row is called; the rows of a scale are called by their size."""
    if "name" in row:
        return str(row["name"])
    first = next(iter(row.items()), ("", ""))
    return f"{text(first[1])} {first[0]}".strip()


def columns(table: dict[str, Any]) -> Columns:
    """The table's own, or, where an older file has none, one for each key with plain values."""
    if "columns" in table:
        return [{key: str(column[key]) for key in ("key", "heading", "format")} for column in table["columns"]]
    keys = dict.fromkeys(key for row in table["rows"] for key, value in row.items() if plain(value))
    units = {str(row["unit"]) for row in table["rows"] if "unit" in row}
    median = units.pop() if len(units) == 1 else "median"
    headings = {**_HEADINGS, "median": median, "best": f"best {median}" if median != "median" else "best"}
    return [
        {"key": key, "heading": headings.get(key, _words(key)), "format": _format(key)}
        for key in keys
        if key not in _LEFT_OUT
    ]


def _words(key: str) -> str:
    return key.replace("over_", "x ", 1).replace("_", " ")


def _format(key: str) -> str:
    return "{:.0%}" if key.startswith("share") else "{:.2f}" if key.startswith("over_") else ""


def cell(row: Row, column: dict[str, str]) -> str:
    """A value as the table writes it; "-" where there is none."""
    value = row.get(column["key"])
    if value is None:
        return "-"
    try:
        return column["format"].format(value) if column["format"] else text(value)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return text(value)


def plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def text(value: Any) -> str:
    """A number with three digits or, above that, all of its integer part; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def slug(machine: dict[str, Any]) -> str:
    """The machine's folder: the GPU's name, or CPU, instruction set and threads."""
    called = str(machine.get("gpu") or machine.get("cpu") or "unknown").lower()
    called = re.sub(r"\((?:r|tm|c)\)|@.*|\b(?:amd|intel|nvidia|cpu|processor|\d+-core)\b", " ", called)
    words = re.findall(r"[a-z0-9.]+", called) or ["unknown"]
    if not machine.get("gpu"):
        instructions = str(machine.get("instruction_set", "unknown")).partition(":")[0]
        words.append(_INSTRUCTION_SETS.get(instructions, instructions.replace("_", "-")))
        threads = machine.get("threads", "unknown")
        words.append(f"{threads}-thread{'' if threads == 1 else 's'}")
    return "-".join(words)


def place(target: str, machine: dict[str, Any]) -> Path:
    """Where results go: the file; in a folder (or what ends with a slash), <machine>/<date>.json."""
    path = Path(target)
    if not target.endswith("/") and not path.is_dir():
        return path
    return path / slug(machine) / f"{str(machine['date']).split()[0]}.json"
