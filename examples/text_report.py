"""What the two runs reached and what they cost: the check, the tables, the picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from text_noise import Noise
from text_question import Answers
from text_watch import Stopwatch

FINAL_UPDATES = 10  # a single update's loss says little: its window is small
FP32_EPSILON = torch.finfo(torch.float32).eps
EQUAL = 1e-9  # where the picture draws losses that do not differ

TAIL = {"accumulate": "accumulate", "clip": "norm and clip", "step": "step", "zero_grad": "zero_grad"}
RUNS = ("accumfused", "stock")
AFTER_BACKWARD = {"accumfused": ("accumulate", "step"), "stock": ("clip", "step", "zero_grad")}
ALL_OF_TAIL = dict.fromkeys(RUNS, tuple(TAIL))
WHOLE = {run: ("forward", "backward", *parts) for run, parts in AFTER_BACKWARD.items()}

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


class Spread(NamedTuple):
    """A median between its quartiles."""

    first: float
    median: float
    third: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*quantiles(values, n=4, method="inclusive")) if len(values) > 1 else cls(*values * 3)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.first:.2f} - {self.third:.2f})"


class Ratio(NamedTuple):
    """Stock's time over ours, update by update."""

    spread: Spread
    is_noise: bool  # it says nothing about who is faster: 1 is between the quartiles, or the medians say the opposite

    @classmethod
    def of(cls, stock: Sequence[float], ours: Sequence[float]) -> Ratio:
        spread = Spread.of([a / b for a, b in zip(stock, ours, strict=True)])
        of_medians = median(stock) / median(ours)
        return cls(spread, spread.first <= 1 <= spread.third or (of_medians - 1) * (spread.median - 1) < 0)

    def in_short(self) -> str:
        first, middle, third = self.spread
        return f"{'noise' if self.is_noise else f'{middle:.2f}x'} ({first:.2f} - {third:.2f})"

    def in_words(self) -> str:
        first, middle, third = self.spread
        return f"{middle:.2f}x ({first:.2f} - {third:.2f}){', within the noise' if self.is_noise else ''}"


@dataclass
class Result:
    """Of both runs, under the keys "accumfused" and "stock"."""

    updates: dict[str, list[Update]]
    clocks: dict[str, Stopwatch]
    peak_bytes: dict[str, int]  # of gradients and accumulators
    parameter_differences: list[float]  # the largest, after each update
    noise: Noise | None = None  # of accumfused's model, at the end

    def final_loss(self, run: str) -> float:
        return mean(update.loss for update in self.updates[run][-FINAL_UPDATES:])

    def tail_ms(self, run: str, parts: Iterable[str] = TAIL) -> float:
        """Of an update, the sum of its parts' medians."""
        return sum(self.clocks[run].median_ms(part) for part in parts)

    def ratio(self, parts: dict[str, tuple[str, ...]]) -> Ratio:
        """Of these parts of each run."""
        return Ratio.of(*(self.clocks[run].times_ms(*parts[run]) for run in ("stock", "accumfused")))

    def ratio_of_part(self, parts: dict[str, tuple[str, ...]]) -> Ratio | None:
        """As `ratio`; None where the whole updates differ by no more than noise: what a part gains is not seen then."""
        return None if self.ratio(WHOLE).is_noise else self.ratio(parts)

    def equal_losses(self) -> int:
        """In how many updates both losses have the same bits."""
        return sum(a.loss == b.loss for a, b in zip(*self.updates.values(), strict=True))

    def largest_loss_difference(self) -> float:
        """Relative to stock's loss."""
        pairs = zip(self.updates["accumfused"], self.updates["stock"], strict=True)
        return max(abs(a.loss / b.loss - 1) for a, b in pairs)

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
    for name in ("accumfused", "stock", "stock / accumfused"):
        table.add_column(name, justify="right")

    def add(name: str, parts: dict[str, tuple[str, ...]], style: str = "") -> None:
        times = [result.clocks[run].median_ms(*parts[run]) for run in RUNS]
        ratio = (result.ratio if parts is WHOLE else result.ratio_of_part)(parts) if all(times) else None
        cells = (f"{time:.2f}" if time else "-" for time in times)
        table.add_row(name, *cells, "" if ratio is None else ratio.in_short(), style=style)

    last = min(updates, FINAL_UPDATES)
    table.add_row(f"loss, last {last} updates", *(f"{result.final_loss(run):.6f}" for run in RUNS))
    table.add_row("largest weight difference", "", f"{result.parameter_differences[-1]:.1e}", end_section=True)
    for part, label in TAIL.items():
        add(f"{label}, ms", dict.fromkeys(RUNS, (part,)))
    add("gradient tail, ms", ALL_OF_TAIL, style="bold")
    add("  after backward(), ms", AFTER_BACKWARD)
    add("whole update, ms", WHOLE)
    table.add_section()
    megabytes = [result.peak_bytes[run] / 1e6 for run in RUNS]
    ratio = f"{megabytes[1] / megabytes[0]:.2f}x"
    table.add_row("gradient memory, peak MB", *(f"{size:.2f}" for size in megabytes), ratio)
    console.print(table)
    console.print(
        "Times are medians over updates; ratios are taken update by update, with their quartiles, and are noise where "
        "these include 1, or the medians say the opposite. Where that of the whole update is noise, its parts have "
        "none. The gradient tail is what lies between backward() and updated weights. Stock accumulates inside "
        "backward(), where each addition is timed by itself. accumfused takes the norm while it accumulates, clips "
        "while it steps, and has nothing to zero. Its price: a micro-batch's gradients all stand beside the "
        "accumulators until folded.\n",
        style="dim",
    )
    said = [said_of_losses(result), *said_of_times(result), *([result.noise.in_words()] if result.noise else [])]
    console.print("\n".join(said), highlight=False, soft_wrap=True)


