"""The native CPU kernels: csrc/cpu, over the plan's table, with torch's number of threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Number, Outcome, Scaling
from accumfused.core.rows import Grads
from accumfused.rules import compile


class CpuBackend:
    """Runs on `instruction_set`, one of `_C.instruction_sets()`; None chooses the best that this machine runs.

    Attributes:
        threads: how many each verb takes; None: torch's number.
    """

    name = "cpu"
    measures_folds = True
    is_captured = False

    def __init__(self, instruction_set: str | None = None) -> None:
        self.threads: int | None = None
        self._c = compiled.module
        available = self._c.instruction_sets()
        self.instruction_set = instruction_set or available[0]
        if self.instruction_set not in available:
            raise RuntimeError(f"instruction set {instruction_set!r} cannot run here; {', '.join(available)} can")

    def prepare(self, plan: Plan) -> None:
        plan.add_table(self._c.Table)
        plan.functors = [compile.code(rule, self.instruction_set) for rule in plan.rules]

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        table = plan.table_reader.pointed_at(fold.grads, fold.sums, overwrites=fold.overwrites)
        commit.with_launch(partial(
            self._c.accumulate, self.instruction_set, table, self.threads or torch.get_num_threads(),
            *operands(fold, partials),
        ))  # fmt: skip

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = Outcome(torch.empty(3, dtype=torch.float32, device=plan.device), normed=partials is not None)
        if partials is not None and grads is not None:
            table = plan.table_reader.pointed_at(grads)
            self._c.norm(self.instruction_set, table, self.threads or torch.get_num_threads(), partials.data_ptr())
        self._c.finish_norm(
            plan.table_reader.table, address(partials), scaling.normalization, address(scaling.device_normalization),
            address(scaling.found_inf), outcome.normed, scaling.max_grad_norm, scaling.skips_nonfinite,
            outcome.values.data_ptr(), address(scaling.skips),
        )  # fmt: skip
        return outcome

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        squares = torch.empty(len(bounds) - 1, dtype=torch.float64, device=plan.device)
        self._c.segment_norms(partials.data_ptr(), bounds.data_ptr(), len(squares), squares.data_ptr())
        return squares

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        table = plan.table_reader.pointed_at(grads)
        commit.with_launch(partial(
            self._c.step, self.instruction_set, table, self.threads or torch.get_num_threads(),
            hypers, plan.functors, outcome.values.data_ptr(), address(outcome.coefficients),
        ))  # fmt: skip


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def operands(fold: Fold, partials: Tensor) -> tuple[Any, ...]:
    """Returns what native kernels take of a fold, beside its gradients and sums."""
    numbers = number(fold.factor), address(fold.before), fold.overwrites, fold.copies
    return *numbers, partials.data_ptr(), address(fold.words), fold.salt


def number(value: Number) -> tuple[float, int]:
    """Returns a number of the host and 0, or 0 and the address of an fp64 number on the device."""
    return (0.0, value.data_ptr()) if isinstance(value, Tensor) else (value, 0)
