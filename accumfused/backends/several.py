"""Several devices in one optimizer: each has a backend, and all share one norm.

The plan's first device leads. It collects the sums of squares of all chunks and adds them in a single device's order,
so the numbers are the same. The coefficient goes back to the other devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Backend, Commit, Fold, Hypers, Outcome, Scaling, moved
from accumfused.core.rows import Grads


class SeveralDevices:
    """Runs each verb on the backend of every device."""

    def __init__(self, backends: dict[torch.device, Backend]) -> None:
        self.backends = backends
        self.measures_folds = all(backend.measures_folds for backend in backends.values())
        self.name = " + ".join(f"{backend.name} ({device})" for device, backend in backends.items())

    @property
    def is_captured(self) -> bool:
        return any(backend.is_captured for backend in self.backends.values())

    def prepare(self, plan: Plan) -> None:
        """Makes one plan per device, with the same rows; the leading device's comes first."""
        for device, backend in sorted(self.backends.items(), key=lambda item: item[0] != plan.device):
            part = replace(plan, device=device, parts=[])
            backend.prepare(part)
            plan.parts.append(part)

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        commit.begin()
        for part in plan.parts:
            rows = _rows(part)
            if not any(here and s is not None for here, s in zip(rows, fold.sums, strict=True)):
                continue
            fold_here = fold.part(
                _only(rows, fold.grads), _only(rows, fold.sums), factor=_number_at(fold.factor, part.device),
                before=_number_at(fold.before, part.device), words=_number_at(fold.words, part.device),
            )  # fmt: skip
            sums = moved(partials, part.device)
            self.backends[part.device].accumulate(part, fold_here, sums)
            _bring(sums, partials)
            if fold.words is not None and fold_here.words is not None:
                _bring(fold_here.words, fold.words)
        commit.end()

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        for part in plan.parts:
            here = _only(_rows(part), grads or Grads([None] * len(plan.rows)))
            if partials is not None and any(grad is not None for grad in here):
                sums = moved(partials, part.device)
                self.backends[part.device].norm(part, here, sums, Scaling(part.device))
                _bring(sums, partials)
        leading = plan.parts[0]
        return self.backends[leading.device].norm(leading, None, partials, scaling)

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        leading = plan.parts[0]
        return self.backends[leading.device].segment_norms(leading, partials, bounds)

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        commit.begin()
        for part in plan.parts:
            here = _only(_rows(part), grads)
            if any(grad is not None for grad in here):
                coefficients = None if outcome.coefficients is None else moved(outcome.coefficients, part.device)
                of_part = Outcome(moved(outcome.values, part.device), coefficients=coefficients)
                self.backends[part.device].step(part, here, hypers, of_part)
        commit.end()


def _number_at(value: Any, device: torch.device) -> Any:
    return moved(value, device) if isinstance(value, Tensor) else value


def _rows(part: Plan) -> list[bool]:
    return [row.tensor.device == part.device for row in part.rows]


def _only(rows: list[bool], values: Grads) -> Grads:
    return Grads([value if here else None for here, value in zip(rows, values, strict=True)])


def _bring(here: Tensor, everywhere: Tensor) -> None:
    """Copies the chunks' numbers of a device back, those of the others' with them: a backend leaves these alone."""
    if here is not everywhere:
        everywhere.copy_(moved(here, everywhere.device))
