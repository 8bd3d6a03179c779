"""The reference backend, in PyTorch alone: what all others are compared with. It runs on any device.

Tests ask for it by name, too: this module makes "reference" one of the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from accumfused import backends
from accumfused import settings as all_settings
from accumfused.core.norm import finish_norm
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling
from accumfused.core.rows import Grads, Row
from accumfused.formats import codecs
from accumfused.formats.convert import load_state, load_weights, store_state, store_weights
from accumfused.formats.numeric import (
    CHUNK,
    chunk_count,
    ieee,
    memory_order,
    sum_partials,
    sum_segments,
    sums_of_squares,
    whole_steps,
)
from accumfused.rules import on_tensors


class ReferenceBackend:
    name = "reference"
    measures_folds = True
    is_captured = False

    def prepare(self, plan: Plan) -> None:
        """Prepares nothing: the reference reads all tensors at each step."""

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        fold.refuse_overwritten()
        commit.begin()
        with ieee():
            factor = torch.zeros((), dtype=torch.float64, device=plan.device).add_(fold.factor).float()
            holds = torch.ones_like(factor, dtype=torch.bool) if fold.before is None else fold.before != 0
            for row, own, grad in zip(plan.rows, fold.sums, fold.grads, strict=True):
                if own is None:
                    continue
                if grad is None:
                    own.copy_(torch.where(holds, own, 0.0))
                    _scale_partials(partials, row.first_chunk, own, holds)
                    continue
                added = torch.where(factor != 0, grad.float() * factor, 0.0)
                if not fold.overwrites:
                    both = torch.where(factor != 0, own.float() + added, own.float())
                    added = torch.where(holds, both, grad.float())
                own.copy_(added if own.dtype != torch.bfloat16 else _rounded(row, fold, grad, added))
                if not fold.copies:
                    _write_partials(partials, row.first_chunk, own)
        commit.end()

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        with ieee():
            if partials is None:
                return finish_norm(None, scaling)
            for row, grad in zip(plan.rows, grads or [], strict=False):
                if grad is not None:
                    _write_partials(partials, row.first_chunk, grad)
            return finish_norm(sum_partials(partials), scaling)

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        with ieee():
            return sum_segments(partials, bounds)

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        commit.begin()
        with ieee():
            for group, (rule, values) in enumerate(zip(plan.rules, hypers, strict=True)):
                rows = [i for i, row in enumerate(plan.rows) if row.group == group and grads[i] is not None]
                if not rows:
                    continue
                counts = [_steps_made(plan, row) for row in rows]
                steps = whole_steps(torch.stack(counts)) + 1
                named = dict(zip(rule.hyper_names, map(float, values), strict=True))  # waits for a GPU that has some
                scalars = on_tensors.scalars(rule, named, steps)
                for j, row in enumerate(rows):
                    own = {name: value[j] if value.dim() else value for name, value in scalars.items()}
                    factor = on_tensors.signed(named, outcome.coefficient_of(row))
                    grad = memory_order(grads[row]).float() * factor  # type: ignore[arg-type]
                    _update(plan, row, own, grad, steps[j], outcome.skipped)
        commit.end()


def _steps_made(plan: Plan, row: int) -> Tensor:
    storage = plan.rows[row].storage
    if storage is None or storage.step is None:
        return torch.zeros((), dtype=torch.float32, device=plan.device)
    return storage.step


def _update(plan: Plan, index: int, scalars: Mapping[str, Tensor], grad: Tensor, step: Tensor, skipped: Tensor) -> None:
    """Updates one parameter in memory order: decodes it and its states to fp32, updates, and encodes again.

    `grad`: fp32, times its coefficient.
    """
    row = plan.rows[index]
    rule, form, storage, param = row.rule, row.form, row.storage, memory_order(row.tensor)
    assert storage is not None
    master = None if storage.master is None else memory_order(storage.master)
    values = [memory_order(value) for value in storage.values]
    scales: list[Tensor | None] = [*storage.scales] or [None] * len(values)
    kinds = [name in rule.second_moments for name in rule.states]
    states = [load_state(*part) for part in zip(values, scales, kinds, strict=True)]
    new_param, *new_states = on_tensors.update(rule, scalars, load_weights(form, param, master), grad, states)
    bits = torch.zeros_like(param, dtype=torch.int32)
    if storage.seed is not None:
        bits = codecs.noise(codecs.key(storage.seed, step, index), param.numel(), row.origin)
    stored: list[tuple[Tensor | None, Tensor | None]] = []
    stored += zip([param, master], store_weights(form, new_param, codecs.stream(bits, 2)), strict=True)
    for number, (state, value, scale, is_second) in enumerate(zip(new_states, values, scales, kinds, strict=True)):
        new = store_state(form, state, codecs.stream(bits, min(number, 1)), is_second)
        stored += zip([value, scale], new, strict=True)
    if storage.step is not None:
        stored.append((storage.step, storage.step + 1))
    for old, new_value in stored:
        if old is not None and new_value is not None:
            old.copy_(torch.where(skipped, old, new_value))


def _rounded(row: Row, fold: Fold, grad: Tensor, result: Tensor) -> Tensor:
    """Rounds the result of a fold to bf16: with noise if the fold has some and the result may be no number of bf16."""
    is_fresh = fold.before is not None and float(fold.before) == 0 and not fold.overwrites
    factor = 1.0 if is_fresh else float(torch.tensor(float(fold.factor)))
    is_copy = grad.dtype == torch.bfloat16 and factor == 1 and (fold.overwrites or is_fresh)
    if fold.words is None or factor == 0 or is_copy or not result.numel():
        return result.bfloat16()
    words = fold.words[row.first_chunk : row.first_chunk + chunk_count(result.numel())]
    parts = []
    for number, part in enumerate(memory_order(result).split(CHUNK)):  # each chunk by its own word
        noise = codecs.noise(codecs.mix(words[number] ^ fold.salt), len(part), row.origin + number * CHUNK)
        parts.append(codecs.to_bfloat16_stochastic(part, noise))
    words += 1
    rounded = torch.empty_like(result, dtype=torch.bfloat16)
    memory_order(rounded).copy_(torch.cat(parts))
    return rounded


def _write_partials(partials: Tensor, first_chunk: int, values: Tensor) -> None:
    chunks = chunk_count(values.numel())
    partials[first_chunk : first_chunk + chunks] = sums_of_squares(memory_order(values).float())


def _scale_partials(partials: Tensor, first_chunk: int, values: Tensor, holds: Tensor) -> None:
    own = partials[first_chunk : first_chunk + chunk_count(values.numel())]
    own.copy_(torch.where(holds, own, 0.0))


all_settings.BackendName = Literal[(*get_args(all_settings.BackendName), ReferenceBackend.name)]  # type: ignore[misc]
backends.MAKERS[ReferenceBackend.name] = ReferenceBackend
