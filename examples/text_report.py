"""What the two runs reached and what they cost: the check, the tables, the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from text_question import Answers
from text_watch import Stopwatch

FINAL_UPDATES = 10  # a single update's loss says little: its window is small
FP32_EPSILON = torch.finfo(torch.float32).eps

TAIL = {"accumulate": "accumulate", "clip": "norm and clip", "step": "step", "zero_grad": "zero_grad"}
AFTER_BACKWARD = {"accumfused": ("accumulate", "step"), "stock": ("clip", "step", "zero_grad")}

# Rounding alone sets two such runs apart, and training magnifies it: they are compared over so many updates only.
# Seen with two seeds: 3e-6, 3e-5, 3e-6 (2e-5 with --quick). A mean without token counts is 2e-2, 8e-1, 2e-2 apart.
CHECKED_UPDATES = 50
LOSS_TOLERANCE = 1e-4  # relative
GRAD_NORM_TOLERANCE = 5e-4  # relative
PARAMETER_TOLERANCE = 1e-4  # a tenth of the learning rate, which is what AdamW moves a weight by in one update


class Update(NamedTuple):
    """What is known of an update when it is done."""

    loss: float  # the mean over the window's tokens
    grad_norm: float  # before clipping


@dataclass
class Result:
    """Of both runs, under the keys "accumfused" and "stock"."""

    updates: dict[str, list[Update]]
    clocks: dict[str, Stopwatch]
    peak_bytes: dict[str, int]  # of gradients and accumulators
    parameter_differences: list[float]  # the largest, after each update

    def final_loss(self, run: str) -> float:
        return mean(update.loss for update in self.updates[run][-FINAL_UPDATES:])

    def tail_ms(self, run: str, parts: Iterable[str] = TAIL) -> float:
        """Of an update, the sum of its parts' medians."""
        return sum(self.clocks[run].median_ms(part) for part in parts)

    def disagreements(self) -> list[str]:
        """What sets the runs further apart than rounding can."""
        pairs = list(zip(self.updates["accumfused"], self.updates["stock"], strict=True))
        checks = {
            "loss": ([abs(a.loss / b.loss - 1) for a, b in pairs], LOSS_TOLERANCE),
            "gradient norm": ([abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs], GRAD_NORM_TOLERANCE),
            "parameters": (self.parameter_differences, PARAMETER_TOLERANCE),
        }
        return [
            f"the {name} of update {update} by {difference:.1e}, {tolerance:.0e} allowed"
            for name, (differences, tolerance) in checks.items()
            for update, difference in enumerate(differences[:CHECKED_UPDATES], 1)
            if not difference <= tolerance  # so NaN is one, too
        ]


def print_question(console: Console, answers: Answers) -> None:
    table = Table(title="1 x 8 samples against 4 x 2 accumulated", title_justify="left", show_lines=True)
    table.add_column("4 x 2, with")
    table.add_column("equal\nlengths", justify="right")
    table.add_column("real\nlengths", justify="right")
    table.add_column("why")
    for row in answers.rows:
        table.add_row(row.way, f"{row.equal_lengths:.1e}", f"{row.real_lengths:.1e}", row.why)
    console.print(table)
    console.print(
        "The largest difference of a weight after one update, for samples of equal length and as they come. "
        f"The update is one of SGD, {answers.largest_update:.1e} at most: Adam divides by the gradient's size, which "
        "hides most of a wrong factor.\n",
        style="dim",
    )


