"""norm + step from p.grad, and step() of a window that is already folded, against the stock recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch

import accumfused as af
from bench import shapes, stock
from bench.exact import LR
from bench.measure import Variant
from bench.peers import peers, step_gaps, unscale_clip_and_step
from bench.report import Column, Table, timed
from bench.suites import Bench, add_gaps, largest_error
from bench.workload import Workload

_FEWER: dict[str, tuple[str, ...]] = {shapes.GPT2: ("foreach",), shapes.VIT: ()}  # peers beside the references


def run(bench: Bench) -> list[Table]:
    names = [shapes.GPT2, shapes.VIT, shapes.RESNET50]
    if bench.on_gpu:
        names = [shapes.GPT2, shapes.LLAMA_1B, shapes.LLAMA_7B, shapes.VIT, shapes.RESNET50]
    tables = [_model(bench, name) for name in bench.models(names)]
    if bench.peers is None and bench.model_shapes is None:
        tables.append(_model(bench, shapes.ONE_TENSOR, compiling=not bench.quick))
    gaps = step_gaps(str(row["name"]) for table in tables for row in table.rows if "cannot" not in row)
    if gaps:
        together = Table("tail: unscaling, norm, clip and step in one call, as ours does", [Column("name", "")])
        add_gaps(together, gaps)
        tables.append(together)
    return tables


def _model(bench: Bench, name: str, *, compiling: bool = False) -> Table:
    work = bench.workload(bench.shapes(name))
    params, second = work.params, work.random()
    work.set_grads()
    # On a CPU, where other packages take long, the smaller tables have them all.
    brief = bench.peers is None and name in _FEWER and not bench.on_gpu
    others = peers(work, _FEWER[name] if brief else bench.peers, compiling=compiling)
    scaled_stock = unscale_clip_and_step(work)
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

    timings = bench.interleave(variants, _rounds(bench, work))
    against = {
        "trick": "grad_scale trick",
        "clip+fused": "clip + AdamW(fused)",
        "unscale": "unscale + clip + fused",
    }
    title = f"tail, {name}: norm, clip and AdamW step, fp32 ({len(params)} tensors, {work.count:,} parameters)"
    table = timed(title, timings, work.count, bench.ceilings, against)
    table.notes += [f"{largest_error(errors)} (updates are about {LR:.0e})", *others.notes]
    add_gaps(table, others.gaps)
    if brief:
        table.notes.append(f"other people's optimizers are in the table of {shapes.RESNET50}, with --peers here too")
    if bench.on_gpu:
        table.notes.append("unscale + clip + fused waits for the GPU before it steps, as GradScaler does")
    if bench.on_gpu and work.count < 5e7:
        table.notes.append(
            "writes that are still in the L2 cache when the time ends are not in it: of these few, more than of the "
            "ceilings' long streams"
        )
    return table


def _rounds(bench: Bench, work: Workload) -> int:
    """More of what is short; but there are many slow recipes on a CPU."""
    return 3 * bench.rounds if bench.on_gpu and work.count < 5e7 else bench.rounds


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
