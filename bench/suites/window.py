"""A whole window of 4 micro-batches: accumulation, norm, clip and step together.

Stock accumulates as autograd does: the first gradient becomes p.grad, `torch.autograd.backward(params, grads)` runs the
very AccumulateGrad nodes that end a backward pass. The gradients are there beforehand, in buffers that take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import accumfused as af
from bench import stock
from bench.measure import Variant, interleave
from bench.report import Table, timed
from bench.shapes import Shapes, gpt2
from bench.suites import Bench
from bench.workload import Workload, random_tensors

_MICRO_BATCHES = 4


def run(bench: Bench) -> list[Table]:
    shapes = gpt2(64, 2, 512, 64) if bench.quick else gpt2()
    return [_fp32(bench, shapes), _bf16(bench, shapes)]


def _fp32(bench: Bench, shapes: Shapes) -> Table:
    work = Workload(shapes)
    sets = [work.grads, *(random_tensors(shapes, 1e-3) for _ in range(_MICRO_BATCHES - 1))]
    fused = work.stock(fused=True)
    ours = work.ours()

    def stock_window(tail: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            work.set_grads(sets[0])
            for grads in sets[1:]:
                torch.autograd.backward(work.params, grads)
            tail()
            fused.zero_grad()

        return run

    our_window = window(work, ours, sets)
    trick = stock_window(stock.grad_scale_trick(work.params, fused))
    difference = work.difference(our_window, trick, sets)
    added = ("accumulate",) * (_MICRO_BATCHES - 1)
    variants = [
        Variant(
            "autograd + clip + fused",
            stock_window(stock.clip_and_step(work.params, fused)),
            passes=(*added, *stock.CLIP_FUSED),
        ),
        Variant("autograd + trick", trick, passes=(*added, *stock.TRICK)),
        Variant("accumfused", our_window, passes=(*added, "step")),
    ]
    against = {"trick": "autograd + trick", "clip+fused": "autograd + clip + fused"}
    title = f"window of {_MICRO_BATCHES} fp32 micro-batches, GPT-2 124M"
    table = timed(title, interleave(variants, bench.rounds, bench.ceilings), work.count, bench.ceilings, against)
    table.notes.append(f"largest difference of a parameter to the trick after one window: {difference:.1e}")
    return table


def _bf16(bench: Bench, shapes: Shapes) -> Table:
    work = Workload(shapes)
    sets = [random_tensors(shapes, 1e-3, torch.bfloat16) for _ in range(_MICRO_BATCHES)]
    # Stock: bf16 parameters whose p.grad is fp32, and fp32 master copies for the optimizer.
    halves = [torch.nn.Parameter(param.detach().bfloat16()) for param in work.params]
    for half in halves:
        half.grad_dtype = torch.float32
    fused = work.stock(fused=True)
    trick = stock.grad_scale_trick(work.params, fused)
    kept = [torch.zeros_like(param, requires_grad=False) for param in work.params]

    def stock_window(*, copies_back: bool) -> Callable[[], None]:
        def run() -> None:
            for grads in sets:
                torch.autograd.backward(halves, grads)
            work.set_grads([_grad(half) for half in halves])
            trick()
            if copies_back:
                with torch.no_grad():
                    torch._foreach_copy_([*halves], [*work.params])
            release(halves)
            release(work.params)

        return run

    def by_hand() -> None:
        torch._foreach_copy_(kept, sets[0])
        for grads in sets[1:]:
            torch._foreach_add_(kept, grads)
        work.set_grads(kept)
        trick()
        release(work.params)

    ours = work.ours()
    our_window = window(work, ours, sets)

    def takes_fp32() -> None:
        set_grad_dtype(work.params, torch.float32)

    def takes_bf16() -> None:
        set_grad_dtype(work.params, torch.bfloat16)

    native = stock_window(copies_back=False)
    difference = work.difference(then(takes_bf16, our_window), then(takes_fp32, native), sets)
    widened = ("overwrite_bf16",) + ("overwrite_bf16", "accumulate") * (_MICRO_BATCHES - 1)
    added = ("overwrite_bf16",) + ("accumulate_bf16",) * (_MICRO_BATCHES - 1)
    variants = [
        Variant(
            "grad_dtype=float32 + trick on fp32 masters, copied back to bf16",
            stock_window(copies_back=True), takes_fp32, (*widened, *stock.TRICK, "narrow_bf16"),
        ),
        Variant(
            "grad_dtype=float32 + trick on fp32 masters",
            native, takes_fp32, (*widened, *stock.TRICK),
        ),
        Variant("_foreach_add_ into kept fp32 buffers + trick", by_hand, takes_fp32, (*widened, *stock.TRICK)),
        Variant(
            "accumfused, fp32 parameters",
            our_window, takes_bf16, (*added, "step"),
        ),
    ]  # fmt: skip
    against = {"native": "grad_dtype=float32 + trick on fp32 masters", "by hand": variants[2].name}
    title = f"window of {_MICRO_BATCHES} bf16 micro-batches into fp32, GPT-2 124M"
    table = timed(title, interleave(variants, bench.rounds, bench.ceilings), work.count, bench.ceilings, against)
    table.notes += [
        f"largest difference of a parameter to the second row after one window: {difference:.1e}",
        "no stock optimizer takes bf16 parameters with fp32 gradients, so the stock rows step fp32 master copies; "
        "autograd allocates each window's fp32 gradients anew",
    ]
    return table


def window(work: Workload, optimizer: af.AdamW, sets: list[list[Tensor]]) -> Callable[[], None]:
    """One window of ours: what a loop does after each backward(), and the step."""

    def run() -> None:
        for grads in sets:
            work.set_grads(grads)
            optimizer.accumulate()
        optimizer.step()

    return run


def then(setup: Callable[[], None], run: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        setup()
        run()

    return both


def set_grad_dtype(params: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    for param in params:
        param.grad = None
        param.grad_dtype = dtype


def release(params: list[torch.nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def _grad(param: torch.nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad
