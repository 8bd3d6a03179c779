"""The result of an audit: a verdict and a table for the terminal, plain data for programs, a picture on request."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any

from accumfused.auditing.fit import TensorDifference
from accumfused.auditing.hints import CAUSES, final, hints
from accumfused.auditing.step import DIFFERENT, EQUAL, SCALED, UNKNOWN, WORST, Step

_SHOWN = 8  # steps and tensors in the table
_LABELS = 16  # of bars in a picture
_COLORS = {EQUAL: "#2f7f6f", SCALED: "#d08a1f", UNKNOWN: "#7a7a7a", DIFFERENT: "#c0392f"}


@dataclass(frozen=True)
class Finding:
    """A hint at a cause.

    Args:
        name: one of the names in docs/guide/audit.md.
        detail: the evidence: where, and how much.
        setting: the kind of loop, for the remedy.
    """

    name: str
    detail: str
    setting: str = "loop"

    @property
    def text(self) -> str:
        """What happens, in a sentence."""
        return CAUSES[self.name].text

    @property
    def remedy(self) -> str:
        """What to do, in a sentence."""
        return CAUSES[self.name].others.get(self.setting, CAUSES[self.name].remedy)


@dataclass(frozen=True)
class StepFit:
    """One step, compared with the large batch of its window.

    Args:
        micro_batches: how many arrived.
        shares: for each the weight of its terms (samples or tokens) over that in the large batch: 1 is right.
        tensors: the comparison of all tensors together (named ""), then of each.
        verdict: "equal", "scaled", "different" or "unknown".
        factor: the step's gradient is so many times the large batch's.
    """

    micro_batches: int
    shares: list[float]
    tensors: list[TensorDifference]
    verdict: str
    factor: float

    @property
    def is_judged(self) -> bool:
        """Whether the verdict is not "unknown"."""
        return self.verdict != UNKNOWN

    @property
    def difference(self) -> float:
        """The size of the difference, as a share of the large batch's gradient."""
        return self.tensors[0].difference


