"""The native CPU kernels: csrc/cpu, over the plan's table, with torch's number of threads."""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused import _native
from accumfused.backends.base import Fold, Outcome, Scaling, new_outcome
from accumfused.plan import Grads, Plan


class CpuBackend:
    """Args: instruction_set: one of `_C.instruction_sets()`; None: the best that this machine runs."""

    name = "cpu"
    native = True

    def __init__(self, instruction_set: str | None = None) -> None:
        self._c = _native._C
        available = self._c.instruction_sets()
        self.instruction_set = instruction_set or available[0]
        if self.instruction_set not in available:
            raise RuntimeError(f"instruction set {instruction_set!r} cannot run here; {', '.join(available)} can")
        self._rule_index = {name: index for index, (name, *_) in enumerate(self._c.rules())}

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor) -> None:
        plan.point_at(fold.grads)
        refused = plan.table.set_accumulators(fold.accumulators, fold.held)
        if refused >= 0:
            raise RuntimeError(f"the accumulator of parameter {refused} no longer fits it; call zero_grad()")
        number, tensor = (1.0, fold.scale) if isinstance(fold.scale, Tensor) else (fold.scale, None)
        self._c.accumulate(
            self.instruction_set, plan.table, torch.get_num_threads(),
            fold.weights.data_ptr(), fold.weight, number, _address(tensor), partials.data_ptr(),
        )  # fmt: skip

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = new_outcome(torch.device("cpu"), normed=partials is not None)
        if partials is not None and grads is not None:
            plan.point_at(grads)
            self._c.norm(self.instruction_set, plan.table, torch.get_num_threads(), partials.data_ptr())
        self._c.finish_norm(
            plan.table, _address(partials), scaling.normalization, _address(scaling.device_normalization),
            _address(scaling.found_inf), outcome.normed, scaling.max_grad_norm, scaling.skips_nonfinite,
            outcome.values.data_ptr(), _address(scaling.skips),
        )  # fmt: skip
        return outcome

    def step(self, plan: Plan, grads: Grads, hypers: list[tuple[float, ...]], outcome: Outcome) -> None:
        plan.point_at(grads)
        rules = [self._rule_index[rule.name] for rule in plan.rules]
        stride = max((len(values) for values in hypers), default=0)
        padded = [number for values in hypers for number in (*values, *[0.0] * (stride - len(values)))]
        self._c.step(
            self.instruction_set, plan.table, torch.get_num_threads(), padded, rules, outcome.values.data_ptr()
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
