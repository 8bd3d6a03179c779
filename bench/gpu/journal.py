"""The report as it grows: one JSON object a line, in a file that is whole after each line, whenever the process ends.

A line has its stage, the time, a kind, and facts. "ok": False marks what should be looked at. `markdown` makes the
report of the lines: a table for each stage and kind.
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
FILE = "ACCUMFUSED_GPU_JOURNAL"  # the variable in which a stage's process finds the path
SO_FAR = "so far"  # the kind of which only the last line counts
_HEAD = ("stage", "at", "kind")
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
        said = ", ".join(f"{name} {_cell(value)}" for name, value in facts.items() if name != "ok")
        print(f"{self.stage}: {kind}: {'NOT OK: ' if line.get('ok') is False else ''}{said}", flush=True)

    @contextlib.contextmanager
    def section(self, kind: str, **facts: Any) -> Iterator[None]:
        """Writes the error of a block as a line, so that the next block follows."""
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            self.write(kind, ok=False, **facts, error=said, trace=traceback.format_exc())


def read(path: Path) -> list[Line]:
    """Returns all whole lines: the last one may have been cut off."""
    lines: list[Line] = []
    for each in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(each))
    return lines


def forget(path: Path, stages: Collection[str]) -> None:
    """Removes the lines of stages that run anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = [json.dumps(line) + "\n" for line in read(path) if line["stage"] not in stages]
    path.write_text("".join(left), encoding="utf-8")


def markdown(lines: Sequence[Line], *, texts: bool = True) -> str:
    """Makes the report; `texts`: with tracebacks and other texts of several lines."""
    stages = _by("stage", lines)
    parts = ["# GPU report", _table([_outcome(stage, its) for stage, its in stages.items()])]
    for stage, its in stages.items():
        kinds = _by("kind", [line for line in its if line["kind"] not in ("begin", "end")])
        parts += [f"## {stage}"] if kinds else []
        for kind, same in kinds.items():
            parts += [f"### {kind}", *_section(same[-1:] if kind == SO_FAR else same, texts)]
    return "\n\n".join(parts) + "\n"


def _by(key: str, lines: Sequence[Line]) -> dict[str, list[Line]]:
    return {value: [line for line in lines if line[key] == value] for value in dict.fromkeys(e[key] for e in lines)}


def _outcome(stage: str, lines: Sequence[Line]) -> Line:
    end = next((line for line in reversed(lines) if line["kind"] == "end"), {})
    ended = end.get("outcome", "was ended together with everything")
    not_ok = sum(line.get("ok") is False for line in lines)
    return {"stage": stage, "ended": ended, "seconds": end.get("seconds"), "not ok": not_ok}


def _section(lines: Sequence[Line], texts: bool) -> list[str]:
    """Makes a table, and below it what has several lines."""
    rows, below = [], []
    for line in lines:
        long = {name: value for name, value in line.items() if isinstance(value, str) and "\n" in value.strip()}
        rows.append({name: value for name, value in line.items() if name not in (*_HEAD, *long)})
        below += [f"{name}:\n\n````\n{value.strip()}\n````" for name, value in long.items() if texts]
    return [*([_table(rows)] if any(rows) else []), *below]


def _table(rows: Sequence[Line]) -> str:
    """Makes Markdown, with a column for every key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)).replace("|", "\\|") for key in keys] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [keys, ["---"] * len(keys), *cells])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
