"""norm + step from p.grad, and step() of a window that is already folded, against the stock recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch

import accumfused as af
from bench import shapes, stock
from bench.measure import Variant
from bench.peers import AGAINST, COMPILED, FOR_LOOP, FOREACH, peers
from bench.shapes import Shapes
from bench.suites import Bench, largest_error
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")
_UNSCALE = "unscale + clip + fused"


def run(bench: Bench) -> list[Table]:
    """Compares with the slow ones on a small model, with what compiles for every shape on one tensor."""
    several = [FOREACH, FOR_LOOP]
    tables = [_model(bench, name, of, several if bench.on_gpu else [FOREACH]) for name, of in bench.models().items()]
    if bench.model is None:
        more = {shapes.RESNET50: several, shapes.ONE_TENSOR: [*several, *([] if bench.quick else [COMPILED])]}
        tables += [_model(bench, name, shapes.model(name, bench.quick), names) for name, names in more.items()]
    return tables


def _model(bench: Bench, name: str, of: Shapes, compared: list[str]) -> Table:
    work = bench.workload(of)
    second = work.random()
    work.set_grads()
    others = peers(work, compared)
    # What a GradScaler's loop does; gradients are LOSS_SCALE times too large.
    unscales = stock.unscale_clip_and_step(work.params, work.stock(fused=True))
    scaled_stock = Variant(_UNSCALE, unscales, work.set_grads, stock.UNSCALE_CLIP_FUSED)
    variants = [*others.variants, scaled_stock]
    errors = {**others.errors, scaled_stock.name: work.error(scaled_stock.run, scale=1 / stock.LOSS_SCALE)}
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
    small = work.count < 5e7
    timings = bench.interleave(variants, 3 * bench.rounds if bench.on_gpu and small else bench.rounds)
    table = timed(
        f"update, {name}: norm, clip and AdamW step, fp32", timings, work.count, AGAINST | {"unscale": _UNSCALE}
    )
    table.rows += others.gaps
    table.notes += [largest_error(errors), *others.notes]
    if bench.on_gpu:
        table.notes.append("unscale + clip + fused waits for the GPU before it steps, as GradScaler does")
    if bench.on_gpu and small:
        table.notes.append("writes that are still in the L2 cache when the time ends are not in it")
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
