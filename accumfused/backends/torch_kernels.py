"""torch's own kernels, where none of ours run: fused ones on CPUs and "cuda" devices, other operations elsewhere.

It runs on every device, and has every rule: one that torch has no kernel for runs by its own arithmetic.

Formats and noise are the reference's; the bits of the arithmetic are torch's, but for sums in bf16, whose bits are the
reference's. The host never waits for a GPU, and reads a CPU's values at no cost. The step cuts tensors into pieces that
stay in a core's caches while torch scales, decodes, updates and encodes them. So `p.grad` stays as it is: torch's fused
kernels write the scaled gradient back, which they may do to a window's accumulators only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused.backends import torch_step
from accumfused.backends.batches import WHOLE, Batch, Tensors, cut
from accumfused.core.graphs import is_capturing
from accumfused.core.norm import finish_norm
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling
from accumfused.core.rows import Grads
from accumfused.formats import codecs
from accumfused.formats.kinds import Format
from accumfused.formats.numeric import CHUNK, chunk_count, ieee, memory_order, sum_partials, sum_segments

_CACHED = 32 * CHUNK  # elements of a piece: 4 MiB of fp32, so that its call costs little
_LARGE = 512 * CHUNK  # where caches do not matter; it bounds the memory of intermediate tensors


class TorchBackend:
    name = "torch"
    measures_folds = False  # measuring is a pass of its own, and only a window's last fold needs it

    def __init__(self) -> None:
        self.is_captured = False
        self._batches_of: WeakKeyDictionary[Plan, dict[int, list[Batch]]] = WeakKeyDictionary()  # by their size

    def prepare(self, plan: Plan) -> None:
        plan.reader.remember()
        self._batches_of[plan] = {}

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        fold.refuse_overwritten()
        factor, before, add = fold.factor, fold.before, _add_on_device
        if _can_read(plan) or not (isinstance(factor, Tensor) or before is not None):  # else they are not read
            factor, add = float(factor), _add_numbers
            before = None if before is None else float(before)  # type: ignore[assignment]
        exact, rounded = list[Any](), list[Any]()
        for grad, accumulator in zip(fold.grads, fold.sums, strict=True):
            rounds = accumulator is not None and accumulator.dtype is torch.bfloat16 and not fold.copies
            kind = accumulator is not None and (grad is not None,)
            exact.append(not rounds and kind)
            rounded.append(rounds and kind)
        commit.begin()
        for batch in self._batches(plan, WHOLE, exact):
            add(batch.of(fold.sums), batch.of(fold.grads), factor, before, fold.overwrites)
        if any(rounded):
            size = _cached(plan) // 4  # noise takes more memory
            _add_and_round(plan, fold, self._batches(plan, size, rounded))
        commit.end()

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        if partials is not None and grads is not None:
            for batch in self._measured(plan, grads):
                batch.measure(plan, batch.of(grads), partials)
        with ieee():
            return finish_norm(None if partials is None else sum_partials(partials), scaling)

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        with ieee():
            return sum_segments(partials, bounds)

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        skipped = None if _can_read(plan) else outcome.skipped
        if skipped is None and bool(outcome.skipped):
            commit.end()
            return
        coefficient = float(outcome.coefficient) if skipped is None else outcome.coefficient
        numbers = [
            dict(zip(rule.hyper_names, of_group, strict=True))
            for rule, of_group in zip(plan.rules, hypers, strict=True)
        ]
        absorbed = None
        if isinstance(coefficient, float) and outcome.coefficients is None and _are_plain(plan, grads):
            absorbed = torch_step.absorbed(plan.rules, numbers, coefficient, outcome.spends_grads)
        coefficients: list[Any] = []
        if outcome.coefficients is not None:
            coefficients = outcome.coefficients.tolist() if skipped is None else [*outcome.coefficients.unbind()]
        size = _cached(plan) if absorbed is None else WHOLE
        scratch = torch.empty(
            size, dtype=torch.float32, device=plan.device
        )  # once, because the system would map new memory for each piece
        commit.begin()
        torch_step.advance(plan, grads, skipped)
        for batch in self._batches(plan, size, [grad is not None for grad in grads]):
            batch_grads = batch.of(grads)
            if absorbed is None:
                batch_grads = batch.scaled(batch_grads, coefficients or coefficient, scratch)
            torch_step.update(plan, batch, batch_grads, (absorbed or numbers)[batch.group], skipped)
        commit.end()

    def _measured(self, plan: Plan, grads: Grads) -> Iterator[Batch]:
        is_fp32 = all(grad is None or grad.dtype == torch.float32 for grad in grads)
        return self._batches(plan, _LARGE if is_fp32 else _cached(plan), [grad is not None for grad in grads])

    def _batches(self, plan: Plan, size: int, kinds: Sequence[Any]) -> Iterator[Batch]:
        """Yields batches of about `size` elements of one kind, from all rows whose kind is not false."""
        self.is_captured = self.is_captured or is_capturing(plan.device)
        batches = self._batches_of[plan]
        if size not in batches:
            batches[size] = list(cut(plan, size))
        for batch in batches[size]:
            yield from batch.apart(kinds)


def _can_read(plan: Plan) -> bool:
    """Tells whether the host can read the plan's values without a wait for a GPU."""
    return plan.device.type == "cpu"