def print_result(console: Console, result: Result) -> None:
    updates = len(result.parameter_differences)
    table = Table(title=f"The same {updates} updates with two recipes", title_justify="left")
    table.add_column("")
    for name in ("accumfused", "stock", "ratio"):
        table.add_column(name, justify="right")

    def add(name: str, of: Callable[[str], float], style: str = "") -> None:
        ours, stock = of("accumfused"), of("stock")
        cells = (f"{value:.2f}" if value else "-" for value in (ours, stock))
        table.add_row(name, *cells, f"{stock / ours:.2f}x" if ours and stock else "", style=style)

    last = min(updates, FINAL_UPDATES)
    table.add_row(f"final loss, mean of {last} updates", *(f"{result.final_loss(run):.6f}" for run in result.updates))
    table.add_row("largest parameter difference", "", f"{result.parameter_differences[-1]:.1e}", end_section=True)
    for part, label in TAIL.items():
        add(f"{label}, ms", partial(result.tail_ms, parts=[part]))
    add("gradient tail, ms per update", result.tail_ms, style="bold")
    add("  of it after backward(), ms", lambda run: result.tail_ms(run, AFTER_BACKWARD[run]))
    add("whole update, ms", lambda run: result.clocks[run].median_ms("forward", "backward", *AFTER_BACKWARD[run]))
    table.add_section()
    add("gradients + accumulators, peak MB", lambda run: result.peak_bytes[run] / 1e6)
    console.print(table)
    console.print(
        "Times are medians over updates; the ratio is stock / accumfused. Stock accumulates inside backward(), where "
        "each addition is timed by itself. accumfused takes the norm while it accumulates, clips while it steps, and "
        "has nothing to zero. Its price: a micro-batch's gradients all stand beside the accumulators until folded.\n",
        style="dim",
    )


def draw(result: Result, output: Path) -> None:
    """Both loss curves, how far apart they are, and the tail's time by part."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(6, 5))
    losses = figure.add_subplot(grid[0, 0])
    difference = figure.add_subplot(grid[1, 0], sharex=losses)
    tail = figure.add_subplot(grid[:, 1])
    _draw_losses(result, losses, difference)
    _draw_tail(result, tail)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)


def _draw_losses(result: Result, losses: Axes, difference: Axes) -> None:
    ours, stock = ([update.loss for update in result.updates[run]] for run in ("accumfused", "stock"))
    numbers = range(1, len(ours) + 1)
    losses.plot(numbers, stock, color="#e69f00", linewidth=5, alpha=0.6, label="stock recipe")
    losses.plot(numbers, ours, color="#0072b2", linewidth=1.5, label="accumfused")
    losses.set(title="The same training", ylabel="loss, nats per byte")
    losses.tick_params(labelbottom=False)
    losses.legend(frameon=False)
    apart = [max(abs(a - b) / b, 1e-8) for a, b in zip(ours, stock, strict=True)]
    difference.semilogy(numbers, apart, color="0.3", linewidth=1)
    difference.axhline(FP32_EPSILON, color="0.6", linestyle=":", linewidth=1)
    difference.set(xlabel="update", ylabel="relative\ndifference", ylim=(5e-9, 1e-2), yticks=(1e-8, 1e-6, 1e-4, 1e-2))
    difference.annotate(
        "fp32 epsilon", (1, FP32_EPSILON), xytext=(0, 2), textcoords="offset points", fontsize=8, color="0.4"
    )


def _draw_tail(result: Result, tail: Axes) -> None:
    runs = {"accumfused": "accumfused", "stock": "stock recipe"}
    colors = {"accumulate": "#56b4e9", "clip": "#e69f00", "step": "#009e73", "zero_grad": "#999999"}
    for x, run in enumerate(runs):
        end = 0.0
        for part, label in TAIL.items():
            time = result.clocks[run].median_ms(part)
            if not time:
                continue
            inside = run == "stock" and part == "accumulate"
            tail.bar(x, time, 0.6, end, color=colors[part], edgecolor="white", hatch="//" if inside else None)
            label = f"{label}  {time:.1f}" + ("\n(inside backward)" if inside else "")
            thin = time < 0.05 * result.tail_ms("stock")
            place, align = (x + 0.32, "left") if thin else (x, "center")
            box = None if thin else {"facecolor": colors[part], "edgecolor": "none", "pad": 1}
            tail.text(place, end + time / 2, label, ha=align, va="center", fontsize=9, bbox=box)
            end += time
        tail.annotate(f"{end:.1f} ms", (x, end), xytext=(0, 5), textcoords="offset points", ha="center", weight="bold")
    ratio = result.tail_ms("stock") / result.tail_ms("accumfused")
    tail.set_title(f"The gradient tail: stock / accumfused = {ratio:.2f}x")
    tail.set(ylabel="ms, medians over updates", xlim=(-0.45, 1.65), xticks=range(len(runs)), xticklabels=runs.values())
    tail.set_ylim(top=1.1 * max(result.tail_ms(run) for run in runs))
