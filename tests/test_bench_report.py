"""The benchmark's results: written, read, compared, and drawn on a page."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from bench.compare import main as compare
from bench.page import main as report_command
from bench.readings import gap, losses, readings
from bench.report import Column, Table, write_json
from bench.stored import ResultsError, load, name, place, slug

KEPT = next((Path(__file__).parents[1] / "bench" / "results" / "epyc-avx512-2-threads").glob("*.json"))
MACHINE = {"cpu": "AMD EPYC", "threads": 2, "instruction_set": "x86_64_v4", "date": "2026-11-21 12:53 UTC", "load": 0.1}


def timed(called: str, median: float, spread: float = 0.0, **others: Any) -> dict[str, Any]:
    quartiles = {"first_quartile": median * (1 - spread / 2), "third_quartile": median * (1 + spread / 2)}
    return {"name": called, "unit": "ms", "median": median, **quartiles, **others}


def made(path: Path, suites: dict[str, list[dict[str, Any]]], **whole: Any) -> Path:
    """A results file with one table for each suite."""
    tables = {suite: [{"title": f"{suite}: a table", "rows": rows, "notes": []}] for suite, rows in suites.items()}
    path.write_text(json.dumps({"format": 1, "machine": MACHINE, "suites": tables, **whole}))
    return path


class Page(HTMLParser):
    """Fails where an element is closed that is not open; keeps words and links."""

    EMPTY = ("meta", "br", "img", "link")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}
        self.words = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.ids += [value or "" for key, value in attrs if key == "id"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def report(folder: Path, *files: Path) -> Page:
    pytest.importorskip("matplotlib")
    assert report_command([*map(str, files), "--output", str(folder)]) == 0
    page = Page(folder / "index.html")
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert page.counts["style"] == 1
    assert "script" not in page.counts
    assert "http" not in page.words
    assert page.counts.get("svg", 0) == len(list(folder.glob("*.png")))
    return page


def test_the_page_of_the_kept_results_has_every_table_row_and_note(tmp_path: Path) -> None:
    page, results = report(tmp_path, KEPT), load(KEPT)
    assert len(results.tables) >= 10
    for table in results.tables:
        assert table.title in page.words
        assert all(name(row) in page.words for row in table.rows)
        assert all(note in page.words for note in table.notes)
    assert all(str(results.machine[key]) in page.words for key in ("cpu", "torch", "system", "date"))
    kinds = {path.stem.rpartition("-")[2] for path in tmp_path.glob("*.png")}
    assert kinds == {"roofline", "bars", "scale", "memory"}


def test_gaps_lost_rows_and_losses_are_on_the_page(tmp_path: Path) -> None:
    rows = [
        timed("stock <b>", 10.0, share=0.9),
        timed("accumfused", 12.0, share=0.5),
        {"name": "a peer", "median": None, "cannot": "fp16 gradients & scales"},
    ]
    train = [{"name": "stock", "losses": [3.0, 2.0]}, {"name": "accumfused", "losses": [3.0, 1.9]}]
    several = [
        made(tmp_path / "one.json", {"tail": rows}, interrupted=True),
        made(tmp_path / "two.json", {"train": train}),
    ]
    page = report(tmp_path / "page", *several)
    assert "stock <b>" in page.words
    assert "20% slower than stock <b>" in page.words
    assert page.words.count("cannot: fp16 gradients & scales") == 2  # in the bars and in the table
    assert "interrupted" in page.words
    assert sorted(path.name for path in (tmp_path / "page").glob("*.png")) == [
        "01-1-tail-bars.png",
        "02-2-train-losses.png",
    ]


def test_without_matplotlib_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report_command([str(KEPT), "--output", str(tmp_path / "page")]) == 2
    assert "pip install 'accumfused[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_bars_and_roofline_draw_the_ceilings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.bars import bars
    from bench.roofline import roofline

    row = timed("accumfused", 12.0, share=0.5, bytes_per_parameter=32, nanoseconds_per_parameter=0.8)
    ceilings = [{"name": "step", "best": 60.0, "median": 40.0}]
    results = load(made(tmp_path / "one.json", {"tail": [row], "ceilings": ceilings}))
    drawn = bars(results.tables[0])
    assert drawn is not None
    assert drawn.axes[0].patches[0].get_width() == 12.0
    assert [6.0, 6.0] in [list(line.get_xdata()) for line in drawn.axes[0].lines]
    drawn = roofline(results)
    assert drawn is not None
    line, point = drawn.axes[0].lines
    assert all(
        bytes_ / ns == pytest.approx(40.0) for bytes_, ns in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([32], [0.8])


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        (timed("a", 10.0), timed("a", 10.4), 0, "1 the same"),
        (timed("a", 10.0), timed("a", 10.6), 1, "10 ms -> 10.6 ms (+6%; noise 5%)"),
        (timed("a", 10.0), timed("a", 9.0), 0, "10 ms -> 9 ms (-10%; noise 5%)"),
        (timed("a", 10.0, 0.2), timed("a", 11.0), 0, "1 the same"),
        (timed("a", 10.0), timed("a", 11.0, 0.2), 0, "1 the same"),
        (timed("a", 10.0), {**timed("a", 0), "unit": "us", "median": 20_000.0}, 1, "(+100%"),
        ({"name": "a", "median_ms": 1.0}, {"name": "a", "median_ms": 1.2}, 1, "median ms: 1 ms -> 1.2 ms"),
        ({"name": "a", "milliseconds": 9.0, "quartiles": "8 - 10.0"}, {"name": "a", "milliseconds": 10}, 0, "1 the s"),
        ({"name": "a", "later_megabytes": 0.01}, {"name": "a", "later_megabytes": 0.3}, 0, "1 the same"),
        ({"name": "a", "later_megabytes": 100.0}, {"name": "a", "later_megabytes": 120.0}, 1, "100 MB -> 120 MB"),
        ({"name": "a", "persistent_bytes": 5.0}, {"name": "a", "persistent_bytes": 6.0}, 1, "5 B -> 6 B"),
        (timed("a", 10.0), timed("b", 20.0), 0, "only in B:\n  tail | tail: a table | b"),
        (timed("a", 10.0), {"name": "a", "cannot": "no compiler"}, 0, "a: median (B: cannot: no compiler)"),
    ],
)  # fmt: skip
def test_compare_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Any, after: Any, code: int, said: str
) -> None:
    files = [made(tmp_path / "a.json", {"tail": [before]}), made(tmp_path / "b.json", {"tail": [after]})]
    assert compare([*map(str, files)]) == code
    assert said in capsys.readouterr().out


def test_compare_takes_the_noise_and_names_what_differs_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = ([{"name": "step", "median": 50.0}], [{"name": "step", "median": 25.0}])
    first = made(tmp_path / "a.json", {"tail": [timed("a", 10.0)], "ceilings": ceilings[0]})
    second = made(
        tmp_path / "b.json", {"tail": [timed("a", 12.0)], "ceilings": ceilings[1]}, interrupted=True,
        machine={**MACHINE, "cpu": "another", "quick": True, "load": 2.0},
    )  # fmt: skip
    assert compare([str(first), str(second), "--noise", "0.3"]) == 0
    said = capsys.readouterr().out
    assert "different machines: cpu AMD EPYC against another" in said
    assert "B was measured with --quick" in said
    assert "B was interrupted" in said
    assert "B's machine was not idle: its load was 2.0" in said
    assert "step: 50.0 -> 25.0 GB/s (-50%)" in said
    with pytest.raises(SystemExit, match="2"):
        compare([str(first), str(second), "--noise", "-1"])


def test_the_kept_results_equal_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(KEPT), str(KEPT)]) == 0
    assert "0 worse, 0 better" in capsys.readouterr().out
    assert sum(len(readings(row)) for table in load(KEPT).tables for row in table.rows) > 40


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 2, "machine": {}, "suites": {}}', "has format 2, and this version reads 1"),
        ('{"machine": {}}', "is no results file"),
        ("[1]", "is no results file"),
        ("{", "is not JSON"),
        ('{"machine": {}, "suites": {"tail": [{"title": "t", "rows": [1], "notes": []}]}}', "a row is a mapping"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert compare([str(KEPT), str(path)]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ResultsError, match=said):
        load(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    table = Table("a table", [Column("name", ""), Column("x", "X", "{:.1f}")], [{"name": "a", "x": 1.0}], ["a note"])
    write_json(tmp_path / "new" / "out.json", dict(MACHINE), {"tail": [table]}, interrupted=True)
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert (found["format"], found["interrupted"]) == (1, True)
    assert found["accumfused"].count(".") == 2
    results = load(tmp_path / "new" / "out.json")
    assert (results.machine, results.interrupted) == (MACHINE, True)
    (again,) = results.tables
    assert (again.suite, again.title, again.rows, again.notes) == ("tail", "a table", table.rows, ["a note"])
    assert again.columns[1] == {"key": "x", "heading": "X", "format": "{:.1f}"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.json"]


def test_results_lie_under_their_machine(tmp_path: Path) -> None:
    kept = load(KEPT).machine
    assert place(f"{KEPT.parents[1]}/", kept) == KEPT
    assert place(str(tmp_path), kept) == tmp_path / "epyc-avx512-2-threads" / "2026-11-21.json"
    assert place("out.json", kept) == Path("out.json")
    xeon = {"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "threads": 1, "instruction_set": "x86_64_v3"}
    assert slug(xeon) == "xeon-platinum-8481c-avx2-1-thread"
    assert slug({**xeon, "gpu": "NVIDIA H200"}) == "h200"


def test_losses_and_gaps_are_found_in_rows(tmp_path: Path) -> None:
    rows = [timed("stock", 10.0), timed("accumfused, a", 9.0), timed("accumfused, b", 25.0)]
    rows.append({"name": "peer", "why": "skipped: x"})
    (table,) = load(made(tmp_path / "a.json", {"tail": rows})).tables
    assert losses(table) == {2: ["2.5 times as slow as stock"]}
    assert [gap(row) for row in rows] == [None, None, None, "skipped: x"]
