"""Many small tensors: the cost of calls and of tensors, hardly of memory."""

from __future__ import annotations

import torch

import accumfused as af
from accumfused.tail import Divisors
from bench import stock
from bench.measure import Variant, interleave
from bench.peers import peers
from bench.report import Column, Table, timed
from bench.shapes import small
from bench.suites import Bench, largest_error

_AGAINST = {"trick": "grad_scale trick", "clip+fused": "clip + AdamW(fused)"}


def run(bench: Bench) -> list[Table]:
    sizes = [1000, 10_000] if bench.on_gpu else [1000]
    if bench.quick:
        sizes = [50]
    return [table for tensors in sizes for table in _size(bench, tensors)]


def _size(bench: Bench, tensors: int) -> list[Table]:
    work = bench.workload(small(tensors))
    params = work.params
    fused = work.stock(fused=True)
    foreach = work.stock(foreach=True)
    work.set_grads()
    recipes = {
        "clip + AdamW(fused)": stock.clip_and_step(params, fused),
        "grad_scale trick": stock.grad_scale_trick(params, fused),
        "clip + AdamW(foreach)": stock.clip_and_step(params, foreach),
    }
    errors = {name: work.error(run) for name, run in recipes.items()}
    notes: list[str] = []
    if bench.on_gpu:
        others, notes = peers(work)
        for peer in others:
            recipes[peer.name] = peer.run
            errors[peer.name] = work.error(peer.run, debiased=peer.debiased)
    optimizers = bench.ours(work)
    for label, optimizer in optimizers.items():
        recipes[f"{label}, from p.grad"] = optimizer.step
        errors[f"{label}, from p.grad"] = work.error(optimizer.step)
    title = f"small: {tensors} tensors of {params[0].numel()} elements, fp32"
    if bench.on_gpu:
        # The clocks see to the caches, and time twice: until the GPU is done, and until the host is.
        variants = [Variant(name, run) for name, run in recipes.items()]
        rounds = (6 if tensors < 5000 else 1) * bench.rounds
        table = timed(
            f"{title}, on the GPU", bench.interleave(variants, rounds), work.count, bench.ceilings, _AGAINST, "us"
        )
        timings = bench.host_times(variants, rounds)
        tables = [table, timed(f"{title}, on the host", timings, work.count, bench.ceilings, _AGAINST, "us")]
        table.notes.append("a recipe of more launches than the GPU's queue holds (about 1000) waits for the host too")
    else:
        # Right after an untimed call of its own: otherwise the time is that of the caches that the variant before has
        # left.
        variants = [Variant(name, run, setup=run) for name, run in recipes.items()]
        (ours,) = optimizers.values()
        variants.append(Variant("accumfused, caches cold", ours.step, setup=recipes["clip + AdamW(foreach)"]))
        tables = [
            timed(
                title,
                bench.interleave(variants, 10 * bench.rounds, ceilings=False),
                work.count,
                bench.ceilings,
                _AGAINST,
                "us",
            )
        ]
    tables[0].notes += [largest_error(errors), *notes]
    return [*tables, *(_host_time(bench, label, optimizer) for label, optimizer in optimizers.items())]


def _host_time(bench: Bench, label: str, optimizer: af.AdamW) -> Table:
    """Where one step() goes, part by part: the same calls, each timed alone."""
    plan, backend = optimizer._plan(), optimizer._runtime.backend
    assert backend is not None
    grads, _ = plan.gradients()
    scaling, partials = optimizer._scaling(plan, Divisors()), optimizer._partials(plan, True)
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
    of = f"{label}, {len(plan.params)} tensors, on the host" if bench.on_gpu else "one step()"
    table = Table(f"small: {of} by part", columns)
    for timing in interleave(parts, (3 if bench.on_gpu else 10) * bench.rounds, clock=bench.host_clock):
        table.rows.append({"name": timing.variant.name, "microseconds": timing.median * 1e6})
    return table
