"""norm + step from p.grad, and step() of a window that is already folded, against the stock recipes."""

from __future__ import annotations

import torch

from bench import stock
from bench.measure import Variant, interleave
from bench.report import Table, timed
from bench.shapes import Shapes, gpt2, resnet50
from bench.suites import Bench
from bench.workload import LR, Workload, random_tensors


def run(bench: Bench) -> list[Table]:
    models = {
        "GPT-2 124M": gpt2(64, 2, 512, 64) if bench.quick else gpt2(),
        "ResNet-50": resnet50(8, 10) if bench.quick else resnet50(),
    }
    return [_model(bench, name, shapes) for name, shapes in models.items()]


def _model(bench: Bench, name: str, shapes: Shapes) -> Table:
    work = Workload(shapes)
    params, second = work.params, random_tensors(shapes, 1e-3)
    fused = work.stock(fused=True)
    foreach = work.stock(foreach=True)
    ours = work.ours()
    trick = stock.grad_scale_trick(params, fused)

    def fold() -> None:
        for grads in (work.grads, second):
            work.set_grads(grads)
            ours.accumulate()

    def after_accumulate() -> None:
        fold()
        ours.step()

    def trick_on_sum() -> None:
        torch._foreach_add_(work.grads, second)
        work.set_grads()
        trick()

    work.set_grads()
    difference = work.difference(ours.step, trick, [work.grads])
    folded = work.difference(after_accumulate, trick_on_sum, [work.grads, second])
    variants = [
        Variant("clip + AdamW(fused)", stock.clip_and_step(params, fused), work.set_grads, stock.CLIP_FUSED),
        Variant("grad_scale trick", trick, work.set_grads, stock.TRICK),
        Variant(
            "unscale + clip + fused",
            stock.unscale_clip_and_step(params, fused),
            work.set_grads,
            stock.UNSCALE_CLIP_FUSED,
        ),
        Variant("clip + AdamW(foreach)", stock.clip_and_step(params, foreach), work.set_grads),
        Variant("accumfused, from p.grad", ours.step, work.set_grads, ("read", "step")),
        Variant("accumfused, after accumulate()", ours.step, fold, ("step",)),
    ]
    timings = interleave(variants, bench.rounds if work.count > 5e7 else 3 * bench.rounds, bench.ceilings)
    against = {
        "trick": "grad_scale trick",
        "clip+fused": "clip + AdamW(fused)",
        "unscale": "unscale + clip + fused",
    }
    table = timed(
        f"tail, {name}: norm, clip and AdamW step, fp32 ({len(shapes)} tensors)",
        timings, work.count, bench.ceilings, against,
    )  # fmt: skip
    table.notes.append(
        f"largest difference of a parameter to the trick after one step: {difference:.1e} from p.grad, "
        f"{folded:.1e} after accumulate() (updates are about {LR:.0e})"
    )
    return table
