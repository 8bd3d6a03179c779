"""Many small tensors: the cost of calls and of tensors, hardly of memory."""

from __future__ import annotations

from dataclasses import replace

from bench.measure import Variant
from bench.peers import AGAINST, FOR_LOOP, FOREACH, KNOWN, peers
from bench.suites import Bench
from bench.tables import Table, timed

FOLLOWS = ("backend",)
_MANY = 5000


def run(bench: Bench) -> list[Table]:
    return [table for tensors in ([50] if bench.quick else [1000, 10_000]) for table in _size(bench, tensors)]


def _size(bench: Bench, tensors: int) -> list[Table]:
    work = bench.workload([(64,)] * tensors)
    # Loops over many tensors take a CPU long, and show nothing that those over fewer do not.
    too_many = tensors >= _MANY and not bench.on_gpu
    checked, optimizers = peers(work, () if too_many else (FOREACH, FOR_LOOP)), bench.ours(work)
    for label, optimizer in optimizers.items():
        checked.add(Variant(f"{label}, from p.grad", optimizer.step))
    variants = checked.variants
    title = f"small: {tensors} tensors of 64 elements, fp32"
    if bench.on_gpu:
        # The clocks see to the caches: until the GPU is done, and until the host is.
        variants = [replace(variant, passes=None) for variant in variants]
        rounds = (6 if tensors < _MANY else 1) * bench.rounds
        timings = {"GPU": bench.interleave(variants, rounds), **bench.host_times(variants, rounds)}
        tables = [timed(f"{title}, on the {of}", each, work.count, AGAINST, "us") for of, each in timings.items()]
        tables[0].notes.append("a recipe of more launches than the GPU's queue holds (about 1000) waits for the host")
    else:
        # Each follows an untimed call of its own; otherwise the time would be that of the caches that the variant
        # before it has left.
        variants = [
            Variant(each.name, each.run, lambda each=each: (each.whole(), work.set_grads())) for each in variants
        ]
        (ours,) = optimizers.values()
        foreach = KNOWN[FOREACH][0](work)  # fills the caches with its own
        variants.append(Variant("accumfused, caches cold", ours.step, setup=foreach))
        rounds = (2 if tensors < _MANY else 1) * bench.rounds
        tables = [timed(title, bench.interleave(variants, rounds), work.count, AGAINST, "us")]
        tables[0].notes.append("warm: each call follows an untimed one of its own")
    checked.explain(tables[0])
    return tables
