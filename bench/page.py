"""`python -m bench report FILE...`: results files as one page that needs nothing else, and its pictures as PNGs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import summary
from bench.parts import completed
from bench.readings import NOISE, gap, losses
from bench.stored import BUSY, Columns, Results, ResultsError, Row, Stored, cell, load, name

if TYPE_CHECKING:
    from bench.pictures import Picture

_WORDS = {
    "micro-batch": "one backward pass",
    "window": "the micro-batches between two updates",
    "tail": "what a training step does after a backward pass, up to updated weights: accumulate, unscale, clip, step",
    "verb": "one of the three calls that our tail consists of: accumulate, norm, step",
    "grad_scale trick": "the strongest stock recipe: the clipping factor is handed to AdamW(fused=True) as its "
    "<code>grad_scale</code>, so that clipping needs no pass of its own",
    "ceiling": "what a plain streaming loop with the same mix of reads and writes reaches on this machine",
    "stock": "PyTorch alone",
}
_ABOUT = {"load": "load average of the minute before (0: idle)", "quick": "tiny sizes (--quick)"}
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 48rem; margin: 0 auto;
  padding: 0.75rem; overflow-wrap: break-word; }
h1, h2, h3, h4 { line-height: 1.2; margin: 1.6em 0 0.5em; }
h2 { border-top: 2px solid #1a1a1a; padding-top: 0.6em; }
figure { margin: 1em 0; }
figure svg { display: block; width: 100%; height: auto; font-family: sans-serif; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.6em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top;
  white-space: nowrap; }
th:first-child, td.words { text-align: left; font-weight: normal; min-width: 10em; white-space: normal; }
thead th { border-bottom: 1px solid #1a1a1a; }
dt { font-weight: bold; display: inline; }
dd { margin: 0; display: inline; }
dd::after { content: "\\A"; white-space: pre; }
.lost, .warning { color: #b03a2e; }
.won { font-weight: bold; }
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
            "the report is drawn with matplotlib, which is not installed; pip install '.[bench]'",
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
    ]
    if len(several) > 1:
        links = (f'<li><a href="#f{number}">{escape(each.where())}</a></li>' for number, each in enumerate(several, 1))
        parts += ["<nav><ul>", *links, "</ul></nav>"]
    for number, results in enumerate(several, 1):
        parts += _results(number, results, pictures)
    return "\n".join([*parts, "</body></html>\n"])


def _results(number: int, results: Results, pictures: _Pictures) -> Iterator[str]:
    from bench import pictures as drawing  # imports matplotlib, so not before

    yield f'<section><h2 id="f{number}">{escape(results.where())}</h2>'
    yield from (f'<p class="warning">{escape(warning)}</p>' for warning in _warnings(results))
    yield from _summary(results)
    words = (f"<dt>{term}:</dt> <dd>{meaning}</dd>" for term, meaning in _WORDS.items())
    yield f"<h3>Words</h3><dl>{''.join(words)}</dl>"
    roofline = drawing.of_all(results)
    if roofline is not None:
        yield "<h3>Bytes and time</h3>"
        yield pictures.put(roofline, str(number))
    suite = None
    for table in map(completed, results.tables):
        if table.suite != suite:
            suite = table.suite
            yield f"<h3>{escape(suite)}</h3>"
        yield f"<h4>{escape(table.title)}</h4>"
        for picture in drawing.of(table):
            yield pictures.put(picture, f"{number}-{table.suite}")
        yield from _table(table)
        if table.notes:
            yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in table.notes)}</ul>"
    yield "<h3>The machine</h3>"
    yield _machine(results)
    yield "</section>"


def _summary(results: Results) -> Iterator[str]:
    """Ours beside the best stock recipe, one line for each table that has both."""
    found = summary.lines(results)
    if not found:
        return
    yield f"<h3>Summary</h3><p>{escape(summary.sentence(found))}</p>"
    body = ""
    for line in found:
        kind = "" if line.verdict.noise else ' class="lost"' if line.verdict.lost else ' class="won"'
        stock = f"{summary.figures(line.stock)}, {line.recipe}"
        body += (
            f'<tr><th scope="row">{escape(line.title)}</th><td{kind}>{escape(line.words())}</td>'
            f"<td>{escape(summary.figures(line.ours))}</td><td class='words'>{escape(stock)}</td></tr>"
        )
    heads = ("", "accumfused is", "accumfused", "best of PyTorch alone")
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    yield f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    yield (
        "<p>Medians of interleaved rounds. A factor is the median of the ratios within a round, where the run has kept "
        "it. Within the noise: the quartiles overlap; where they were not kept, the two are less than "
        f"{NOISE:.0%} apart. docs/internals/benchmarking.md says how it is measured, and where the figures mislead.</p>"
    )


def _warnings(results: Results) -> list[str]:
    found = []
    if results.quick:
        found.append("--quick: tiny sizes, the figures mean nothing.")
    if results.interrupted:
        found.append("This run was interrupted: what came after is missing.")
    load_before = results.machine.get("load")
    if isinstance(load_before, (int, float)) and load_before > BUSY:
        found.append(
            f"The machine was busy: its load average was {load_before:.1f} in the minute before the run, which uses "
            f"with {results.machine.get('threads', '?')} threads. The ratios bear some of that, the times less."
        )
    return found


def _machine(results: Results) -> str:
    rows = [f"<tr><th>file</th><td class='words'>{escape(str(results.path))}</td></tr>"]
    for key, value in results.machine.items():
        rows.append(f"<tr><th>{escape(_ABOUT.get(key, key.replace('_', ' ')))}</th>"
                    f"<td class='words'>{escape(_flat(value))}</td></tr>")  # fmt: skip
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_flat(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(_flat, value))
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(table: Stored) -> Iterator[str]:
    """The rows under the table's own headings; the name of a row is a heading too. What has no figure is a list."""
    if not table.rows:
        yield "<p>No rows.</p>"
        return
    lost = losses(table)
    named = all("name" in row for row in table.rows)
    first = "name" if named else next(iter(table.rows[0]), "")
    filled = {key for row in table.rows for key, value in row.items() if value is not None}
    others = [column for column in table.columns if column["key"] != first and column["key"] in filled]
    reasons: dict[str, list[str]] = {}
    body = ""
    for index, row in enumerate(table.rows):
        reason = gap(row)
        if reason is not None and all(
            row.get(column["key"]) in (None, row.get("cannot", reason), reason) for column in others
        ):
            reasons.setdefault(reason, []).append(name(row))
        else:
            body += _row(row, [column for column in others if column["key"] != "cannot"], lost.get(index, []))
    if body:
        heading = next((column["heading"] for column in table.columns if column["key"] == first), "")
        headings = [heading, *(column["heading"] for column in others if column["key"] != "cannot")]
        head = "".join(f'<th scope="col">{escape(words)}</th>' for words in headings)
        yield f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    for reason, names in reasons.items():
        yield f'<p class="gap">{escape(", ".join(names))}: {escape(reason)}</p>'


def _row(row: Row, columns: Columns, lost: Sequence[str]) -> str:
    reason = gap(row)
    called = escape(name(row)) + "".join(f'<small class="lost">{escape(words)}</small>' for words in lost)
    called += f'<small class="gap">{escape(reason)}</small>' if reason is not None else ""
    cells = "".join(f"<td>{escape(cell(row, column))}</td>" for column in columns)
    return f'<tr><th scope="row">{called}</th>{cells}</tr>'


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
