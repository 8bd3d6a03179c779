"""The reference, in pure PyTorch: readable first. Runs on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accumfused.backends.base import OVERWRITE, Fold, Hypers, Outcome, Scaling, new_outcome, numbers
from accumfused.numeric import chunk_count, ieee, memory_order, square_root, sum_partials, sums_of_squares, whole_steps
from accumfused.plan import Grads, Plan


class ReferenceBackend:
    name = "torch"

    def prepare(self, plan: Plan, param_groups: Any, state: Any) -> None:
        """Nothing: it works on tensors, and reads everything at each step."""

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor) -> None:
        with ieee():
            factors = (fold.weights * fold.scale).float()
            add = factors[fold.weight]
            rows = zip(fold.accumulators, fold.grads, fold.held, plan.first_chunk, strict=True)
            for accumulator, grad, held, first_chunk in rows:
                if accumulator is None:
                    continue
                if held == OVERWRITE:
                    accumulator.copy_(grad)  # type: ignore[arg-type]
                    continue
                keep = factors[held]
                kept = torch.where(keep != 0, accumulator * keep, 0.0)
                if grad is None:
                    value = kept
                else:
                    added = grad.float() * add
                    both = torch.where(keep != 0, kept + added, added)
                    value = torch.where(add != 0, both, kept)
                accumulator.copy_(value)
                _write_partials(partials, first_chunk, accumulator)

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        with ieee():
            outcome = new_outcome(plan.device, normed=partials is not None)
            device = outcome.values.device
            divisor = torch.tensor(scaling.normalization, dtype=torch.float64, device=device)
            if scaling.device_normalization is not None:
                divisor = divisor * scaling.device_normalization
            inverse = torch.where((divisor > 0) & divisor.isfinite(), 1.0 / divisor, torch.nan)
            norm = torch.zeros((), dtype=torch.float64, device=device)
            if partials is not None:
                for grad, first_chunk in zip(grads or [], plan.first_chunk, strict=False):
                    if grad is not None:
                        _write_partials(partials, first_chunk, grad)
                norm = square_root(sum_partials(partials).float()).double() * inverse
            clip = torch.ones_like(norm)
            if scaling.max_grad_norm is not None:
                limit = torch.tensor(scaling.max_grad_norm, dtype=torch.float64, device=device)
                clip = (limit / (norm.float().double() + 1e-6)).clamp(max=1.0)
            coefficient = (inverse * clip).float()
            skipped = torch.zeros((), dtype=torch.bool, device=device)
            if scaling.skips_nonfinite:
                skipped = ~(norm.float().isfinite() & coefficient.isfinite())
            if scaling.found_inf is not None:
                skipped = skipped | (scaling.found_inf != 0)
            if scaling.skips is not None:
                scaling.skips.add_(skipped)
            outcome.values.copy_(torch.stack([coefficient, norm.float(), skipped.float()]))
            return outcome

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome) -> None:
        with ieee():
            for group, (rule, values) in enumerate(zip(plan.rules, numbers(hypers), strict=True)):
                rows = [i for i, g in enumerate(plan.groups) if g == group and grads[i] is not None]
                if not rows:
                    continue
                states = [plan.states[i] for i in rows]
                counts = [s[0] if rule.counts_steps else torch.zeros((), device=plan.device) for s in states]  # type: ignore[index]
                steps = whole_steps(torch.stack(counts)) + 1
                scalars = rule.scalars(dict(zip(rule.hypers, values, strict=True)), steps, outcome.coefficient)
                for j, (i, state) in enumerate(zip(rows, states, strict=True)):
                    own = {name: value[j] if value.dim() else value for name, value in scalars.items()}
                    kept = [plan.tensors[i], *state[rule.counts_steps :]]  # type: ignore[index]
                    new = rule.update(own, kept[0], grads[i].float(), *kept[1:])  # type: ignore[union-attr]
                    if rule.counts_steps:
                        kept, new = [*kept, counts[j]], (*new, counts[j] + 1)
                    for old, value in zip(kept, new, strict=True):
                        old.copy_(torch.where(outcome.skipped, old, value))


def _write_partials(partials: Tensor, first_chunk: int, values: Tensor) -> None:
    chunks = chunk_count(values.numel())
    partials[first_chunk : first_chunk + chunks] = sums_of_squares(memory_order(values).float())
