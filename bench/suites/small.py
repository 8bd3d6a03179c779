"""Many small tensors: the cost of calls and of tensors, hardly of memory."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import accumfused as af
from bench import stock
from bench.measure import Variant, interleave
from bench.parts import WHOLE, with_rest
from bench.peers import peers
from bench.report import Column, Table, timed
from bench.shapes import small
from bench.suites import Bench, add_gaps, largest_error

_MANY = 5000
_FOR_MANY: tuple[str, ...] = ()  # beside the references
_AGAINST = {"trick": "grad_scale trick", "clip+fused": "clip + AdamW(fused)"}


def run(bench: Bench) -> list[Table]:
    sizes = [50] if bench.quick else [1000, 10_000]
    return [table for tensors in sizes for table in _size(bench, tensors)]


def _size(bench: Bench, tensors: int) -> list[Table]:
    work = bench.workload(small(tensors))
    params = work.params
    work.set_grads()
    # Loops over many tensors take a CPU long, and show nothing that those over fewer do not.
    too_many = tensors >= _MANY and not bench.on_gpu
    others = peers(work, _FOR_MANY if bench.peers is None and too_many else bench.peers)
    recipes = {variant.name: variant for variant in others.variants}
    errors = others.errors
    optimizers = bench.ours(work)
    for label, optimizer in optimizers.items():
        recipes[f"{label}, from p.grad"] = Variant(f"{label}, from p.grad", optimizer.step)
        errors[f"{label}, from p.grad"] = work.error(optimizer.step)
    title = f"small: {tensors} tensors of {params[0].numel()} elements, fp32"
    if bench.on_gpu:
        # The clocks see to the caches, and time twice: until the GPU is done, and until the host is.
        variants = [replace(variant, passes=None) for variant in recipes.values()]
        rounds = (6 if tensors < _MANY else 1) * bench.rounds
        table = timed(
            f"{title}, on the GPU", bench.interleave(variants, rounds), work.count, bench.ceilings, _AGAINST, "us"
        )
        timings = bench.host_times(variants, rounds)
        tables = [table, timed(f"{title}, on the host", timings, work.count, bench.ceilings, _AGAINST, "us")]
        table.notes.append("a recipe of more launches than the GPU's queue holds (about 1000) waits for the host too")
    else:
        # Right after an untimed call of its own: otherwise the time is that of the caches that the variant before has
        # left.
        variants = [Variant(each.name, each.run, _once(each)) for each in recipes.values()]
        (ours,) = optimizers.values()
        foreach = stock.clip_and_step(params, work.stock(foreach=True))  # fills them with what is its own
        variants.append(Variant("accumfused, caches cold", ours.step, setup=foreach))
        tables = [
            timed(
                title,
                bench.interleave(variants, (2 if tensors < _MANY else 1) * bench.rounds, ceilings=False),
                work.count,
                bench.ceilings,
                _AGAINST,
                "us",
            )
        ]
    tables[0].notes += [largest_error(errors), *others.notes]
    add_gaps(tables[0], others.gaps)
    return [*tables, *(_host_time(bench, label, optimizer) for label, optimizer in optimizers.items())]


def _once(variant: Variant) -> Callable[[], None]:
    """What makes the caches warm: an untimed call, with what has to be ready before it and before the timed one."""

    def setup() -> None:
        for call in (variant.setup, variant.run, variant.setup):
            if call is not None:
                call()

    return setup


def _host_time(bench: Bench, label: str, optimizer: af.AdamW) -> Table:
    """Where one step() goes: its parts, timed within it, and what is left of it."""
    plan = optimizer.engine.plans.current().plan
    watch = _Watch()
    of = f"{label}, {len(plan.params)} tensors, on the host" if bench.on_gpu else "one step()"
    table = Table(f"small: {of} by part", [Column("name", ""), Column("microseconds", "us", "{:.1f}")])
    with contextlib.ExitStack() as stack:
        for part, owner, name in (
            ("is the plan still right?", plan, "unchanged"),
            ("read and check p.grad", plan, "gradients"),
            ("read and check p.grad", plan, "match"),
            ("norm", optimizer.engine.plans.current().backend, "norm"),
            ("step", optimizer.engine.plans.current().backend, "step"),
            ("version counters", torch.autograd.graph, "increment_version"),
        ):
            timed_call = watch.around(part, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed_call))
        whole = Variant(WHOLE, optimizer.step, watch.begin)
        (timing,) = interleave([whole], (3 if bench.on_gpu else 10) * bench.rounds, clock=bench.host_clock)
    counted = watch.calls[-len(timing.seconds) :]
    table.rows += [
        {"name": part, "microseconds": 1e6 * statistics.median(call[part] for call in counted)} for part in counted[0]
    ]
    table.rows.append({"name": WHOLE, "microseconds": timing.median * 1e6})
    table.rows = with_rest(table.rows)
    return table


class _Watch:
    """Seconds by part, of every call of what is watched."""

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def begin(self) -> None:
        self.calls.append(defaultdict(float))

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.calls[-1][part] += time.perf_counter() - start
            return result

        return timed_call
