"""A whole window of 4 micro-batches: accumulation, norm, clip and step together.

Stock accumulates as autograd does: the first gradient becomes p.grad, `torch.autograd.backward(params, grads)` runs the
very AccumulateGrad nodes that end a backward pass. The gradients are there beforehand, in buffers that take turns;
allocated.py measures what autograd's own allocations cost on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import accumfused as af
from bench import shapes, stock
from bench.measure import Variant
from bench.shapes import Shapes
from bench.suites import Bench, largest_error
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")
_MICRO_BATCHES = 4


def run(bench: Bench) -> list[Table]:
    models = (shapes.GPT2, shapes.LLAMA_1B) if bench.on_gpu else (shapes.VIT,)
    return [table(bench, name, of) for name, of in bench.models(*models).items() for table in (_fp32, _bf16)]


def _fp32(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    sets = [work.grads, *(work.random() for _ in range(_MICRO_BATCHES - 1))]
    fused = work.stock(fused=True)

    def stock_window(tail: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            work.set_grads(sets[0])
            for grads in sets[1:]:
                torch.autograd.backward(work.params, grads)
            tail()
            fused.zero_grad()

        return run

    trick = stock_window(stock.grad_scale_trick(work.params, fused))
    added = ("accumulate",) * (_MICRO_BATCHES - 1)
    variants = [
        Variant(
            "autograd + clip + fused",
            stock_window(stock.clip_and_step(work.params, fused)),
            passes=(*added, *stock.CLIP_FUSED),
        ),
        Variant("autograd + trick", trick, passes=(*added, *stock.TRICK)),
        *(
            Variant(label, window(work, optimizer, sets), passes=(*added, "step"))
            for label, optimizer in bench.ours(work).items()
        ),
        *(
            Variant(
                f"{label}, weights, last=True",
                window(work, optimizer, sets, closes=True),
                passes=(*added, "scale", "read", "step"),
            )
            for label, optimizer in bench.ours(work).items()
        ),
    ]
    errors = {variant.name: work.error(variant.run, sets) for variant in variants}
    against = {"trick": "autograd + trick", "clip+fused": "autograd + clip + fused"}
    title = f"window of {_MICRO_BATCHES} fp32 micro-batches, {model}"
    table = timed(title, bench.interleave(variants), work.count, against)
    table.notes.append(largest_error(errors))
    return table


def _bf16(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    sets = [work.random(dtype=torch.bfloat16) for _ in range(_MICRO_BATCHES)]
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

    def takes_fp32() -> None:
        set_grad_dtype(work.params, torch.float32)

    def takes_bf16() -> None:
        set_grad_dtype(work.params, torch.bfloat16)

    native = stock_window(copies_back=False)
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
        *(
            Variant(f"{label}, fp32 parameters", window(work, optimizer, sets), takes_bf16, (*added, "step"))
            for label, optimizer in bench.ours(work).items()
        ),
    ]  # fmt: skip
    errors = {variant.name: work.error(then(variant.setup, variant.run), sets) for variant in variants}
    against = {"native": "grad_dtype=float32 + trick on fp32 masters", "by hand": variants[2].name}
    title = f"window of {_MICRO_BATCHES} bf16 micro-batches into fp32, {model}"
    table = timed(title, bench.interleave(variants), work.count, against)
    table.notes += [
        largest_error(errors),
        "no stock optimizer takes bf16 parameters with fp32 gradients, so the stock rows step fp32 master copies; "
        "autograd allocates each window's fp32 gradients anew",
    ]
    return table


def window(
    work: Workload, optimizer: af.AdamW, sets: list[list[Tensor]], *, closes: bool = False
) -> Callable[[], None]:
    """One window of ours: what a loop does after each backward(), and the step.

    Args:
        closes: micro-batches have a weight, and the window is closed: p.grad is its mean before the step.
    """

    def run() -> None:
        for grads in sets[:-1]:
            work.set_grads(grads)
            optimizer.accumulate(2.0 if closes else None)
        work.set_grads(sets[-1])
        optimizer.accumulate(2.0 if closes else None, last=closes)
        optimizer.step(normalizer=1 / len(sets) if closes else None)  # the truth is the sum

    return run


def then(setup: Callable[[], object] | None, run: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        if setup is not None:
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
