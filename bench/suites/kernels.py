"""Each verb (accumulate, norm, step) alone, called on the backend: the time has no host code of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import accumfused as af
from accumfused.core.protocol import Fold, Outcome, Scaling
from accumfused.core.rows import Grads
from bench.exact import MAX_GRAD_NORM
from bench.measure import Variant
from bench.shapes import Shapes
from bench.suites import Bench
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")


class Kernels:
    """An optimizer's kernels, each called alone."""

    def __init__(self, optimizer: af.FusedOptimizer) -> None:
        self.plan = optimizer._engine.plans.current()
        self.backend = self.plan.backend
        self._partials = torch.zeros(self.plan.chunks, device=self.plan.device)
        self._hypers = self.plan.hypers(optimizer.param_groups)

    @torch.no_grad()
    def norm(self, grads: Sequence[Tensor]) -> Outcome:
        scaling = Scaling(self.plan.device, max_grad_norm=MAX_GRAD_NORM)
        outcome: Outcome = self.backend.norm(self.plan, Grads(grads), self._partials, scaling)
        return outcome

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor], sums: Sequence[Tensor], *, first: bool = False) -> None:
        self.backend.accumulate(self.plan, Fold(Grads(grads), Grads(sums), 1.0, overwrites=first), self._partials)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], outcome: Outcome) -> None:
        self.backend.step(self.plan, Grads(grads), self._hypers, outcome)


def run(bench: Bench) -> list[Table]:
    return [_model(bench, name, of) for name, of in bench.models().items()]


def _model(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    grads_bf16, sums = work.random(dtype=torch.bfloat16), work.random()
    variants, notes, names = [], [], []
    for name in bench.backends:
        kernels = Kernels(work.ours(name))
        names.append(kernels.backend.name)
        end = f", {names[-1]}" if len(bench.backends) > 1 else ""
        notes.append(_checked(kernels, work, grads_bf16, sums) + end)
        outcome = kernels.norm(work.grads)
        runs: dict[str, tuple[Callable[[], object], str]] = {
            "norm": (partial(kernels.norm, work.grads), "read"),
            "accumulate, fp32": (partial(kernels.accumulate, work.grads, sums), "accumulate"),
            "first accumulate, bf16": (partial(kernels.accumulate, grads_bf16, sums, first=True), "overwrite_bf16"),
            "accumulate, bf16": (partial(kernels.accumulate, grads_bf16, sums), "accumulate_bf16"),
            "step, AdamW": (partial(kernels.step, work.grads, outcome), "step"),
        }
        variants += [Variant(verb + end, run, passes=(mix,)) for verb, (run, mix) in runs.items()]
    timings = bench.interleave(variants, 2 * bench.rounds)
    table = timed(f"kernels, {model}, backend{'s' * (len(names) > 1)} {' and '.join(names)}", timings, work.count)
    table.notes += notes
    return table


def _checked(kernels: Kernels, work: Workload, grads_bf16: list[Tensor], sums: list[Tensor]) -> str:
    """Compares every verb with fp64, and says how far norms are off."""
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in work.grads))
    outcome = kernels.norm(work.grads)
    difference = abs(float(outcome.norm) / exact - 1.0)
    of_torch = abs(float(torch.nn.utils.get_total_norm(work.grads)) / exact - 1.0)
    assert difference < 1e-6, f"the norm is {difference:.1e} off"
    # Overwriting goes last: what the sums hold before does not matter to it.
    for grads, first in ((work.grads, False), (grads_bf16, False), (grads_bf16, True)):
        expected = [grad.double() + (0.0 if first else total.double()) for grad, total in zip(grads, sums, strict=True)]
        kernels.accumulate(grads, sums, first=first)
        errors = [(found - right).abs().max() for found, right in zip(sums, expected, strict=True)]
        error = float(torch.stack(errors).max())
        assert error < 1e-8, f"accumulate is {error:.1e} off"
        del expected
    work.error(partial(kernels.step, work.grads, outcome))
    return f"relative error of the norm against fp64: {difference:.1e}; of torch's get_total_norm: {of_torch:.1e}"
