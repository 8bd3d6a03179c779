"""Ours beside torch's own recipes: clip and AdamW step, eager and captured, on the GPU and on the host.

What comes out at another step than fp64 is not timed. `of copy` counts the bytes that each recipe's own passes move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import stock
from bench.gpu.cases import using
from bench.gpu.journal import Journal
from bench.gpu.target import Target
from bench.measure import Timing, Variant, interleave
from bench.shapes import Shapes, flat, gpt2, small
from bench.workload import Workload

LARGE = 1_200_000_000
_BYTES = 48  # an element: parameter, gradient, two states, their copies, and what torch's recipes take
FUSED = "clip + AdamW(fused)"


def main() -> None:
    target, own = Target(), Journal("versus")
    copy = target.copy_rate()
    own.write("rates", copy_TBs=copy / 1e12, floor_us=floor(target))
    for name, shapes in models(target).items():
        with own.section("versus", model=name):
            measure(target, own, name, shapes, copy)
        target.release()


def models(target: Target) -> dict[str, Shapes]:
    few = target.is_dry
    return {
        "1000 tensors of 64": small(20 if few else 1000),
        "one tensor of 2M": flat(target.elements(2_000_000, _BYTES)),
        "GPT-2 124M": gpt2(64, 1, 128, 16) if few else gpt2(),
        "one tensor of 1.2e9": flat(target.elements(LARGE, _BYTES)),
    }


def floor(target: Target) -> float:
    """Microseconds that a graph of one empty kernel takes: they are in every captured figure."""
    replay, _ = target.captured((lambda: None) if target.is_dry else lambda: torch.cuda._sleep(1))
    return 1e6 * interleave([Variant("floor", replay)], 5 * target.rounds, clock=target.clock)[0].median


@dataclass(frozen=True)
class Recipe:
    """A whole step. Args: passes: see `bench.measure.Variant`."""

    run: Callable[[], Any]
    passes: tuple[str, ...] | None = None


def recipes(target: Target, work: Workload, *, captures: bool) -> dict[str, Recipe]:
    fused = work.stock(fused=True, capturable=captures)
    foreach = work.stock(foreach=True, capturable=captures)
    ours = using(target.backend, work.ours)
    return {
        FUSED: Recipe(stock.clip_and_step(work.params, fused), stock.CLIP_FUSED),
        "grad_scale trick": Recipe(stock.grad_scale_trick(work.params, fused), stock.TRICK),
        "clip + AdamW(foreach)": Recipe(stock.clip_and_step(work.params, foreach)),
        "accumfused": Recipe(ours.step, ("read", "step")),
    }


def measure(target: Target, own: Journal, name: str, shapes: Shapes, copy: float) -> None:
    work = Workload(shapes, target.device)
    work.set_grads()
    launches: dict[str, int | None] = {}
    variants: dict[str, list[Variant]] = {"eager": [], "captured": []}
    for how, several in variants.items():  # all before the first is timed, which changes the states
        for label, recipe in recipes(target, work, captures=how == "captured" and not target.is_dry).items():
            with own.section("versus", model=name, how=how, by=label):
                run = recipe.run
                if how == "captured":
                    with work.put_back():
                        run, launches[label] = target.captured(run)
                work.error(run)
                several.append(Variant(label, run, work.set_grads, recipe.passes))
    times = 3 if work.count < 5e7 else 1  # as many rounds, for what takes microseconds
    for how, several in variants.items():
        if not several:
            continue
        on_gpu, on_host = (
            interleave(several, times * target.rounds, clock=clock) for clock in (target.clock, target.host_clock)
        )
        for timing, host in zip(on_gpu, on_host, strict=True):
            facts = {"model": name, "how": how, "by": timing.variant.name, "us": timing.median * 1e6}
            facts |= {"host us": host.median * 1e6, "of copy": share(timing, work.count, copy)}
            facts |= {"launches": launches[timing.variant.name]} if how == "captured" else {}
            own.write("versus", **facts, **_ratio(timing, on_gpu))


def share(timing: Timing, elements: int, copy: float) -> float | None:
    """Of a copy's rate."""
    moved = timing.variant.bytes_per_parameter
    return None if moved is None else moved * elements / timing.median / copy


def _ratio(timing: Timing, several: list[Timing]) -> dict[str, float]:
    fused = next((each for each in several if each.variant.name == FUSED), None)
    return {} if fused is None else {f"times as fast as {FUSED}": timing.times_as_fast_as(fused)}


if __name__ == "__main__":
    main()
