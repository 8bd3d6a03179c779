"""`python -m bench.numerics`: what each storage format costs in accuracy, with pictures and a report.

Takes some minutes; the figures are the same on every machine, up to what peers draw and compile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

try:
    import matplotlib  # noqa: F401
    import rich  # noqa: F401
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed; pip install '.[numerics]'")

from rich.console import Console

from bench.machine import machine
from bench.numerics.pictures import draw
from bench.numerics.sections import SECTIONS, measure
from bench.report import Table, show, write_json


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.numerics", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/numerics"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one per core")
    chosen = parser.parse_args()
    unknown = set(chosen.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    if chosen.processes < 1:
        parser.error(f"--processes must be at least 1, got {chosen.processes}")

    console = Console(width=None if sys.stdout.isatty() else 200)
    about = {**machine(), "quick": chosen.quick, "command": command(chosen)}
    start = time.perf_counter()
    sections = measure(chosen.quick, chosen.processes, set(chosen.sections) or None)
    about["seconds"] = round(time.perf_counter() - start)
    for tables in sections.values():
        for table in tables:
            show(table, console)
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_json(chosen.out / "numerics.json", about, sections)
    pictures = draw(sections, chosen.out)
    (chosen.out / "report.md").write_text(document(about, sections, pictures))
    console.print(f"{about['seconds']} s; the report is {chosen.out / 'report.md'}")


def command(chosen: argparse.Namespace) -> str:
    return " ".join(["python -m bench.numerics", *chosen.sections, *(["--quick"] if chosen.quick else [])])


def document(about: dict[str, Any], sections: dict[str, list[Table]], pictures: dict[str, Path]) -> str:
    """The report in Markdown."""
    quick = "\n\n**--quick: tiny sizes, the figures mean nothing.**" if about["quick"] else ""
    parts = [
        f"# What each storage format costs in accuracy{quick}",
        f"`{about['command']}`, {about['cpu']} ({about['instruction_set']}), torch {about['torch']}, accumfused "
        f"{about['accumfused']}, {about['system']}, {about['date']}; {about['seconds']} s, after a load "
        f"of {about['load']:.1f}. docs/internals/numerics.md says what the figures mean.",
    ]
    for name, tables in sections.items():
        parts.append(f"## {name}")
        if name in pictures:
            parts.append(f"![{tables[0].title}]({pictures[name].name})")
        parts += [markdown(table) for table in tables]
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """A table in Markdown."""
    lines = [f"**{table.title}**", ""]
    lines.append("| " + " | ".join(column.heading.replace("|", "\\|") for column in table.columns) + " |")
    lines.append("|" + "---|" * len(table.columns))
    for row in table.rows:
        values = [(column, row.get(column.key)) for column in table.columns]
        cells = ("-" if value is None else column.format.format(value) for column, value in values)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])


if __name__ == "__main__":
    main()
