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
from bench.owners import NOBODY, OTHERS, OURS, TORCH, owners
from bench.page import main as report_command
from bench.parts import REST, WHOLE
from bench.peers import KNOWN as KNOWN_PEERS
from bench.readings import gap, losses, readings
from bench.report import Column, Table, write_json
from bench.stored import ResultsError, Stored, load, name, place, slug
from bench.summary import lines

RESULTS = Path(__file__).parents[1] / "results"
KEPT = next((RESULTS / "epyc-avx512-2-threads").glob("*.json"))
ALL_KEPT = sorted(RESULTS.glob("*-threads/*.json"))
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


@pytest.fixture(scope="module")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def kept_page(kept_folder: Path) -> Page:
    """Of the kept results; drawing them takes seconds."""
    return report(kept_folder, KEPT)


def test_the_page_of_the_kept_results_has_every_table_row_and_note(kept_page: Page, kept_folder: Path) -> None:
    page, results = kept_page, load(KEPT)
    assert len(results.tables) >= 10
    for table in results.tables:
        assert table.title in page.words
        assert all(name(row) in page.words for row in table.rows)
        assert all(note in page.words for note in table.notes)
    assert all(str(results.machine[key]) in page.words for key in ("cpu", "torch", "system", "date"))
    kinds = {path.stem.rpartition("-")[2] for path in kept_folder.glob("*.png")}
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
    assert "a peer: cannot: fp16 gradients & scales" in page.words
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
    assert "pip install '.[bench]'" in capsys.readouterr().err
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
    assert [text.get_text() for text in drawn.axes[0].texts] == ["tail: accumfused"]


def wide(path: Path) -> Path:
    """Rows whose quartiles lie far out, whose names are long, and of which some take many times as long."""
    rows = [
        timed("clip + AdamW(fused)", 315.0, 2.1, share=0.9),
        timed("grad_scale trick", 1_234_567.0, 1.0),
        timed(
            "accumfused, from p.grad, " + "under a name that is far too long for its line, " * 3, 183.0, 1.8, share=1.4
        ),
        timed("accumfused, after accumulate()", 390.0),
        timed("clip + torchao _AdamW", 12_000.0, share=0.01),
    ]
    sizes = [
        {"name": "clip + AdamW(fused), bf16 throughout", "milliseconds": 37.0, "persistent_bytes": 6.0},
        {"name": "accumfused, bf16 + split16, fp32 states", "milliseconds": 36.9, "persistent_bytes": 12345.6},
    ]
    spread = [timed("autograd + trick", 183.0), timed("accumfused", 172.9, first_quartile=90.0, third_quartile=505.5)]
    return made(path, {"tail": rows, "window": spread, "lean": sizes})


@pytest.mark.parametrize("file", [None, *ALL_KEPT], ids=lambda file: "wide" if file is None else file.parent.name)
def test_no_label_bar_or_whisker_leaves_its_picture(tmp_path: Path, file: Path | None) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from bench import pictures

    results = load(file or wide(tmp_path / "wide.json"))
    drawn = [picture for table in results.tables for picture in pictures.of(table)]
    drawn += [picture for picture in [pictures.of_all(results)] if picture is not None]
    assert len(drawn) >= 3
    for picture in drawn:
        picture.figure.draw_without_rendering()
        axes, canvas = picture.figure.axes[0], picture.figure.bbox
        for text in picture.figure.findobj(Text):
            box = text.get_window_extent()
            if text.get_visible() and text.get_text() and box.width > 0 and not _is_hidden_tick(axes, text):
                inside = canvas.x0 <= box.x0, box.x1 <= canvas.x1, canvas.y0 <= box.y0, box.y1 <= canvas.y1
                assert all(inside), (picture.title, text.get_text())
        if picture.kind in ("bars", "memory"):
            ends = [x for line in axes.lines for x in line.get_xdata()]
            ends += [patch.get_x() + patch.get_width() for patch in axes.patches]
            assert max(ends) <= axes.get_xlim()[1], picture.title


