"""A whole window of 4 micro-batches: accumulation, norm, clip and step together.

Stock accumulates as autograd does: the first gradient becomes p.grad, `torch.autograd.backward(params, grads)` runs the
very AccumulateGrad nodes that end a backward pass. The gradients are there beforehand, in buffers that take turns;
allocated.py measures what autograd's own allocations cost on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import accumfused as af
from bench import stock
from bench.measure import Variant
from bench.peers import Checked
from bench.shapes import Shapes
from bench.suites import Bench
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")
_MICRO_BATCHES = 4


def run(bench: Bench) -> list[Table]:
    return [table(bench, name, of) for name, of in bench.models().items() for table in (_fp32, _bf16)]


def _fp32(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    sets = [work.grads, *(work.random() for _ in range(_MICRO_BATCHES - 1))]
    fused = work.stock(fused=True)

    def stock_window(tail: Callable[[], None]) -> None:
        work.set_grads(sets[0])
        for grads in sets[1:]:
            torch.autograd.backward(work.params, grads)
        tail()
        fused.zero_grad()

    clips, trick = stock.clip_and_step(work.params, fused), stock.grad_scale_trick(work.params, fused)
    added = ("accumulate",) * (_MICRO_BATCHES - 1)
    variants = [
        Variant("autograd + clip + fused", partial(stock_window, clips), passes=(*added, *stock.CLIP_FUSED_PASSES)),
        Variant("autograd + trick", partial(stock_window, trick), passes=(*added, *stock.TRICK_PASSES)),
    ]
    for closes in (False, True):
        for label, optimizer in bench.ours(work).items():
            whole = window(work, optimizer, sets, closes=closes)
            name, passes = (f"{label}, weights, last=True", ("scale", "read", "step")) if closes else (label, ("step",))
            variants.append(Variant(name, whole, passes=(*added, *passes)))
    against = {"trick": "autograd + trick", "clip+fused": "autograd + clip + fused"}
    return _table(bench, work, sets, variants, f"window of {_MICRO_BATCHES} fp32 micro-batches, {model}", against)


def _bf16(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    sets = [work.random(dtype=torch.bfloat16) for _ in range(_MICRO_BATCHES)]
    # Stock: bf16 parameters whose p.grad is fp32, and fp32 master copies for the optimizer.
    halves = [torch.nn.Parameter(param.detach().bfloat16()) for param in work.params]
    for half in halves:
        half.grad_dtype = torch.float32
    trick = stock.grad_scale_trick(work.params, work.stock(fused=True))
    buffers = [torch.zeros_like(param, requires_grad=False) for param in work.params]

    def stock_window(*, copies_back: bool) -> None:
        for grads in sets:
            torch.autograd.backward(halves, grads)
        work.set_grads([half.grad for half in halves])  # type: ignore[misc]
        trick()
        if copies_back:
            with torch.no_grad():
                torch._foreach_copy_([*halves], [*work.params])
        release(halves)
        release(work.params)

    def by_hand() -> None:
        torch._foreach_copy_(buffers, sets[0])
        for grads in sets[1:]:
            torch._foreach_add_(buffers, grads)
        work.set_grads(buffers)
        trick()
        release(work.params)

    takes_fp32, takes_bf16 = (partial(set_grad_dtype, work.params, dtype) for dtype in (torch.float32, torch.bfloat16))
    widened = ("overwrite_bf16",) + ("overwrite_bf16", "accumulate") * (_MICRO_BATCHES - 1) + stock.TRICK_PASSES
    added = ("overwrite_bf16",) + ("accumulate_bf16",) * (_MICRO_BATCHES - 1) + ("step",)
    masters, manual = "grad_dtype=float32 + trick on fp32 masters", "_foreach_add_ into kept fp32 buffers + trick"
    variants = [
        Variant(f"{masters}, copied back to bf16", partial(stock_window, copies_back=True), takes_fp32,
                (*widened, "narrow_bf16")),
        Variant(masters, partial(stock_window, copies_back=False), takes_fp32, widened),
        Variant(manual, by_hand, takes_fp32, widened),
        *(Variant(f"{label}, fp32 parameters", window(work, optimizer, sets), takes_bf16, added)
          for label, optimizer in bench.ours(work).items()),
    ]  # fmt: skip
    title = f"window of {_MICRO_BATCHES} bf16 micro-batches into fp32, {model}"
    table = _table(bench, work, sets, variants, title, {"native": masters, "by hand": manual})
    table.notes.append(
        "no stock optimizer takes bf16 parameters with fp32 gradients, so the stock rows step fp32 master copies; "
        "autograd allocates each window's fp32 gradients anew"
    )
    return table


def _table(
    bench: Bench, work: Workload, sets: list[list[Tensor]], variants: list[Variant], title: str, against: dict[str, str]
) -> Table:
    """Compares each variant with fp64, and times them."""
    checked = Checked(work)
    for variant in variants:
        checked.add(variant, sets)
    return checked.explain(timed(title, bench.interleave(variants), work.count, against))


def window(
    work: Workload, optimizer: af.AdamW, sets: list[list[Tensor]], *, closes: bool = False
) -> Callable[[], None]:
    """Returns one window of ours: what a loop does after each backward(), and the step.

    Args:
        closes: micro-batches have a weight, and the window is closed: p.grad is its mean before the step.
    """

    def run() -> None:
        for index, grads in enumerate(sets, 1):
            work.set_grads(grads)
            optimizer.accumulate(2.0 if closes else None, last=closes and index == len(sets))
        optimizer.step(normalizer=1 / len(sets) if closes else None)  # the truth is the sum

    return run


def set_grad_dtype(params: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    release(params)
    for param in params:
        param.grad_dtype = dtype


def release(params: list[torch.nn.Parameter]) -> None:
    for param in params:
        param.grad = None
