"""The report as it grows: one JSON object a line, in a file that is whole after each line, whenever the process ends.

A line has its stage, the time, what kind of line it is, and its facts. "ok": False marks what should be looked at.
`markdown` makes the readable report of the lines: a table for each stage and kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
FILE = "ACCUMFUSED_GPU_JOURNAL"  # where a stage's process finds the path
LATEST = ("so far", "mechanisms")  # of these kinds only the last line counts
_KNOWN = ("stage", "at", "kind", "ok")
_LONG = 160


class Journal:
    """Appends the lines of one stage to a file; where there is none, it only prints them."""

    def __init__(self, stage: str, path: Path | None = None) -> None:
        self.stage = stage
        self.path = path or (Path(os.environ[FILE]) if FILE in os.environ else None)

    def write(self, kind: str, **facts: Any) -> None:
        line: Line = {"stage": self.stage, "at": round(time.time(), 2), "kind": kind, **facts}
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:  # one write of one line: other processes append too
                file.write(json.dumps(line, default=str) + "\n")
        print(say(line), flush=True)

    @contextlib.contextmanager
    def section(self, kind: str, **facts: Any) -> Iterator[None]:
        """A block whose error becomes a line, so that the next block follows."""
        try:
            yield
        except Exception as error:
            self.write(kind, ok=False, **facts, **told(error))


def told(error: Exception) -> Line:
    """What a line says of an error."""
    return {"error": f"{type(error).__name__}: {error}".split("\n")[0], "trace": traceback.format_exc()}


def read(path: Path) -> list[Line]:
    return parse(path.read_text(encoding="utf-8")) if path.exists() else []


def parse(text: str) -> list[Line]:
    """All whole lines: the last one may have been cut off."""
    lines = []
    for each in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(each))
    return lines


def forget(path: Path, stages: Collection[str]) -> None:
    """Removes the lines of stages that run anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = [json.dumps(line) + "\n" for line in read(path) if line["stage"] not in stages]
    path.write_text("".join(left), encoding="utf-8")


def say(line: Line) -> str:
    """A line for a terminal; long texts are cut."""
    facts = {name: value for name, value in line.items() if name not in _KNOWN and value not in (None, "", [], {})}
    verdict = {True: "ok: ", False: "NOT OK: ", None: ""}[line.get("ok")]
    said = ", ".join(f"{name} {_cell(value)}" for name, value in facts.items())
    return f"{line['stage']}: {line['kind']}: {verdict}{said}"


def markdown(lines: Sequence[Line], *, texts: bool = True) -> str:
    """The report. Args: texts: with texts of several lines (tracebacks, what compilers say)."""
    stages = list(dict.fromkeys(str(line["stage"]) for line in lines))
    parts = ["# GPU report", _table([_outcome([line for line in lines if line["stage"] == stage]) for stage in stages])]
    for stage in stages:
        own = [line for line in lines if line["stage"] == stage and line["kind"] not in ("begin", "end")]
        parts += [f"## {stage}"] if own else []
        for kind in dict.fromkeys(str(line["kind"]) for line in own):
            parts += _kind(kind, [line for line in own if line["kind"] == kind], texts)
    return "\n\n".join(parts) + "\n"


def _outcome(lines: Sequence[Line]) -> Line:
    end = next((line for line in reversed(lines) if line["kind"] == "end"), {})
    good, bad = (sum(line.get("ok") is value for line in lines) for value in (True, False))
    ended = end.get("outcome", "was ended together with everything")
    return {"stage": lines[0]["stage"], "ended": ended, "seconds": end.get("seconds"), "ok": good, "not ok": bad}


def _kind(kind: str, lines: Sequence[Line], texts: bool) -> list[str]:
    """Lines that are ok are only counted; the others are a table, with their texts below."""
    lines = lines[-1:] if kind in LATEST else lines
    shown = [line for line in lines if line.get("ok") is not True]
    count = f": {len(lines) - len(shown)} of {len(lines)} ok" if len(shown) < len(lines) else ""
    rows, below = [], []
    for line in shown:
        long = {name: value for name, value in line.items() if isinstance(value, str) and "\n" in value.strip()}
        rows.append({name: value for name, value in line.items() if name not in (*_KNOWN, *long)})
        called = next(map(str, rows[-1].values()), kind)
        below += [f"{called}, {name}:\n\n````\n{value.strip()}\n````" for name, value in long.items() if texts]
    return [f"### {kind}{count}", *([_table(rows)] if any(rows) else []), *below]


def _table(rows: Sequence[Line]) -> str:
    """Markdown, with a column for every key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)).replace("|", "\\|") for key in keys] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [keys, ["---"] * len(keys), *cells])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(own)}" for name, own in value.items())
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
