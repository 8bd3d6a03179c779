"""The demo's report (examples/text_report.py): a part of an update has a ratio only where whole updates differ."""

from __future__ import annotations

import io
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import text_report

STOCK = {"accumulate": 1.0, "clip": 1.0, "step": 2.0, "zero_grad": 0.5}
Times = tuple[float, ...]


class Clock:
    """A stopwatch after some updates, with forward's times; the other parts take as long in each."""

    def __init__(self, forward_ms: Times, **parts: float) -> None:
        self._updates: list[dict[str, float]] = [{"forward": ms, "backward": 50.0, **parts} for ms in forward_ms]

    def times_ms(self, *parts: str) -> list[float]:
        return [sum(update.get(part, 0.0) for part in parts) for update in self._updates]

    def median_ms(self, *parts: str) -> float:
        return statistics.median(self.times_ms(*parts))


@pytest.mark.parametrize(
    ("stock", "ours", "is_noise"),
    [
        ((50, 50, 50), (40, 53, 60), True),
        ((90, 90, 100, 110, 110), (94, 94, 60, 114, 114), True),
        ((50, 50, 50), (40, 41, 42), False),
    ],
    ids=["quartiles around 1", "a ratio below 1, medians above it", "faster"],
)
def test_a_part_has_a_ratio_only_where_whole_updates_differ_by_more_than_noise(
    stock: Times, ours: Times, is_noise: bool
) -> None:
    """The tails take 4.5 and 2 ms, the steps alone 2 and 1."""
    clocks: Any = {"accumfused": Clock(ours, accumulate=1.0, step=1.0), "stock": Clock(stock, **STOCK)}
    updates = {run: [text_report.Update(2.0, 1.0)] * len(ours) for run in text_report.RUNS}
    found = text_report.Result(updates, clocks, dict.fromkeys(text_report.RUNS, 1), [0.0] * len(ours))
    whole, file = found.ratio(text_report.WHOLE), io.StringIO()
    text_report.print_result(Console(width=200, file=file), found)
    table, said = file.getvalue().split("Times are medians")
    picture = " ".join(axes.get_title(loc="left") for axes in text_report.picture(found).axes)
    assert whole.is_noise is is_noise
    assert whole.in_short() in table
    assert all(whole.in_words() in text for text in (said, picture))
    assert [text.count("2.25x (2.25 - 2.25)") for text in (table, said, picture)] == [0 if is_noise else 1] * 3
    assert ("2.00x" in table) is not is_noise
