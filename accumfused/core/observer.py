"""What measures an optimizer's steps, and changes none of their bits: metrics.py, noise.py. The engine has a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from accumfused.core.norm import Measured
from accumfused.core.plan import Plan
from accumfused.core.protocol import Call, Exchange, Number, Outcome, Step
from accumfused.core.rows import Grads
from accumfused.core.window import Window


class Observer:
    """Measures the steps of an optimizer. In this base each method does nothing."""

    def check(self, exchange: Exchange, weight: Number | None) -> None:
        """Refuses, before a micro-batch, gradients that it could not measure."""

    def before_fold(self, plan: Plan, grads: Grads, window: Window, weight: Number | None, in_loss: bool) -> None:
        """Measures gradients before their fold, which may keep them as its sums.

        Args:
            grads: as kernels read them.
            window: the draft, which has counted this micro-batch, and keeps what is measured.
        """

    def numbers(self, plan: Plan, window: Window) -> Sequence[Tensor]:
        """Returns numbers that processes add up together with their sums: flat fp64 tensors."""
        return ()

    def closed(self, plan: Plan, window: Window) -> None:
        """Measures a closed window, after `p.grad` has become its sum, and before the user's code can change that."""

    def takes_norm(self, plan: Plan) -> bool:
        """Tells whether the step to come has to take a norm."""
        return False

    def before_step(self, measured: Measured, window: Window, groups: Sequence[Mapping[str, Any]]) -> None:
        """Measures the gradients of a step that has its coefficient, before the step."""

    def around(self, step: Step) -> Step:
        """Returns the step itself, or one that makes it and measures."""
        return step

    def with_step(self, outcome: Outcome) -> Sequence[Call[Any]]:
        """Returns calls for the step's commit, made or skipped."""
        return ()

    def after_step(self, measured: Measured) -> None:
        """Counts or measures a step, made or skipped, after it. An error causes a warning."""