def _is_hidden_tick(axes: Any, text: Any) -> bool:
    """Ticks beyond the limits are made, and not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if text in (tick.label1, tick.label2):
                return not low <= tick.get_loc() <= high
    return False


def test_bars_far_longer_than_ours_end_early_with_their_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.bars import bars

    rows = [timed("accumfused", 10.0), timed("grad_scale trick", 20.0), timed("clip + AdamW(foreach)", 900.0)]
    drawn = bars(load(made(tmp_path / "one.json", {"tail": rows})).tables[0])
    assert drawn is not None
    widths = [patch.get_width() for patch in drawn.axes[0].patches]
    assert widths[:2] == [10.0, 20.0]
    assert widths[2] < 50.0
    labels = [text.get_text() for text in drawn.axes[0].texts]
    assert "900 ms" in labels
    assert "10 ms, fastest" in labels


def test_colours_follow_the_owner_in_times_and_in_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from bench.bars import bars, memory
    from bench.owners import COLORS

    names = [
        "clip + AdamW(fused), fp32",
        "clip + torchao AdamW8bit, fp32",
        "accumfused, fp32",
        "fully_shard + accumfused",
    ]
    rows = [{"name": called, "milliseconds": 5.0, "persistent_bytes": 12.0} for called in names]
    (table,) = load(made(tmp_path / "a.json", {"lean": rows})).tables
    expected = [TORCH, OTHERS, OURS, OURS]
    assert owners(table) == expected
    for make in (bars, memory):
        drawn = make(table)
        assert drawn is not None
        colors = [to_hex(patch.get_facecolor()) for patch in drawn.axes[0].patches]
        assert colors == [COLORS[owner] for owner in expected]


def test_every_package_that_is_compared_with_has_its_owner() -> None:
    torchs = {"fused", "grad_scale", "foreach", "for-loop", "compiled"}
    for peer, adapter in KNOWN_PEERS.items():
        table = Stored("tail", "", [{"name": adapter.label}, {"name": "accumfused"}], [], [])
        assert owners(table) == [TORCH if peer in torchs else OTHERS, OURS], peer
    alone = Stored("processes", "", [{"name": "backward passes alone"}, {"name": "accumfused"}], [], [])
    assert owners(alone) == [NOBODY, OURS]


def test_the_summary_stands_first_and_the_machine_last(kept_page: Page) -> None:
    order = ["Summary", "Words", "Bytes and time", "fp32 (148 tensors", "load average of the minute before"]
    assert sorted(order, key=kept_page.words.index) == order
    before = kept_page.words[: kept_page.words.index("Summary")]
    assert "The machine was busy: its load average was 1.2" in before


def test_the_summary_says_faster_slower_and_within_the_noise(tmp_path: Path) -> None:
    suites = {
        "tail": [
            timed("grad_scale trick", 12.0, over_trick=1), timed("clip + AdamW(foreach)", 50.0),
            timed("accumfused, from p.grad", 10.0, over_trick=1.25), timed("accumfused, after accumulate()", 5.0),
        ],
        "window": [timed("autograd + trick", 10.0, 0.1), timed("accumfused", 10.5, 0.1)],
        "small": [timed("grad_scale trick", 10.0), timed("clip + torchao _AdamW", 5.0), timed("accumfused", 30.0)],
        "train": [
            {"name": "autograd + clip", "milliseconds": 286.0, "over_stock": 1.0},
            {"name": "accumfused", "milliseconds": 289.8, "over_stock": 1.0015},
        ],
    }  # fmt: skip
    path = made(tmp_path / "a.json", suites)
    assert [(line.title, line.words()) for line in lines(load(path))] == [
        ("tail: a table", "1.25 times as fast"),
        ("window: a table", "within the noise"),
        ("small: a table", "3.0 times as slow; 6.0 times as slow as clip + torchao _AdamW"),
        ("train: a table", "within the noise"),
    ]
    said = report(tmp_path / "page", path).words
    assert "faster in 1 of 4 comparisons, by 1.25 to 1.25 times, slower in 1, within the noise in 2" in said


def test_the_parts_of_a_step_sum_to_the_whole_or_a_note_says_by_how_much_not(tmp_path: Path) -> None:
    def parts(*microseconds: float) -> list[dict[str, Any]]:
        called = ["norm", "step", WHOLE]
        return [{"name": part, "microseconds": us} for part, us in zip(called, microseconds, strict=True)]

    less = report(tmp_path / "less", made(tmp_path / "less.json", {"small": parts(30.0, 50.0, 100.0)}))
    assert f"{REST}20" in less.words.replace("\n", "")
    assert "the parts sum to" not in less.words
    more = report(tmp_path / "more", made(tmp_path / "more.json", {"small": parts(60.0, 80.0, 100.0)}))
    assert "the parts sum to 140% of the whole (140 of 100 us)" in more.words
    assert REST not in more.words


def test_the_suite_times_the_parts_of_a_step_within_it() -> None:
    from bench.ceilings import Ceilings
    from bench.suites import Bench, small

    def no_loops() -> Any:
        raise RuntimeError("no compiler")

    tables = small.run(Bench(Ceilings(no_loops), quick=True, rounds=1, peers=()))
    rows = {row["name"]: row["microseconds"] for row in tables[-1].rows}
    assert list(rows)[-2:] == [REST, WHOLE]
    assert {"norm", "step", "is the plan still right?"} < rows.keys()
    assert min(rows.values()) > 0
    assert sum(rows.values()) == pytest.approx(2 * rows[WHOLE])


def test_a_table_without_any_figure_is_a_line_for_each_reason(tmp_path: Path) -> None:
    rows = [{"name": called, "cannot": "it has one pass for each"} for called in ("a", "b")]
    page = report(tmp_path / "page", made(tmp_path / "a.json", {"tail": rows}))
    assert "a, b: cannot: it has one pass for each" in page.words
    assert page.counts["table"] == 1  # the machine's


def test_tables_scroll_by_themselves(kept_page: Page, kept_folder: Path) -> None:
    written = (kept_folder / "index.html").read_text()
    assert ".scroll { overflow-x: auto; }" in written
    assert written.count('<div class="scroll"><table>') == kept_page.counts["table"]


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
    close = [timed("stock", 10.0, 0.2), timed("accumfused", 11.0, 0.2)]
    (table,) = load(made(tmp_path / "b.json", {"tail": close})).tables
    assert losses(table) == {}  # the quartiles overlap
    assert [gap(row) for row in rows] == [None, None, None, "skipped: x"]
