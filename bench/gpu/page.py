"""The readable page of a report: for each stage how it ended, what is not ok in full, and its figures in tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import stored
from bench.gpu.journal import LATEST, Line, short

_KNOWN = ("stage", "at", "kind", "ok")


def markdown(lines: Sequence[Line], *, details: bool = True) -> str:
    """The page. Args: details: with texts of several lines (tracebacks, what compilers say); else only their end."""
    stages = list(dict.fromkeys(str(line["stage"]) for line in lines))
    parts = ["# GPU report", table([_outcome(stage, lines) for stage in stages])]
    for stage in stages:
        own = [line for line in lines if line["stage"] == stage and line["kind"] not in ("begin", "end")]
        parts.append(f"## {stage}")
        for kind in dict.fromkeys(str(line["kind"]) for line in own):
            parts += _kind(kind, [line for line in own if line["kind"] == kind], details)
    return "\n\n".join(parts) + "\n"


def _outcome(stage: str, lines: Sequence[Line]) -> dict[str, Any]:
    """How a stage ended, and how much of it is not ok."""
    own = [line for line in lines if line["stage"] == stage]
    end = next((line for line in reversed(own) if line["kind"] == "end"), {})
    return {
        "stage": stage, "ended": end.get("outcome", "was ended together with everything"),
        "seconds": end.get("seconds"), "ok": sum(line.get("ok") is True for line in own),
        "not ok": sum(line.get("ok") is False for line in own),
    }  # fmt: skip


def _kind(kind: str, lines: Sequence[Line], details: bool) -> list[str]:
    """What is ok is only counted; the rest is a table, and below it the texts."""
    if kind in LATEST:
        lines = lines[-1:]
    shown = [line for line in lines if line.get("ok") is not True]
    parts = [f"### {kind}"]
    if len(shown) < len(lines):
        parts[0] += f": {len(lines) - len(shown)} of {len(lines)} ok"
    rows, texts = [], []
    for line in shown:
        facts = {name: value for name, value in line.items() if name not in _KNOWN}
        long = {name: value for name, value in facts.items() if isinstance(value, str) and "\n" in value.strip()}
        rows.append({name: value for name, value in facts.items() if name not in long})
        called = next((str(value) for value in rows[-1].values()), kind)
        texts += [(f"{called}, {name}", value.strip()) for name, value in long.items()]
    if any(rows):
        parts.append(table([row for row in rows if row]))
    for called, text in texts:
        if details:
            parts.append(f"{called}:\n\n````\n{text}\n````")
        else:
            parts.append(f"{called}: {short(text.splitlines()[-1])}")
    return parts


def tables(results: Path) -> str:
    """The suites that `python -m bench --json` has written there so far; nothing where it has not."""
    try:
        found = stored.load(results)
    except stored.ResultsError:
        return ""
    parts = []
    for each in found.tables:
        rows = [{column["heading"]: stored.cell(row, column) for column in each.columns} for row in each.rows]
        parts += [f"\n### {each.title}\n", table(rows), *(f"\n{note}" for note in each.notes)]
    return "\n".join([f"\n## {results.name}\n", *parts, ""])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, with a column for every key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    out = [f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
    for row in rows:
        cells = [_cell(row.get(key)).replace("|", "\\|") for key in keys]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(own)}" for name, own in value.items())
    return short(value)
