"""The report as it grows: one JSON object a line, in a file that is whole after each line, whenever the process ends.

A line has the stage it belongs to, when it was written, what kind of line it is, and its facts. "ok": False marks what
should be looked at. Of a kind in LATEST only the last line counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
FILE, STAGE = "ACCUMFUSED_GPU_JOURNAL", "ACCUMFUSED_GPU_STAGE"  # where a stage's process finds its own
LATEST = ("so far",)
_LONG = 160


class Journal:
    """Appends to a file (None: only prints), for one stage."""

    def __init__(self, path: Path | None, stage: str) -> None:
        self._path, self.stage = path, stage

    @classmethod
    def of_this_process(cls, stage: str) -> Journal:
        """That of the stage that this process was started for; without one, lines are only printed."""
        path = os.environ.get(FILE)
        return cls(None if path is None else Path(path), os.environ.get(STAGE, stage))

    def write(self, kind: str, **facts: Any) -> None:
        line: Line = {"stage": self.stage, "at": round(time.time(), 2), "kind": kind, **facts}
        print(say(line), flush=True)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:  # one write of one line: others append too
                file.write(json.dumps(line, default=str) + "\n")


def read(path: Path) -> list[Line]:
    """All whole lines: the last one may have been cut off."""
    return parse(path.read_text(encoding="utf-8")) if path.exists() else []


def parse(text: str) -> list[Line]:
    lines = []
    for each in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(each))
    return lines


def begin(path: Path, stages: Iterable[str]) -> None:
    """Takes the lines of these stages out: they run anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    anew = set(stages)
    kept = [json.dumps(line) + "\n" for line in read(path) if line["stage"] not in anew]
    path.write_text("".join(kept), encoding="utf-8")


def say(line: Line) -> str:
    """A line for a terminal; long texts are cut."""
    facts = {name: value for name, value in line.items() if name not in ("stage", "at", "kind", "ok")}
    said = ", ".join(f"{name} {short(value)}" for name, value in facts.items() if value not in (None, "", [], {}))
    verdict = {True: "ok: ", False: "NOT OK: ", None: ""}[line.get("ok")]
    return f"{line['stage']}: {line['kind']}: {verdict}{said}"


def short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