def _cached(plan: Plan) -> int:
    return _CACHED if _can_read(plan) else _LARGE


def _are_plain(plan: Plan, grads: Grads) -> bool:
    """Tells whether parameters, states and gradients are all fp32."""
    every = all(row.form == Format() for row in plan.rows)
    return every and all(grad is None or grad.dtype == torch.float32 for grad in grads)


def _add_numbers(sums: Tensors, grads: Tensors, factor: Any, before: Any, overwrites: bool) -> None:
    if before == 0 and not overwrites:
        factor, overwrites = float(bool(grads)), True
    if not overwrites:
        if grads and factor != 0:
            torch._foreach_add_(sums, grads, alpha=factor)
    elif factor == 0:
        torch._foreach_zero_(sums)
    else:
        if any(accumulator is not grad for accumulator, grad in zip(sums, grads, strict=True)):
            torch._foreach_copy_(sums, grads)
        if factor != 1:
            torch._foreach_mul_(sums, factor)


def _add_on_device(sums: Tensors, grads: Tensors, factor: Any, before: Any, overwrites: bool) -> None:
    """Adds gradients to sums without reading the numbers: `where` is needed because NaN times 0 is NaN."""
    factor = torch.as_tensor(factor, device=sums[0].device).to(sums[0].dtype)
    holds = torch.ones_like(factor, dtype=torch.bool) if before is None else before != 0
    for index, accumulator in enumerate(sums):
        if not grads:
            accumulator.copy_(torch.where(holds, accumulator, 0.0))
            continue
        grad = grads[index].to(accumulator.dtype)
        added = torch.where(factor != 0, grad * factor, 0.0)
        accumulator.copy_(added if overwrites else torch.where(holds, accumulator + added, grad))


def _add_and_round(plan: Plan, fold: Fold, batches: Iterator[Batch]) -> None:
    """Adds gradients to sums in bf16 with the bits of the kernels: csrc/rows.h's Fold. It reads none of the numbers."""
    factor = torch.zeros((), dtype=torch.float32, device=plan.device).add_(fold.factor)
    holds = torch.ones_like(factor, dtype=torch.bool) if fold.before is None else fold.before != 0
    keeps = torch.zeros_like(holds) if fold.overwrites else holds
    factor = factor if fold.overwrites else torch.where(holds, factor, 1.0)
    additions = dict[int, Tensor]()  # 1 where a row is rounded, else 0
    for batch in batches:
        grads: list[Tensor | None] = [*batch.of(fold.grads)] or [None] * len(batch.rows)
        for index, accumulator, grad in zip(batch.rows, batch.of(fold.sums), grads, strict=True):
            row, accumulator = plan.rows[index], memory_order(accumulator)
            if grad is None:
                accumulator.copy_(torch.where(holds, accumulator, 0.0))
                continue
            kept, added = torch.where(keeps, accumulator, 0.0).float(), memory_order(grad).float() * factor
            value = torch.where(factor != 0, torch.where(keeps, kept + added, added), kept)
            result = value.bfloat16()
            if fold.words is not None:
                rounds = (factor != 0) & (keeps | (factor != 1) | (grad.dtype is not torch.bfloat16))
                key = codecs.mix(fold.words[row.first_chunk] ^ fold.salt)
                noise = codecs.noise(key, value.numel(), row.origin + batch.begin)
                result = torch.where(rounds, codecs.to_bfloat16_stochastic(value, noise), result)
                additions[index] = rounds
            accumulator.copy_(result)
    for index, rounds in additions.items():
        first, chunks = plan.rows[index].first_chunk, chunk_count(plan.rows[index].tensor.numel())
        fold.words[first : first + chunks].add_(rounds)  # type: ignore[index]
