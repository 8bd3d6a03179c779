"""Draws the pictures of README.md and docs/: python tools/pictures.py bench/results/FILE.json

docs/weights.svg: how much a sample counts in the usual loop and here, as `af.audit.watch` measures it.
docs/lean.svg: bytes of weights and states in each format, with the step's time, from the suite `lean` of the file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.tables import compared, load, median  # noqa: E402

OURS, TORCH, WRONG = "#0072b2", "#9a9a9a", "#d55e00"
SIZES = (8, 8, 8, 5)  # the last window of an epoch of 29 samples
SETTINGS: Any = {"font.size": 10, "svg.hashsalt": "accumfused", "svg.fonttype": "path"}
FORMATS = {  # names of the suite's rows: what the picture calls them
    "clip + AdamW(fused), fp32": "torch, fp32",
    "clip + AdamW(fused), bf16 throughout": "torch, bf16 (drops small updates)",
    "accumfused, fp32": "accumfused, fp32",
    "accumfused, bf16 + split16, fp32 states": "accumfused, bf16, fp32 masters and states",
    "accumfused, bf16 + split16, 8-bit states": "accumfused, bf16, fp32 masters, 8-bit states",
    "accumfused, bf16 + split8, 8-bit states": "accumfused, bf16, 24-bit masters, 8-bit states",
    "accumfused, bf16 stochastic, 8-bit states": "accumfused, bf16, no masters, 8-bit states",
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with mpl.rc_context(SETTINGS):
        for name, figure in (("weights", weights()), ("lean", lean(Path(sys.argv[1])))):
            figure.savefig(ROOT / "docs" / f"{name}.svg", facecolor="white", metadata={"Date": None})


def shares(fused: bool) -> list[float]:
    """How often a sample of each micro-batch counts in one window, beside the large batch's: 1 is right."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    batches: list[tuple[Tensor, Tensor]] = [(torch.randn(n, 8), torch.randint(3, (n,))) for n in SIZES]
    kind = af.AdamW if fused else torch.optim.AdamW
    optimizer: Any = kind(model.parameters())
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=len(SIZES)) as report:
        for x, y in batches:
            loss: Any = F.cross_entropy(model(x), y)
            if fused:
                loss.backward()
                optimizer.accumulate(weight=len(y))
            else:
                (loss / len(SIZES)).backward()
        optimizer.step()
    return report.steps[0].shares


def weights() -> Figure:
    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    usual, ours = figure.subplots(1, 2, sharey=True)
    for axes, fused, title in ((usual, False, "(loss / 4).backward()"), (ours, True, "accumulate(weight=len(y))")):
        values = shares(fused)
        colors = [WRONG if value > 1.01 else OURS if fused else TORCH for value in values]
        axes.bar(range(len(values)), values, 0.72, color=colors)
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:.2f}", (place, value), (0, -5), textcoords="offset points", ha="center", va="top",
                weight="bold", color="white",
            )  # fmt: skip
        axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1)
        axes.set_title(title, loc="left", family="monospace", fontsize=10)
        axes.set_xticks(range(len(SIZES)), [f"{size} samples" for size in SIZES], fontsize=9)
        axes.set(ylim=(0, 1.7), yticks=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", length=0)
    usual.set_ylabel("weight of a sample\nin the update")
    ours.annotate(
        "as in the large batch", (1, 1), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", fontsize=9, color="0.2",
    )  # fmt: skip
    last = f"{shares(False)[-1]:.2f}"
    figure.suptitle(
        f"The usual loop counts samples of a short micro-batch {last} times", weight="bold", x=0.01, ha="left"
    )
    return figure


def lean(path: Path) -> Figure:
    (table,) = load(path).suites["lean"]
    rows = {row["name"]: row for row in table.rows}
    found = [(name, rows[known]) for known, name in FORMATS.items()]
    found.sort(key=lambda each: (-compared(each[1])["kept B/param"], -median(each[1]["ms"])))
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    axes = figure.subplots()
    for place, (name, row) in enumerate(found):
        kept = compared(row)["kept B/param"]
        axes.barh(place, kept, 0.68, color=TORCH if name.startswith("torch") else OURS)
        text = f"{kept:.3g} bytes, {median(row['ms']):.0f} ms"
        axes.annotate(text, (kept, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.invert_yaxis()
    axes.set(xticks=[], xlim=(0, 16.5))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("8-bit states halve what AdamW keeps", weight="bold", x=0.01, ha="left")
    figure.supxlabel("bytes per parameter, weights and states; time of a clipped step", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
