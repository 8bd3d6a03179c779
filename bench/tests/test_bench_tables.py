"""The benchmark's results: written, read, judged, compared, and drawn on a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.compare import main as compare
from bench.measure import Timing, Variant
from bench.peers import KNOWN
from bench.suites import lean
from bench.tables import Results, ResultsError, Table, load, timed, write
from bench.verdicts import OTHERS, OURS, TORCH, losses, owner, verdict

STORED = sorted((Path(__file__).parents[1] / "results").glob("*.json"))
MACHINE = {"cpu": "AMD EPYC", "threads": 2, "torch": "2.13.0", "date": "2026-11-21 12:53 UTC", "load": 0.1}


def row(name: str, ms: float, spread: float = 0.02, **others: Any) -> dict[str, Any]:
    return {"name": name, "ms": [ms * (1 - spread / 2), ms, ms * (1 + spread / 2)], **others}


def made(path: Path, rows: list[dict[str, Any]], ceiling: float = 50.0, **machine: Any) -> Path:
    """A results file with one table."""
    suites = {"update": [Table("a table", rows)], "ceilings": [Table("rates", [{"name": "step", "GB/s": ceiling}])]}
    write(path, Results({**MACHINE, **machine}, suites))
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = [{"name": "a", "ms": [1.00004, 2.0, 3.0], "x b": 1.23456}, {"name": "b", "cannot": 'say "why"'}]
    write(tmp_path / "new" / "out.json", Results(MACHINE, {"update": [Table("t", rows, ["a note"])]}, interrupted=True))
    results = load(tmp_path / "new" / "out.json")
    assert (results.machine, results.interrupted) == (MACHINE, True)
    read = [{"name": "a", "ms": [1.0, 2.0, 3.0], "x b": 1.235}, rows[1]]
    assert results.suites == {"update": [Table("t", read, ["a note"])]}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 1, "machine": {}, "suites": {}}', "has format 1, and this version reads 2"),
        ("[1]", "is no results file"),
        ("{", "is not JSON"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert compare([str(STORED[0]), str(path)]) == 2
    assert report.main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(said in line for line in lines)
    with pytest.raises(ResultsError, match=said):
        load(path)


def test_a_timing_is_a_row() -> None:
    slow, fast = (Timing(Variant(name, print, passes=("read", "scale", "step"))) for name in ("slow", "fast"))
    slow.seconds, fast.seconds, fast.at_ceiling = [0.1, 0.2, 0.4], [0.1, 0.1, 0.1], [0.0005, 0.0008, 0.0005]
    assert timed("t", [slow, fast], 100, {"slow": "slow"}).rows == [
        {"name": "slow", "ms": pytest.approx([150.0, 200.0, 300.0]), "moved B/param": 40, "x slow": 1.0},
        {"name": "fast", "ms": [100.0] * 3, "moved B/param": 40, "% of ceiling": pytest.approx(50), "x slow": 2.0},
    ]


def test_every_package_that_is_compared_with_has_its_owner() -> None:
    others = [each.name for each in lean.packages()]
    for name in [*KNOWN, *others, *(each.name for each in lean.torchs())]:
        table = Table("", [{"name": name}, {"name": "fully_shard + accumfused"}])
        assert [owner(each, table) for each in table.rows] == [OTHERS if name in others else TORCH, OURS], name
    parts = Table("", [{"name": "norm"}])
    assert owner(parts.rows[0], parts) == OURS


@pytest.mark.parametrize(
    ("others", "ours", "said"),
    [
        ([row("trick", 12.0), row("foreach", 50.0)], row("accumfused", 10.0), "1.20 times as fast as trick"),
        ([row("trick", 10.0), row("optimi", 8.0)], row("accumfused", 12.0), "1.50 times as slow as optimi"),
        ([row("trick", 10.0, 0.3)], row("accumfused", 9.0, 0.1), "within the noise of trick"),
        ([row("trick", 12.0, **{"x a": 1})], row("accumfused", 10.0, **{"x a": 1.3}), "1.30 times as fast as trick"),
        ([row("trick", 12.0, **{"x a": 1})], row("accumfused", 10.0, **{"x a": 0.9}), "within the noise of trick"),
        ([{"name": "trick", "ms": 10.0}], {"name": "accumfused", "ms": 10.4}, "within the noise of trick"),
        ([{"name": "trick", "ms": 10.0}], {"name": "accumfused", "ms": 10.6}, "1.06 times as slow as trick"),
    ],
)  # fmt: skip
def test_a_verdict_is_faster_slower_or_within_the_noise(others: Any, ours: Any, said: str) -> None:
    found = verdict(ours, Table("t", [*others, ours]), "ms")
    assert found is not None
    assert found.words() == said
    assert found.lost == ("slow" in said)


def test_losses_count_every_time_and_size_of_ours() -> None:
    rows = [
        row("stock", 10.0, **{"kept B/param": 6.0}),
        row("accumfused, a", 9.0, **{"kept B/param": 12.0, "x our fp32": 3.0}),
        row("accumfused, b", 25.0, **{"kept B/param": 5.0}),
        {"name": "optimi", "cannot": "it is not here"},
    ]
    assert [f"{each.name}: {each.words()}" for each in losses(Table("t", rows))] == [
        "accumfused, a: 2.00 times as large as stock", "accumfused, b: 2.50 times as slow as stock",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        (row("a", 10.0), row("a", 10.4), 0, "1 the same"),
        (row("a", 10.0), row("a", 10.6), 1, "a | ms: 10 -> 10.6 (+6%; noise 5%)"),
        (row("a", 10.0), row("a", 9.0), 0, "a | ms: 10 -> 9 (-10%; noise 5%)"),
        (row("a", 10.0, 0.2), row("a", 11.0), 0, "1 the same"),
        (row("a", 10.0), row("a", 11.0, 0.2), 0, "1 the same"),
        ({"name": "a", "kept B/param": 5.0}, {"name": "a", "kept B/param": 6.0}, 1, "kept B/param: 5 -> 6 (+20%"),
        ({"name": "a", "ms": 1.0, "x b": 2.0}, {"name": "a", "ms": 1.0, "x b": 1.0}, 0, "0 worse, 0 better, 1 "),
        (row("a", 10.0), row("b", 20.0), 0, "only in B:\n  update | a table | b | ms"),
    ],
)  # fmt: skip
def test_compare_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Any, after: Any, code: int, said: str
) -> None:
    files = [made(tmp_path / "a.json", [before]), made(tmp_path / "b.json", [after])]
    assert compare([*map(str, files)]) == code
    assert said in capsys.readouterr().out


def test_compare_takes_the_noise_and_names_what_differs_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(tmp_path / "a.json", [row("a", 10.0)])
    second = made(tmp_path / "b.json", [row("a", 12.0)], 25.0, cpu="another", quick=True, load=2.0)
    second.write_text(second.read_text().replace('"interrupted": false', '"interrupted": true'))
    assert compare([str(first), str(second), "--noise", "0.3"]) == 0
    said = capsys.readouterr().out
    for expected in ("different cpu: AMD EPYC against another", "B was measured with --quick", "B was interrupted",
                     "B had a load of 2.0", "step | GB/s: 50 -> 25 (-50%"):  # fmt: skip
        assert expected in said


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_results_are_small_and_equal_themselves(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert path.stat().st_size <= 30_000
    assert compare([str(path), str(path)]) == 0
    assert int(capsys.readouterr().out.rsplit("0 worse, 0 better, ")[1].split()[0]) > 40


def wide(path: Path) -> Path:
    """Rows whose quartiles lie far out, whose names are long, and of which some take many times as long as ours."""
    name = "accumfused, from p.grad, " + "under a name that is far too long for its line, " * 3
    return made(path, [
        row("clip + AdamW(fused)", 315.0, 1.9), row("grad_scale trick", 1_234_567.0, 1.0),
        row(name, 183.0, 1.8, **{"% of ceiling": 140}),
        {"name": "accumfused, bf16", "ms": [90.0, 172.9, 505.5], "kept B/param": 12345.6},
    ])  # fmt: skip


@pytest.mark.parametrize("path", [None, *STORED], ids=lambda path: "wide" if path is None else path.stem)
def test_the_report_draws_every_table_and_nothing_leaves_its_place(tmp_path: Path, path: Path | None) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = path or wide(tmp_path / "wide.json")
    assert report.main([str(path), "--output", str(tmp_path / "page")]) == 0
    assert all((tmp_path / f"page.{ending}").stat().st_size > 5000 for ending in ("png", "svg"))
    results = load(path)
    with matplotlib.rc_context(report.SETTINGS):
        figure = report.page(results)
        figure.draw_without_rendering()
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    words = " ".join(text.get_text() for text in texts).replace("\n", " ")
    tables = [table for suite, several in results.suites.items() if suite != "ceilings" for table in several]
    assert all(table.title in words for table in tables)
    assert len(figure.axes) == len(report.panels(results)) >= len(tables)
    for axes in figure.axes:
        right = axes.get_xlim()[1]
        assert all(x <= right for line in axes.lines for x in line.get_xdata())
        assert all(patch.get_width() <= right for patch in axes.patches)
    for drawn in texts:
        box = drawn.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, drawn.get_text()
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, drawn.get_text()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_colours_follow_owners_losing_figures_are_red_and_doubts_are_said() -> None:
    colors = pytest.importorskip("matplotlib.colors")
    rows = [row("clip + AdamW(fused)", 5.0), row("clip + torchao AdamW8bit", 900.0), row("accumfused", 6.0)]
    rows[2]["% of ceiling"] = 50
    figure = report.page(Results({**MACHINE, "quick": True}, {"update": [Table("t", rows)]}))
    (axes,) = figure.axes
    assert [colors.to_hex(bar.get_facecolor()) for bar in axes.patches] == [
        report.COLORS[whose] for whose in (TORCH, OTHERS, OURS)
    ]
    assert [bar.get_width() for bar in axes.patches] == [5.0, 24.0, 6.0]  # what is far longer than ours ends early
    assert [3.0, 3.0] in [list(line.get_xdata()) for line in axes.lines]  # at the ceiling
    said = {label.get_text(): label.get_color() for label in axes.texts}
    assert (said["5"], said["900"], said["6"]) == ("black", "black", report.LOST)
    assert said["accumfused: 1.20 times as slow as clip + AdamW(fused)"] == report.LOST
    assert "--quick" in figure.texts[0].get_text()


def test_without_matplotlib_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(STORED[0]), "--output", str(tmp_path / "page")]) == 2
    assert "pip install --group bench" in capsys.readouterr().err
