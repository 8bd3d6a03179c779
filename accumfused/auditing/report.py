"""The result of an audit: a table for the terminal, plain data for programs, a picture on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from accumfused.auditing.causes import CAUSES
from accumfused.auditing.fit import TensorDifference
from accumfused.drawing import figure

_SHOWN = 8  # steps and tensors in the table


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Args:
        name: one of the names in docs/guide/audit.md.
        detail: where, and how much.
    """

    name: str
    detail: str

    @property
    def text(self) -> str:
        """What happens, in a sentence."""
        return CAUSES[self.name].text

    @property
    def remedy(self) -> str:
        """What to do, in a sentence."""
        return CAUSES[self.name].remedy


@dataclass(frozen=True)
class StepFit:
    """One step beside the large batch of its window.

    Args:
        micro_batches: how many arrived.
        shares: for each the weight of its terms (samples or tokens) beside that in the large batch: 1 is right.
        tensors: the comparison of all tensors together (named ""), then of each.
    """

    micro_batches: int
    shares: list[float]
    tensors: list[TensorDifference]

    @property
    def factor(self) -> float:
        """The number that fits best: the step's gradient is so many times the large batch's."""
        return self.tensors[0].factor

    @property
    def difference(self) -> float:
        """The size of the difference beside the large batch's gradient."""
        return self.tensors[0].difference


@dataclass
class AuditReport:
    """Whether updates are those of the large batch, and why not. `af.audit` makes it; `print` shows it.

    Within a `with af.audit.watch(...)` block it is empty. It is filled when the block ends.

    Attributes:
        causes: what was found; empty if all is well.
        steps: the steps that were seen.
        notes: what could not be judged.
    """

    causes: list[Finding] = field(default_factory=list)
    steps: list[StepFit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def matches(self) -> bool:
        """Whether steps were seen, and each was that of the large batch."""
        return bool(self.steps) and not self.causes

    @property
    def names(self) -> list[str]:
        """The names of the causes."""
        return [finding.name for finding in self.causes]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "matches": self.matches,
            "causes": [
                {"name": each.name, "detail": each.detail, "text": each.text, "remedy": each.remedy}
                for each in self.causes
            ],
            "steps": [
                {
                    "micro_batches": step.micro_batches,
                    "factor": step.factor,
                    "difference": step.difference,
                    "shares": step.shares,
                    "tensors": [tensor.as_dict() for tensor in step.tensors[1:]],
                }
                for step in self.steps
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        if not self.steps:
            return "\n".join(["No step was seen: nothing to judge.", *self.notes])
        verdict = "is" if self.matches else "is NOT"
        lines = [f"The update {verdict} that of the large batch."]
        for finding in self.causes:
            lines += ["", f"{finding.name} ({finding.detail})", f"  {finding.text}", f"  -> {finding.remedy}"]
        lines += ["", *_table("step", [(str(i), s.micro_batches, s) for i, s in enumerate(self.steps, 1)])]
        worst = max(self.steps, key=lambda step: step.difference)
        tensors = sorted(worst.tensors[1:], key=lambda tensor: -tensor.difference)
        lines += ["", *_table("tensor", [(tensor.name, "", tensor) for tensor in tensors])]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    def picture(self, path: str | PathLike[str]) -> None:
        """Draws the weight of each micro-batch's terms in each step; 1 is right.

        Args:
            path: of the picture; its suffix chooses the file type (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib does not load.
        """
        drawing = figure("picture", 8, 3.5)
        axes, start = drawing.subplots(), 0
        for step in self.steps:
            places = range(start, start + len(step.shares))
            axes.bar(places, step.shares, color="#4c72b0")
            start += len(step.shares) + 1
            axes.axvline(start - 1, color="0.8")
        axes.axhline(1.0, color="#c44e52", linestyle="--")
        axes.set_xticks([])
        axes.set_xlabel("micro-batches, by step")
        axes.set_ylabel("weight of a term (1: as in the large batch)")
        axes.set_title(", ".join(self.names) or "the update is that of the large batch")
        drawing.savefig(path, dpi=150)


def _table(title: str, rows: Sequence[tuple[str, Any, Any]]) -> list[str]:
    cells = [[title, "micro-batches" if title == "step" else "", "best factor", "difference"]]
    cells += [[name, str(count), f"{fit.factor:.4g}", f"{fit.difference:.2g}"] for name, count, fit in rows[:_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    return [*lines, f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else lines
