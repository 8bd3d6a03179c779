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
    """Each method may do nothing, as here."""

    def check(self, exchange: Exchange, weight: Number | None) -> None:
        """Before a micro-batch: refuses what it could not measure."""

    def before_fold(self, plan: Plan, grads: Grads, window: Window, weight: Number | None, in_loss: bool) -> None:
        """Measures gradients before their fold, which may keep them as its sums.

        Args:
            grads: as kernels read them.
            window: the draft, which has counted this micro-batch, and keeps what is measured.
        """

    def numbers(self, plan: Plan, window: Window) -> Sequence[Tensor]:
        """What processes add up beside their sums: flat fp64 tensors."""
        return ()

    def closed(self, plan: Plan, window: Window) -> None:
        """After `p.grad` has become a window's sum, and before the user's code can change it."""

    def takes_norm(self, plan: Plan) -> bool:
        """Whether the step to come has to take a norm."""
        return False

    def before_step(self, measured: Measured, window: Window, groups: Sequence[Mapping[str, Any]]) -> None:
        """Before a step that has its coefficient."""

    def around(self, step: Step) -> Step:
        """The step itself, or one that makes it and measures."""
        return step

    def with_step(self, outcome: Outcome) -> Sequence[Call[Any]]:
        """What is to be true once the step is made, or skipped."""
        return ()

    def after_step(self, measured: Measured) -> None:
        """After a step, made or skipped."""
