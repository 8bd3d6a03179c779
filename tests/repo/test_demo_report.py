"""What the demo says of its two runs: noise is called noise, and the picture holds its words."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from matplotlib.text import Text
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ("text_report", "text_watch", "text_question", "text_data", "text_model")
PARTS = {
    "accumfused": {"forward": 90.0, "backward": 180.0, "accumulate": 3.0, "step": 2.8},
    "stock": {"forward": 90.0, "backward": 182.0, "accumulate": 2.0, "clip": 3.4, "step": 3.0, "zero_grad": 0.05},
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as the demo imports it, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("text_report")
    for name in NAMES:
        sys.modules.pop(name, None)


def made(report: Any, noise: float = 0.05, noisy: str = "forward") -> Any:
    """Both runs: in every second update a part of stock's takes longer, in the others the same part of ours."""
    from text_watch import Stopwatch

    clocks = {}
    for run, parts in PARTS.items():
        clocks[run] = Stopwatch()
        for update in range(13):
            slow = (update % 2 == 0) == (run == "stock")
            for part, ms in parts.items():
                clocks[run]._now[part] = ms * (1 + (noise if slow and part == noisy else 0.0)) / 1e3  # noqa: SLF001  # not the package's
            clocks[run].end_update()
    ours = [report.Update(3.0 - 0.1 * update, 1.0) for update in range(13)]
    stock = [*ours[:9], *(report.Update(update.loss + 1e-6, 1.0) for update in ours[9:])]
    updates = {"accumfused": ours, "stock": stock}
    return report.Result(updates, clocks, {"accumfused": 30_000_000, "stock": 20_000_000}, [1e-6] * 13)


def said(report: Any, result: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    report.print_result(console, result)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_ratio_whose_quartiles_include_one_is_noise(report: Any) -> None:
    lines = said(report, made(report)).splitlines()
    assert "noise (0.99 - 1.03)" in next(line for line in lines if "whole update, ms" in line)
    assert "1.46x (1.46 - 1.46)" in next(line for line in lines if "gradient tail, ms" in line)
    assert lines[-2:] == [
        "gradient tail: 8.45 (8.45 - 8.45) ms with the stock recipe, 5.80 (5.80 - 5.80) ms with accumfused; "
        "1.46x (1.46 - 1.46)",
        "whole update: 280.70 (278.45 - 282.95) ms with the stock recipe, 278.05 (275.80 - 280.30) ms with accumfused; "
        "1.01x (0.99 - 1.03), within the noise",
    ]
    assert "noise" not in " ".join(said(report, made(report, noise=0.0)).splitlines()[-2:])


def test_equal_losses_are_said_and_drawn_to_be_equal(report: Any) -> None:
    result = made(report)
    assert "losses: 9 of 13 are equal to the last bit; the others differ by 6e-07 at most" in said(report, result)
    losses, difference, _ = report.picture(result).axes
    assert "9 of 13 losses equal to the last bit" in losses.get_title(loc="left")
    assert "equal" in [label.get_text() for label in difference.get_yticklabels()]
    drawn = [line for line in difference.lines if list(line.get_ydata()) == [report.EQUAL] * 9]
    assert len(drawn) == 1


@pytest.mark.parametrize("noisy", ["forward", "step"])  # the whole update is noise, or the tail is too
def test_no_words_of_the_picture_leave_it_or_cover_others(report: Any, noisy: str) -> None:
    figure = report.picture(made(report, 1.4, noisy))
    figure.draw_without_rendering()
    margin = 0.01 * figure.bbox.width
    boxes = {text.get_text(): text.get_window_extent() for text in figure.findobj(Text) if _is_drawn(text, figure)}
    for words, box in boxes.items():
        assert margin <= box.x0, words
        assert box.x1 <= figure.bbox.x1 - margin, words
        assert box.y0 >= margin, words
        assert box.y1 <= figure.bbox.y1 - margin, words
    for (one, first), (other, second) in combinations(boxes.items(), 2):
        assert not first.overlaps(second), (one, other)
    bars = [patch.get_window_extent() for patch in figure.axes[2].patches]
    for label in (label for label in figure.axes[2].texts if label.get_ha() == "left"):
        assert not any(label.get_window_extent().overlaps(bar) for bar in bars), label.get_text()


def _is_drawn(text: Any, figure: Any) -> bool:
    if not (text.get_visible() and text.get_text() and text.get_window_extent().width > 0):
        return False
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if text in (tick.label1, tick.label2):
                    return bool(low <= tick.get_loc() <= high)
    return True
