"""norm + step from p.grad, and step() of a window that is already folded, against the stock recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch

import accumfused as af
from bench import shapes, stock
from bench.exact import LR
from bench.measure import Variant
from bench.peers import peers
from bench.report import Table, timed
from bench.suites import Bench, largest_error
from bench.workload import Workload


def run(bench: Bench) -> list[Table]:
    names = [shapes.GPT2, shapes.RESNET50]
    if bench.on_gpu:
        names = [shapes.GPT2, shapes.LLAMA_1B, shapes.LLAMA_7B, shapes.RESNET50]
    return [_model(bench, name) for name in names]


def _model(bench: Bench, name: str) -> Table:
    work = bench.workload(bench.shapes(name))
    params, second = work.params, work.random()
    fused, foreach = work.stock(fused=True), work.stock(foreach=True)
    unscale = stock.UNSCALE_CLIP_FUSED
    variants = [
        Variant("clip + AdamW(fused)", stock.clip_and_step(params, fused), work.set_grads, stock.CLIP_FUSED),
        Variant("grad_scale trick", stock.grad_scale_trick(params, fused), work.set_grads, stock.TRICK),
        Variant("unscale + clip + fused", stock.unscale_clip_and_step(params, fused), work.set_grads, unscale),
        Variant("clip + AdamW(foreach)", stock.clip_and_step(params, foreach), work.set_grads),
    ]
    scales = {variants[2].name: 1 / stock.LOSS_SCALE}
    debiased: set[str] = set()
    notes: list[str] = []
    if bench.on_gpu:
        others, notes = peers(work)
        debiased = {peer.name for peer in others if peer.debiased}
        variants += [Variant(peer.name, peer.run, work.set_grads, stock.CLIP_FUSED) for peer in others]
    work.set_grads()
    errors = {}
    for variant in variants:
        scale = scales.get(variant.name, 1.0)
        errors[variant.name] = work.error(variant.run, scale=scale, debiased=variant.name in debiased)

    for label, optimizer in bench.ours(work).items():
        fold = _fold(work, optimizer, second)

        def after_accumulate(fold: Callable[[], None] = fold, optimizer: af.AdamW = optimizer) -> None:
            fold()
            optimizer.step()

        ours = [Variant(f"{label}, from p.grad", optimizer.step, work.set_grads, ("read", "step"))]
        errors[ours[0].name] = work.error(optimizer.step)
        if bench.on_gpu:
            scaled = Variant(f"{label}, grad_scale", _scaled(work, optimizer), work.set_grads, ("read", "step"))
            errors[scaled.name] = work.error(scaled.run, scale=1 / stock.LOSS_SCALE)
            ours.append(scaled)
        ours.append(Variant(f"{label}, after accumulate()", optimizer.step, fold, ("step",)))
        errors[ours[-1].name] = work.error(after_accumulate, [work.grads, second])
        work.set_grads()
        variants += ours

    timings = bench.interleave(variants, None if work.count > 5e7 else 3 * bench.rounds)
    against = {
        "trick": "grad_scale trick",
        "clip+fused": "clip + AdamW(fused)",
        "unscale": "unscale + clip + fused",
    }
    title = f"tail, {name}: norm, clip and AdamW step, fp32 ({len(params)} tensors, {work.count:,} parameters)"
    table = timed(title, timings, work.count, bench.ceilings, against)
    table.notes += [f"{largest_error(errors)} (updates are about {LR:.0e})", *notes]
    if bench.on_gpu:
        table.notes.append("unscale + clip + fused waits for the GPU before it steps, as GradScaler does")
    if bench.on_gpu and work.count < 5e7:
        table.notes.append(
            "writes that are still in the L2 cache when the time ends are not in it: of these few, more than of the "
            "ceilings' long streams"
        )
    return table


def _fold(work: Workload, optimizer: af.AdamW, second: list[torch.Tensor]) -> Callable[[], None]:
    def fold() -> None:
        for grads in (work.grads, second):
            work.set_grads(grads)
            optimizer.accumulate()

    return fold


def _scaled(work: Workload, optimizer: af.AdamW) -> Callable[[], None]:
    """As with a GradScaler: the loss scale is on the device, and step() divides by it."""
    loss_scale = torch.tensor(stock.LOSS_SCALE, device=work.device)

    def run() -> None:
        optimizer.grad_scale = loss_scale  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale  # type: ignore[attr-defined]

    return run