def said_of_losses(result: Result) -> str:
    """How many of the losses are equal, and how far apart the others are."""
    equal, updates = result.equal_losses(), len(result.parameter_differences)
    apart = f"; the others differ by {result.largest_loss_difference():.0e} at most" if equal < updates else ""
    return f"losses: {equal} of {updates} are equal to the last bit{apart}, relative to the loss"


def said_of_times(result: Result) -> list[str]:
    """What the tail gains, and what of that is seen in a whole update: medians with quartiles."""
    said = []
    ratios = {"gradient tail": result.ratio_of_part(ALL_OF_TAIL), "whole update": result.ratio(WHOLE)}
    for (name, ratio), parts in zip(ratios.items(), (ALL_OF_TAIL, WHOLE), strict=True):
        stock, ours = (Spread.of(result.clocks[run].times_ms(*parts[run])) for run in ("stock", "accumfused"))
        compared = "" if ratio is None else f"; {ratio.in_words()}"
        said.append(f"{name}: {stock} ms with the stock recipe, {ours} ms with accumfused{compared}")
    return said


def draw(result: Result, output: Path) -> None:
    """Both loss curves, how far apart they are, the tail's time by part, and what a larger window brings."""
    figure = picture(result)
    figure.savefig(output, dpi=150)


def picture(result: Result) -> Figure:
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    grid = figure.add_gridspec(3, 2, height_ratios=(3, 1, 2), width_ratios=(6, 5))
    losses = figure.add_subplot(grid[0, 0])
    difference = figure.add_subplot(grid[1, 0], sharex=losses)
    tail = figure.add_subplot(grid[:2, 1])
    _draw_losses(result, losses, difference)
    _draw_tail(result, tail)
    if result.noise is not None:
        _draw_noise(result.noise, figure.add_subplot(grid[2, :]))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_losses(result: Result, losses: Axes, difference: Axes) -> None:
    ours, stock = ([update.loss for update in result.updates[run]] for run in RUNS)
    numbers = range(1, len(ours) + 1)
    losses.plot(numbers, stock, color="#9a9a9a", linewidth=6, alpha=0.7, label="stock recipe")
    losses.plot(numbers, ours, color="#0072b2", linewidth=1.5, label="accumfused, on top of it")
    losses.set(ylabel="loss, nats per byte")
    equal = f"{result.equal_losses()} of {len(ours)} losses equal to the last bit"
    losses.set_title(f"The same training: {equal}", loc="left", fontsize=10)
    losses.tick_params(labelbottom=False)
    losses.legend(frameon=False)
    apart = [abs(a - b) / b for a, b in zip(ours, stock, strict=True)]
    differ = [(number, value) for number, value in zip(numbers, apart, strict=True) if value]
    same = [number for number, value in zip(numbers, apart, strict=True) if not value]
    difference.set_yscale("log")
    difference.plot([n for n, _ in differ], [value for _, value in differ], ".", color="0.3", markersize=4)
    difference.plot(same, [EQUAL] * len(same), "o", color="#0072b2", markersize=3)
    difference.axhline(FP32_EPSILON, color="0.6", linestyle=":", linewidth=1)
    difference.set(xlabel="update", ylabel="relative\ndifference", ylim=(EQUAL / 5, 1e-2))
    difference.set_yticks((EQUAL, 1e-7, 1e-5, 1e-3), ("equal", "$10^{-7}$", "$10^{-5}$", "$10^{-3}$"))
    difference.minorticks_off()
    difference.annotate(
        "fp32 epsilon", (0, FP32_EPSILON), xycoords=("axes fraction", "data"), xytext=(3, 2),
        textcoords="offset points", fontsize=8, color="0.4",
    )  # fmt: skip


