"""Many small tensors: the cost of calls and of tensors, hardly of memory."""

from __future__ import annotations

import torch

import accumfused as af
from bench import stock
from bench.measure import Variant, interleave
from bench.report import Column, Table, timed
from bench.shapes import small
from bench.suites import Bench
from bench.workload import Workload


def run(bench: Bench) -> list[Table]:
    work = Workload(small(50) if bench.quick else small())
    params = work.params
    fused = work.stock(fused=True)
    foreach = work.stock(foreach=True)
    ours = work.ours()
    work.set_grads()
    trick = stock.grad_scale_trick(params, fused)
    difference = work.difference(ours.step, trick, [work.grads])
    recipes = {
        "clip + AdamW(fused)": stock.clip_and_step(params, fused),
        "grad_scale trick": trick,
        "clip + AdamW(foreach)": stock.clip_and_step(params, foreach),
        "accumfused, from p.grad": ours.step,
    }
    # Right after an untimed call of its own: otherwise the time is that of the caches that the variant before has left.
    variants = [Variant(name, run, setup=run) for name, run in recipes.items()]
    variants.append(Variant("accumfused, caches cold", ours.step, setup=recipes["clip + AdamW(foreach)"]))
    timings = interleave(variants, 10 * bench.rounds)
    against = {"trick": "grad_scale trick", "clip+fused": "clip + AdamW(fused)"}
    title = f"small: {len(params)} tensors of {params[0].numel()} elements, fp32"
    table = timed(title, timings, work.count, bench.ceilings, against, unit="us")
    table.notes.append(f"largest difference of a parameter to the trick after one step: {difference:.1e}")
    return [table, _host_time(bench, ours)]


def _host_time(bench: Bench, optimizer: af.AdamW) -> Table:
    """Where one step() goes, part by part: the same calls, each timed alone."""
    plan, backend = optimizer._plan(), optimizer._runtime.backend
    assert backend is not None
    grads, _ = plan.gradients()
    scaling, partials = optimizer._scaling(plan, None), optimizer._partials(plan, True)
    hypers = [rule.hyper_values(group) for rule, group in zip(plan.rules, optimizer.param_groups, strict=True)]
    outcome = backend.norm(plan, plan.match(grads), partials, scaling)
    plan.let_go()

    def read() -> None:
        plan.match(plan.gradients()[0])

    parts = [
        Variant("is the plan still right?", lambda: plan.unchanged(optimizer.param_groups, optimizer.state)),
        Variant("read and check p.grad", read),
        Variant("norm", lambda: backend.norm(plan, grads, partials, scaling), read),
        Variant("step", lambda: backend.step(plan, grads, hypers, outcome), read),
        Variant("version counters", lambda: torch.autograd.graph.increment_version(plan.params)),
        Variant("the whole step()", optimizer.step),
    ]
    columns = [Column("name", ""), Column("microseconds", "us", "{:.1f}")]
    table = Table("small: one step() by part", columns)
    for timing in interleave(parts, 10 * bench.rounds):
        table.rows.append({"name": timing.variant.name, "microseconds": timing.median * 1e6})
    return table
