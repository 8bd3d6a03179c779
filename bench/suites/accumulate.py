"""Folding micro-batches into fp32, without a step: autograd's way, `_foreach_add_`, ours.

The gradients are there beforehand, in buffers that take turns, each far larger than a cache. Autograd and ours take the
first fp32 gradient as the sum to add to; buffers that are kept, as loops with `_foreach_add_` have them, are copied to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import accumfused as af
from bench import shapes
from bench.exact import WrongError, pieces, total
from bench.measure import Variant
from bench.peers import fold_gaps
from bench.report import Table, timed
from bench.suites import Bench, add_gaps
from bench.suites.window import release, set_grad_dtype
from bench.workload import Workload

_MICRO_BATCHES = 4
_BUFFERS = 3  # the first micro-batch's, which may become the sum, and two that take turns
_TOLERANCE = 2e-8  # sums are at most about 0.02, and rounded three times
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Way:
    """How micro-batches become a sum.

    Args:
        fold: all of them, what is timed. `clear`: before it, untimed.
        sums: after it, where they are.
    """

    name: str
    fold: Callable[[], None]
    clear: Callable[[], None]
    sums: Callable[[], list[Tensor]]
    passes: tuple[str, ...] | None = None


def run(bench: Bench) -> list[Table]:
    models = bench.models([shapes.GPT2, shapes.LLAMA_1B] if bench.on_gpu else [shapes.VIT])
    dtypes = (torch.float32, torch.bfloat16) if bench.dtype is None else (bench.dtype,)
    tables = [_table(bench, model, dtype) for model in models for dtype in dtypes]
    add_gaps(tables[0], fold_gaps(bench.peers))  # whatever the model and the gradients
    return tables


def _table(bench: Bench, model: str, dtype: torch.dtype) -> Table:
    work = bench.workload(bench.shapes(model))
    count = 3 if bench.quick else _MICRO_BATCHES
    buffers = [work.random(dtype=dtype) for _ in range(_BUFFERS)]
    sets = [buffers[0], *(buffers[1 + index % 2] for index in range(count - 1))]
    set_grad_dtype(work.params, dtype)
    ways = [_autograd(work, sets, dtype), _by_hand(work, sets, dtype)]
    ways += [_ours(label, work, optimizer, sets) for label, optimizer in bench.ours(work).items()]
    errors = {way.name: _error(way, sets) for way in ways}
    variants = [Variant(way.name, way.fold, way.clear, way.passes) for way in ways]
    against = {"autograd": ways[0].name, "_foreach_add_": ways[1].name}
    title = f"accumulate, {model}: {count} micro-batches of {_NAMES[dtype]} gradients into fp32"
    table = timed(title, bench.interleave(variants), work.count, bench.ceilings, against)
    for row in table.rows:
        row["milliseconds_per_micro_batch"] = row["median"] / count
    worst = max(errors, key=lambda name: errors[name])
    table.notes.append(f"largest error of a sum, against fp64: {errors[worst]:.1e} ({worst}); all were checked")
    return table


def _autograd(work: Workload, sets: Sequence[list[Tensor]], dtype: torch.dtype) -> Way:
    """The AccumulateGrad nodes at the end of a backward pass; of 16-bit parameters, with a p.grad in fp32."""
    params: Params = work.params
    if dtype != torch.float32:
        params = [torch.nn.Parameter(param.detach().to(dtype)) for param in work.params]
        for param in params:
            param.grad_dtype = torch.float32

    def fold() -> None:
        rest = sets
        if dtype == torch.float32:
            for param, grad in zip(params, sets[0], strict=True):
                param.grad = grad
            rest = sets[1:]
        for grads in rest:
            torch.autograd.backward(params, grads)

    added = ("accumulate",) if dtype == torch.float32 else ("overwrite_bf16", "accumulate")
    first = () if dtype == torch.float32 else ("overwrite_bf16",)
    return Way("autograd", fold, lambda: release(params), lambda: _grads(params), first + added * (len(sets) - 1))


def _by_hand(work: Workload, sets: Sequence[list[Tensor]], dtype: torch.dtype) -> Way:
    kept = [torch.zeros_like(param, requires_grad=False) for param in work.params]

    def fold() -> None:
        torch._foreach_copy_(kept, sets[0])
        for grads in sets[1:]:
            torch._foreach_add_(kept, grads)

    return Way("_foreach_add_ into kept fp32 buffers", fold, lambda: None, lambda: kept)


def _ours(label: str, work: Workload, optimizer: af.AdamW, sets: Sequence[list[Tensor]]) -> Way:
    """What a loop does after each backward(). The last one closes the window, so that p.grad is the sum."""

    def fold() -> None:
        for index, grads in enumerate(sets):
            work.set_grads(grads)
            optimizer.accumulate(last=index == len(sets) - 1)

    narrow = sets[0][0].dtype != torch.float32
    first, added = (("overwrite_bf16",), ("accumulate_bf16",)) if narrow else ((), ("accumulate",))
    return Way(label, fold, optimizer.zero_grad, lambda: _grads(work.params), first + added * (len(sets) - 1))


def _error(way: Way, sets: Sequence[list[Tensor]]) -> float:
    """The largest error of a sum; the first micro-batch's buffer, which may have become the sum, is put back.

    Raises:
        WrongError: the sums are something else.
    """
    saved = [grad.clone() for grad in sets[0]]
    before = [saved, *sets[1:]]
    way.clear()
    way.fold()
    found = way.sums()
    errors = [(ours.double() - total(several)).abs().max() for ours, *several in pieces(found, *before)]
    error = float(torch.stack(errors).max())
    way.clear()
    torch._foreach_copy_(sets[0], saved)
    if not error <= _TOLERANCE:
        raise WrongError(f"{way.name}: a sum of gradients is {error:.1e} off", error)
    return error


def _grads(params: Params) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]
