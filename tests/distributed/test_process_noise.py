"""The noise scale over processes, held to one process in float64 that knows every micro-batch."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import inside
import processes
import pytest
import torch
import torch.distributed as dist
from compare import differences, params_of, refused, snapshot
from spread import Net, loss_of, mesh_over, sharded
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import accumfused as af

WINDOWS, DECAY = 5, 0.5
SIZES = {  # samples of each micro-batch, by rank
    "even": ((3, 5, 2), (1, 4, 6)),
    "uneven": ((3, 5, 2), (4,)),
    "holes": ((3, 0, 2), (0, 4)),  # an empty micro-batch: its loss is NaN, and its weight 0
    "absent": ((3, 5), ()),
    "one": ((3,), (6,)),
}


@dataclass(frozen=True)
class Loop:
    """How the processes get to a step."""

    over: str = "group"  # or "ddp", whose hook is ours; "reduced" by DDP; "fully_shard"
    sizes: str = "even"
    weights: bool = True
    last: bool = False
    by: str = "accumulate"  # or "backward", "release", "step"
    scaled: str = "no"  # or "ours", "torch": which unscales and clips p.grad before the step
    reduce_dtype: Any = None
    backend: str = "auto"

    @property
    def has_means(self) -> bool:
        return self.over in ("reduced", "fully_shard")


GROUP = [
    Loop(), Loop(sizes="uneven", last=True), Loop(sizes="holes", by="backward"), Loop(sizes="absent"),
    Loop(sizes="absent", last=True, weights=False), Loop(sizes="uneven", weights=False, last=True, by="release"),
    Loop(over="ddp", weights=False), Loop(over="ddp", sizes="one"),
    Loop(over="ddp", sizes="one", weights=False, by="step"),
    Loop(over="ddp", by="release", last=True, scaled="ours"), Loop(over="ddp", last=True, scaled="torch"),
    Loop(sizes="holes", last=True, reduce_dtype=torch.bfloat16), Loop(last=True, backend="foreach"),
    Loop(sizes="uneven", backend="torch", last=True, scaled="torch"),
]  # fmt: skip
MEANS = [
    Loop(over=over, weights=False, by=by, last=last)
    for over, by, last in (("reduced", "accumulate", False), ("fully_shard", "backward", True))
]


def samples(loop: Loop, rank: int) -> tuple[int, ...]:
    return SIZES[loop.sizes][rank]


def seed_of(step: int, rank: int, index: int) -> int:
    return 1000 * step + 10 * rank + index


@functools.cache
def in_fp64(loop: Loop) -> tuple[float, float]:
    """Signal and noise by one process: exponential means of the estimates of each window."""
    model, signal, noise, share = Net(torch.float64), 0.0, 0.0, 0.0
    model.never.requires_grad_(False)
    for step in range(WINDOWS):
        parts = []
        for rank in (0, 1):
            for index, rows in enumerate(samples(loop, rank)):
                if rows:
                    loss = loss_of(model, rows, seed_of(step, rank, index), dtype=torch.float64)
                    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
                    parts.append((index, rows, torch.cat([grad.flatten() for grad in grads])))
        if loop.has_means:  # a micro-batch is one of all processes
            parts = [(i, 1, torch.stack([g for j, _, g in parts if i == j]).mean(0)) for i in range(3)]
        # Without weights a window is a sum of micro-batches, and the mean of processes: all of them are of weight 1.
        number, processes = len(parts), 1 if loop.has_means else 2
        factor = 1.0 if loop.weights else number / processes
        weights = torch.tensor([float(rows) if loop.weights else 1.0 for _, rows, _ in parts], dtype=torch.float64)
        stacked = torch.stack([grad for *_, grad in parts]) * factor
        mean = (weights[:, None] * stacked).sum(0) / weights.sum()
        small, large = float((weights * stacked.square().sum(1)).sum() / weights.sum()), float(mean.square().sum())
        signal = DECAY * signal + (1 - DECAY) * (number * large - small) / (number - 1)
        noise = DECAY * noise + (1 - DECAY) * (small - large) * float(weights.sum()) / (number - 1)
        share = DECAY * share + 1 - DECAY
    return signal / share, noise / share


def measure(loop: Loop) -> tuple[float, float, float, int]:
    """In a worker: noise scale, signal, noise and windows, of parameters that stay as they are."""
    model = Net()
    model.never.requires_grad_(False)
    settings: dict[str, Any] = {"noise_scale": DECAY, "backend": loop.backend, "reduce_dtype": loop.reduce_dtype}
    if loop.over == "group":
        settings["process_group"] = dist.group.WORLD
    settings["grads_are_reduced"] = loop.over == "reduced"
    outer: Any = sharded(model, mesh_over()) if loop.over == "fully_shard" else model
    if loop.over in ("ddp", "reduced"):
        outer = DistributedDataParallel(model)
    optimizer = af.SGD([param for param in model.parameters() if param.requires_grad], lr=0.0, **settings)
    if loop.over == "ddp":
        af.attach_ddp(outer, optimizer)
    scaler = (torch.amp if loop.scaled == "torch" else af).GradScaler("cpu", 2.0**7, enabled=loop.scaled != "no")
    scaler.scale(torch.ones(()))
    rank, releases = dist.get_rank(), loop.by == "release"
    own = samples(loop, rank)
    with af.release_gradients(optimizer, bucket_bytes=100) if releases else contextlib.nullcontext():
        for step in range(WINDOWS):
            for index, rows in enumerate(own):
                weight, last = rows if loop.weights else None, loop.last and index == len(own) - 1
                with outer.no_sync() if loop.over == "ddp" else contextlib.nullcontext():
                    loss = scaler.scale(loss_of(outer, rows, seed_of(step, rank, index)))
                    if loop.by in ("backward", "release"):
                        optimizer.backward(loss if rows else loss.nan_to_num(0.0), weight, last)
                    else:
                        loss.backward()
                if loop.by == "accumulate":
                    optimizer.accumulate(weight, last=last)
            if loop.scaled == "torch":
                scaler.unscale_(optimizer)
                clip_grad_norm_(params_of(optimizer), 0.1)
            scaler.step(optimizer)
            scaler.update()
    found = optimizer.noise_scale()
    return float(found.noise_scale), float(found.signal), float(found.noise), int(found.windows)


@pytest.mark.parametrize("loop", GROUP + MEANS, ids=str)
def test_the_noise_scale_is_that_of_all_micro_batches(loop: Loop) -> None:
    scale, signal, noise, windows = processes.agreed(2, measure, loop)
    expected = in_fp64(loop)
    rel = 1e-2 if loop.reduce_dtype else 1e-5  # the sums are rounded to bf16, and their squares are differences
    if loop.scaled == "torch":  # which has unscaled gradients without a word: signal and noise are scaled
        signal, noise = signal / 2.0**14, noise / 2.0**14
    assert (signal, noise) == pytest.approx(expected, rel=rel)
    assert scale == pytest.approx(expected[1] / expected[0], rel=rel)
    assert windows == WINDOWS


def collectives(over: str, measures: bool) -> int:
    """In a worker: the all-reduces of a step, after the processes know each other."""
    model = Net()
    outer = sharded(model, mesh_over()) if over == "fully_shard" else model
    settings: dict[str, Any] = {} if over == "fully_shard" else {"process_group": dist.group.WORLD}
    optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0, noise_scale=measures, **settings)
    for _ in range(2):
        for index in range(2):
            optimizer.backward(loss_of(outer, 3, index))
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            optimizer.step()
    return all_reduce.call_count


@pytest.mark.parametrize("over", ["group", "fully_shard"])
def test_a_window_sends_one_small_message_more(over: str) -> None:
    plain, measured = (processes.agreed(2, collectives, over, measures) for measures in (False, True))
    assert measured == plain + 1


def repeat(last: bool) -> None:
    """In a worker: steps that fail once the processes have added up their windows, and are made again."""
    found = []
    for fails in (False, True):
        model = Net()
        settings: dict[str, Any] = {"clip": af.ZScore(1.0, 0.9, 2), "process_group": dist.group.WORLD}
        optimizer = af.AdamW(model.parameters(), lr=0.1, noise_scale=0.5, **settings)
        for step in range(3):
            for index in range(2):
                loss_of(model, 3, seed_of(step, dist.get_rank(), index)).backward()
                optimizer.accumulate(2.0, last=last and index == 1)
            for failing in (inside.step_fails, inside.norm_fails, inside.step_fails) if fails else ():
                with failing(optimizer), pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
            optimizer.step()
        found.append(snapshot(optimizer))
    assert differences(*found) == []


@pytest.mark.parametrize("last", [False, True])
def test_steps_that_fail_and_are_made_again_count_once(last: bool) -> None:
    processes.run(2, repeat, last)


def grow() -> list[int]:
    """In a worker: the sizes of windows whose noise scale is 40 micro-batches of one process."""
    param = torch.zeros(4000, requires_grad=True)
    optimizer = af.SGD([param], lr=0.0, noise_scale=0.9, process_group=dist.group.WORLD)
    steps = af.NoiseScale(optimizer, start=2, most=64, every=2)
    sizes = []
    for update in range(16):
        sizes.append(steps(update))
        for _ in range(sizes[-1]):
            param.grad = (1.0 + torch.randn_like(param) * 40**0.5) / sizes[-1]
            optimizer.accumulate()
        optimizer.step()
    return sizes


def test_windows_of_all_processes_grow_alike_and_share_the_batch() -> None:
    assert 18 <= processes.agreed(2, grow)[-1] <= 22


def refuse(case: str) -> None:
    """In a worker: what would be measured wrong is refused."""
    model = Net()
    model.never.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    if case == "reduced":
        optimizer = af.SGD(params, lr=0.1, noise_scale=True, grads_are_reduced=True)
        with refused(optimizer, RuntimeError, "leave the weights out"):
            optimizer.backward(loss_of(model, 3, 0), 3.0)
    elif case == "alone":
        optimizer = af.SGD(params, lr=0.1, noise_scale=dist.get_rank() == 0, process_group=dist.group.WORLD)
        loss_of(model, 3, 0).backward()
        optimizer.accumulate()
        with refused(optimizer, ValueError, "the same rounding_seed and noise_scale"):
            optimizer.step()
    else:
        outer = sharded(model, mesh_over())
        optimizer = af.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, noise_scale=True)
        outer.set_requires_gradient_sync(case != "kept")
        with refused(optimizer, RuntimeError, "delivers them in a sum" if case == "kept" else "leave the weights out"):
            optimizer.backward(loss_of(outer, 3, 0), None if case == "kept" else 3.0)


@pytest.mark.parametrize("case", ["reduced", "alone", "weighted", "kept"])
def test_what_tells_no_noise_is_refused(case: str) -> None:
    processes.run(2, refuse, case)