@dataclass
class AuditReport:
    """Whether updates are those of the large batch, and why not. `af.audit` makes it; `print` shows it.

    Within a `with af.audit.watch(...)` block it is empty. It is filled when the block ends.

    Attributes:
        causes: hints at what makes the difference. They change no verdict.
        steps: the steps that were seen.
        reasons: why there is no verdict.
        notes: what is worth knowing, and is no fault.
        advice: the call that can tell where the graph cannot.
    """

    causes: list[Finding] = field(default_factory=list)
    steps: list[StepFit] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: str = ""

    @property
    def verdict(self) -> str:
        """The worst of the steps' verdicts.

        "equal": the update is that of the large batch. "scaled": it has its direction, and another length.
        "different": it is not the large batch's. "unknown": the graph cannot tell, or no step was seen.
        """
        return max((step.verdict for step in self.steps), key=WORST.index, default=UNKNOWN)

    @property
    def matches(self) -> bool | None:
        """Whether each step was that of the large batch; None if the verdict is "unknown"."""
        return None if self.verdict == UNKNOWN else self.verdict == EQUAL

    @property
    def names(self) -> list[str]:
        """The names of the causes."""
        return [finding.name for finding in self.causes]

    def take(self, windows: Sequence[Step], steps: int | None, ignore: set[str], setting: str) -> None:
        """Adds windows with their verdicts and hints. Args: steps: gradient_accumulation_steps, if known."""
        for step in windows:
            verdict = final(step, ignore)
            count = step.arrived * step.world
            self.steps.append(StepFit(count, step.shares, step.fits, verdict, step.ratio))
            reasons = [step.reasons[name] for name in step.reasons if verdict == UNKNOWN and name not in ignore]
            self.reasons += [reason for reason in reasons if reason not in self.reasons]
        found = {name: detail for name, detail in hints(windows, steps).items() if name not in self.names}
        self.causes += [Finding(name, detail, setting) for name, detail in found.items()]

    def overlook(self, names: set[str]) -> None:
        """Lets causes not count: steps that these alone explain are taken for the large batch's."""
        if self.causes and names.issuperset(self.names):
            self.notes.append(f"overlooked: {', '.join(self.names)}")
            self.steps = [step if step.verdict == UNKNOWN else replace(step, verdict=EQUAL) for step in self.steps]
        self.causes = [finding for finding in self.causes if finding.name not in names]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        causes = [{name: getattr(each, name) for name in ("name", "detail", "text", "remedy")} for each in self.causes]
        steps = [
            {**asdict(each), "difference": each.difference, "tensors": [asdict(tensor) for tensor in each.tensors[1:]]}
            for each in self.steps
        ]
        own = {"verdict": self.verdict, "matches": self.matches, "causes": causes, "steps": steps}
        return own | {"reasons": [*self.reasons], "notes": [*self.notes]}

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        if not self.steps:
            return "No step was seen: nothing to judge."
        worst = self._worst
        if worst.verdict == EQUAL:
            return "The update is that of the large batch."
        if worst.verdict == SCALED:
            factors = sorted({float(f"{step.factor:.4g}") for step in self.steps})
            times = " to ".join(f"{factor:.4g}" for factor in dict.fromkeys([factors[0], factors[-1]]))
            return f"The update has the direction of the large batch, its length times {times}."
        if worst.verdict == UNKNOWN:
            return f"Cannot tell: {'; '.join(self.reasons)}."
        tensor = max(worst.tensors[1:], key=lambda each: each.difference, default=worst.tensors[0])
        most = f", most in {tensor.name} ({_percent(tensor.difference)})" if tensor.name else ""
        return f"The update is NOT that of the large batch: the gradient is off by {_percent(worst.difference)}{most}."

    @property
    def _worst(self) -> StepFit:
        return max(self.steps, key=_severity)

    def __str__(self) -> str:
        lines = [self.headline]
        if not self.steps:
            return "\n".join([*lines, *self.notes])
        lines += [self.advice] if self.verdict == UNKNOWN and self.advice else []
        for finding in self.causes:
            lines += ["", f"{finding.name} ({finding.detail})", f"  {finding.text}", f"  -> {finding.remedy}"]
        if self.verdict != UNKNOWN:
            rows = [(str(i), s.micro_batches, s) for i, s in _shown(enumerate(self.steps, 1))]
            lines += ["", *_table("step", rows, len(self.steps))]
        if self.verdict in (SCALED, DIFFERENT):
            tensors = sorted(self._worst.tensors[1:], key=lambda tensor: -tensor.difference)
            lines += ["", *_table("tensor", [(each.name, "", each) for each in tensors[:_SHOWN]], len(tensors))]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    def picture(self, path: str | PathLike[str]) -> None:
        """Draws the weight of each micro-batch's terms in each step; 1 is right.

        Args:
            path: of the picture; its suffix chooses the file type (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib does not load.
        """
        try:
            module: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError(
                f"picture() draws with matplotlib, which does not load: {error}; pip install matplotlib"
            ) from error
        drawing = module.Figure(figsize=(7, 3.9), layout="constrained")
        axes, start = drawing.subplots(), 0
        shown = _shown((i, each) for i, each in enumerate(self.steps, 1) if each.is_judged)
        bars = sum(len(step.shares) for _, step in shown)
        digits = 2 if 2 * bars <= _LABELS else 1
        highest = max([1.0, *(abs(share) for _, step in shown for share in step.shares)])
        for index, step in shown:
            shares, color = [abs(share) for share in step.shares], _COLORS[step.verdict]
            axes.bar(range(start, start + len(shares)), shares, width=0.86, color=color)
            axes.text(
                start + (len(shares) - 1) / 2, -0.04 * highest, f"step {index}", ha="center", va="top", fontsize=12
            )
            for place, share in enumerate(shares if bars <= _LABELS else [], start):
                is_low = share < 0.1 * highest  # no room for its label
                height = share if is_low or highest > 6 else 0.09 * highest  # away from the line
                look = {"va": "bottom", "color": color} if is_low else {"va": "top", "color": "white"}
                axes.text(place, height, f"{round(share, digits):g}", ha="center", fontsize=12, **look)
            start += len(shares) + 1
        if shown:
            axes.plot([-0.43, start - 1.4], [1.0, 1.0], color="0.2", linestyle=(0, (4, 3)), linewidth=1.3)
            axes.text(start - 1.2, 1.0, "large batch", va="center", fontsize=12, color="0.2")
            axes.set(xlim=(-0.43, start - 1.2), ylim=(-0.1 * highest, 1.02 * highest))
            caption = "Each bar is a micro-batch: how much one of its samples or tokens counts"
            drawing.supxlabel(caption, fontsize=11, color="0.4", x=0.006, ha="left")
        axes.axis("off")
        title, _, rest = self.headline.removesuffix(".").partition(": ")
        left: dict[str, Any] = {"x": 0.006, "ha": "left"}
        drawing.suptitle(textwrap.fill(title, 50), fontsize=16, fontweight="bold", color=_COLORS[self.verdict], **left)
        text = textwrap.fill(self.causes[0].text if self.causes and self.verdict != UNKNOWN else rest, 82)
        axes.set_title(text, loc="left", fontsize=11, color="0.3")
        drawing.savefig(path, dpi=200)


def _severity(step: StepFit) -> tuple[int, float]:
    return WORST.index(step.verdict), step.difference


def _shown(numbered: Iterable[tuple[int, StepFit]]) -> list[tuple[int, StepFit]]:
    """The first of these steps; the last place is the worst one's, if that comes later and differs."""
    steps = list(numbered)
    first, later = steps[:_SHOWN], steps[_SHOWN:]
    worst = max(steps, key=lambda pair: _severity(pair[1]), default=None)
    return [*first[:-1], worst] if worst in later and worst[1].verdict != EQUAL else first


def _percent(size: float) -> str:
    if 0 < size < 1e-4:
        return "< 0.01%"
    if size < 10:
        return f"{size:.0%}" if size > 0.1 else f"{100 * size:.2g}%"
    return f"{size:.2g} times"


def _table(title: str, rows: Sequence[tuple[str, Any, Any]], count: int) -> list[str]:
    cells = [[title, "micro-batches" if title == "step" else "", "times", "off by"]]
    for name, micro_batches, fit in rows:
        is_judged = getattr(fit, "verdict", "") != UNKNOWN
        numbers = [f"{fit.factor:.4g}", _percent(fit.difference)] if is_judged else ["?", "?"]
        cells.append([name, str(micro_batches), *numbers])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    return [*lines, f"... and {count - len(rows)} more"] if count > len(rows) else lines
