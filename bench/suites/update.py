"""norm + step from p.grad, and step() of a window that is already folded, against the stock recipes."""

from __future__ import annotations

from functools import partial

import torch

import accumfused as af
from bench import shapes, stock
from bench.measure import Variant
from bench.peers import AGAINST, COMPILED, FOR_LOOP, FOREACH, peers
from bench.shapes import Shapes
from bench.suites import Bench
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")


def run(bench: Bench) -> list[Table]:
    """Compares with the slow ones on a small model, with what compiles for every shape on one tensor."""
    tables = [_model(bench, name, of, [FOREACH]) for name, of in bench.models().items()]
    if bench.model is None:
        slow = [FOREACH, FOR_LOOP]
        for name, others in ((shapes.RESNET50, slow), (shapes.ONE_TENSOR, slow if bench.quick else [*slow, COMPILED])):
            tables.append(_model(bench, name, shapes.model(name, bench.quick), others))
    return tables


def _model(bench: Bench, name: str, of: Shapes, others: list[str]) -> Table:
    work = bench.workload(of)
    sets = [work.grads, work.random()]
    checked = peers(work, others)
    # What a GradScaler's loop does; gradients are LOSS_SCALE times too large.
    unscales = stock.unscale_clip_and_step(work.params, work.stock(fused=True))
    unscale = Variant("unscale + clip + fused", unscales, work.set_grads, stock.UNSCALE_PASSES)
    checked.add(unscale, scale=1 / stock.LOSS_SCALE)
    for label, optimizer in bench.ours(work).items():
        checked.add(Variant(f"{label}, from p.grad", optimizer.step, work.set_grads, ("read", "step")))
        if bench.on_gpu:
            scaled = partial(stock.step_scaled, optimizer, torch.tensor(stock.LOSS_SCALE, device=work.device))
            variant = Variant(f"{label}, grad_scale", scaled, work.set_grads, ("read", "step"))
            checked.add(variant, scale=1 / stock.LOSS_SCALE)
        folds = partial(fold, work, optimizer, sets)
        checked.add(Variant(f"{label}, after accumulate()", optimizer.step, folds, ("step",)), sets)
    small = work.count < 5e7
    timings = bench.interleave(checked.variants, 3 * bench.rounds if bench.on_gpu and small else bench.rounds)
    title, against = f"update, {name}: norm, clip and AdamW step, fp32", AGAINST | {"unscale": unscale.name}
    table = checked.explain(timed(title, timings, work.count, against))
    if bench.on_gpu:
        table.notes.append("unscale + clip + fused waits for the GPU before it steps, as GradScaler does")
    if bench.on_gpu and small:
        table.notes.append("writes that are still in the L2 cache when the time ends are not in it")
    return table


def fold(work: Workload, optimizer: af.AdamW, sets: list[list[torch.Tensor]]) -> None:
    for grads in sets:
        work.set_grads(grads)
        optimizer.accumulate()