def _draw_tail(result: Result, tail: Axes) -> None:
    """A stack for each run. Labels stand beside it, for a part may be thinner than its label."""
    names = {"accumfused": "accumfused", "stock": "stock recipe"}
    colors = {"accumulate": "#56b4e9", "clip": "#e69f00", "step": "#009e73", "zero_grad": "#999999"}
    top = 1.15 * max(result.tail_ms(run) for run in RUNS)
    for x, run in enumerate(RUNS):
        end, lowest = 0.0, 0.0
        for part, label in TAIL.items():
            time = result.clocks[run].median_ms(part)
            if not time:
                continue
            inside = run == "stock" and part == "accumulate"
            tail.bar(x, time, 0.3, end, color=colors[part], edgecolor="white", hatch="//" if inside else None)
            label += f"\n(inside backward)  {time:.1f}" if inside else f"  {time:.1f}"
            height = (0.09 if inside else 0.05) * top
            lowest = max(end + time / 2, lowest + height / 2)
            tail.text(x + 0.18, lowest, label, ha="left", va="center", fontsize=9)
            lowest += height / 2
            end += time
        tail.annotate(f"{end:.1f} ms", (x, end), xytext=(0, 5), textcoords="offset points", ha="center", weight="bold")
    part = result.ratio_of_part(ALL_OF_TAIL)
    said = "Stock / accumfused" + ("" if part is None else f", tail: {part.in_words()}")
    said += f"\nwhole update: {result.ratio(WHOLE).in_words()}"
    tail.set_title(said, loc="left", fontsize=9)
    tail.set(
        ylabel="ms, each part's median over updates",
        xlim=(-0.3, 1.8),
        xticks=range(len(names)),
        xticklabels=names.values(),
    )
    tail.set_ylim(0, top)


def _draw_noise(noise: Noise, axes: Axes) -> None:
    """Updates and samples that windows of any length need; both are twice the fewest at the noise scale."""
    said = noise.in_words()
    axes.set_title(said[0].upper() + said[1:], loc="left", fontsize=10)
    if not math.isfinite(noise.tokens):
        axes.set_axis_off()
        return
    begin, end = min(1.0, noise.micro_batches / 2), 4 * max(noise.micro_batches, noise.window)
    lengths = [begin * (end / begin) ** (step / 100) for step in range(101)]
    axes.plot(lengths, list(map(noise.updates, lengths)), color="#0072b2", label="updates needed")
    axes.plot(lengths, list(map(noise.samples, lengths)), color="#d55e00", label="samples needed")
    smaller, larger = sorted([(noise.micro_batches, "noise scale"), (noise.window, "this training")])
    for (length, name), side, shift in ((smaller, "right", -3), (larger, "left", 3)):
        axes.axvline(length, color="0.6", linestyle=":", linewidth=1)
        axes.annotate(
            f"{name}\nN = {length:.2g}", (length, 1), xycoords=("data", "axes fraction"), xytext=(shift, -2),
            textcoords="offset points", fontsize=8, color="0.3", ha=side, va="top",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(int(math.log2(end)) + 1)]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set(xlabel="N, micro-batches in a window", ylabel="times the fewest", xlim=(begin, end), ylim=(0, 8))
    axes.legend(frameon=False, loc="upper right")
