"""`python -m bench report FILE...`: results files as one page that needs nothing else, and its pictures as PNGs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.readings import gap, losses
from bench.stored import Columns, Results, ResultsError, Row, Stored, cell, load, name

if TYPE_CHECKING:
    from bench.pictures import Picture

_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 0.75rem; overflow-wrap: break-word; }
h1, h2, h3, h4 { line-height: 1.2; margin: 1.6em 0 0.5em; }
h2 { border-top: 2px solid #1a1a1a; padding-top: 0.6em; }
figure { margin: 1em 0; }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto; font-family: sans-serif; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.6em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td.words { text-align: left; font-weight: normal; min-width: 10em; }
thead th { border-bottom: 1px solid #1a1a1a; white-space: nowrap; }
.lost, .warning { color: #b03a2e; }
.gap { font-style: italic; }
small { display: block; }
ul { padding-left: 1.2em; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  thead th { white-space: normal; }
  figure, tr { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
  nav { display: none; }
}
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of python -m bench --json")
    parser.add_argument(
        "--output", type=Path, default=Path("build/report"), metavar="FOLDER",
        help="for index.html and the pictures; default: %(default)s",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            "the report is drawn with matplotlib, which is not installed; pip install 'accumfused[bench]'",
            file=sys.stderr,
        )
        return 2
    try:
        several = [load(file) for file in chosen.files]
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(write(several, chosen.output))
    return 0


def write(several: Sequence[Results], folder: Path) -> Path:
    """Writes index.html and one PNG for each picture. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(_page(several, _Pictures(folder)), encoding="utf-8")
    return page


class _Pictures:
    """Puts pictures into the page as SVG, and beside it as PNGs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def put(self, picture: Picture, prefix: str) -> str:
        self._count += 1
        path = self._folder / f"{self._count:02}-{_slug(prefix)}-{picture.kind}.png"
        return f"<figure>{picture.write(path, f'p{self._count}')}</figure>"


def _page(several: Sequence[Results], pictures: _Pictures) -> str:
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>accumfused: benchmark</title><style>{_STYLE}</style></head><body>",
        "<h1>accumfused: benchmark</h1>",
        "<p>Medians of interleaved rounds; blue is ours. A row of ours that another beats says so, a row that cannot "
        "do the work says why. docs/benchmarking.md says how it is measured, and where the figures mislead.</p>",
        "<nav><ul>",
        *(f'<li><a href="#f{number}">{escape(results.where())}</a></li>' for number, results in enumerate(several, 1)),
        "</ul></nav>",
    ]
    for number, results in enumerate(several, 1):
        parts += _results(number, results, pictures)
    return "\n".join([*parts, "</body></html>\n"])


def _results(number: int, results: Results, pictures: _Pictures) -> Iterator[str]:
    from bench import pictures as drawing  # imports matplotlib, so not before

    yield f'<section><h2 id="f{number}">{escape(results.where())}</h2>'
    yield from (f'<p class="warning">{escape(warning)}</p>' for warning in _warnings(results))
    yield _machine(results)
    roofline = drawing.of_all(results)
    if roofline is not None:
        yield "<h3>Roofline</h3>"
        yield pictures.put(roofline, str(number))
    suite = None
    for table in results.tables:
        if table.suite != suite:
            suite = table.suite
            yield f"<h3>{escape(suite)}</h3>"
        yield f"<h4>{escape(table.title)}</h4>"
        for picture in drawing.of(table):
            yield pictures.put(picture, f"{number}-{table.suite}")
        yield _table(table)
        if table.notes:
            yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in table.notes)}</ul>"
    yield "</section>"


def _warnings(results: Results) -> list[str]:
    found = []
    if results.quick:
        found.append("--quick: tiny sizes, the figures mean nothing.")
    if results.interrupted:
        found.append("This run was interrupted: what came after is missing.")
    load_before = results.machine.get("load")
    if isinstance(load_before, (int, float)) and load_before > 0.5:
        found.append(f"The machine was not idle: its load was {load_before:.1f} in the minute before.")
    return found


def _machine(results: Results) -> str:
    rows = [f"<tr><th>file</th><td class='words'>{escape(str(results.path))}</td></tr>"]
    for key, value in results.machine.items():
        written = f"{value:g}" if isinstance(value, float) else _flat(value)
        rows.append(f"<tr><th>{escape(key.replace('_', ' '))}</th><td class='words'>{escape(written)}</td></tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_flat(inner)}" for key, inner in value.items())
    return str(value)


def _table(table: Stored) -> str:
    """The rows under the table's own headings; the name of a row is a heading too."""
    if not table.rows:
        return "<p>No rows.</p>"
    lost = losses(table)
    named = all("name" in row for row in table.rows)
    first = "name" if named else next(iter(table.rows[0]), "")
    others = [column for column in table.columns if column["key"] != first]
    heading = next((column["heading"] for column in table.columns if column["key"] == first), "")
    head = "".join(f'<th scope="col">{escape(words)}</th>' for words in [heading, *(c["heading"] for c in others)])
    body = "".join(_row(row, others, lost.get(index, [])) for index, row in enumerate(table.rows))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: Row, others: Columns, lost: Sequence[str]) -> str:
    reason = gap(row)
    called = escape(name(row)) + "".join(f'<small class="lost">{escape(words)}</small>' for words in lost)
    empty = all(row.get(column["key"]) in (None, row.get("cannot", reason), reason) for column in others)
    if reason is not None and empty and others:
        cells = f'<td class="words gap" colspan="{len(others)}">{escape(reason)}</td>'
    else:
        called += f'<small class="gap">{escape(reason)}</small>' if reason is not None else ""
        cells = "".join(f"<td>{escape(cell(row, column))}</td>" for column in others)
    return f'<tr><th scope="row">{called}</th>{cells}</tr>'


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
