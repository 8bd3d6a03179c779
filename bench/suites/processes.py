"""A window of 4 micro-batches in two processes (gloo): backward passes, reduction, norm, clip and step.

The model's loss is the dot product of parameters and given gradients, so there is nothing to compute but the tail. The
time of backward passes alone (without any reduction) is measured in the same rounds and subtracted: the rest is the
tail. Bytes on the wire are the payload that a process hands to collectives, counted as they are called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from bench import shapes, stock
from bench.exact import ADAMW, MAX_GRAD_NORM
from bench.suites import Bench
from bench.tables import Table, quartiles
from bench.workload import state_bytes

FOLLOWS = ()
_PROCESSES = 2
_MICRO_BATCHES = 4
_LAST = _MICRO_BATCHES - 1
_ALONE = "backward passes alone"
# glibc gives freed gradients back to the system or not, by what lies above them, and the kernel clears each page before
# it comes again: up to 25 ms a backward pass here, more where the gradients of a micro-batch exist all at once.
_KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}


def run(bench: Bench) -> list[Table]:
    command = [sys.executable, "-m", "bench.suites.processes", *(["--quick"] if bench.quick else [])]
    environment = os.environ | _KEEP_PAGES
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    rows = json.loads(done.stdout.splitlines()[-1])
    alone = rows.pop(0)["window ms"][1]
    tables = []
    for kind in ("DDP", "fully_shard"):
        title = f"processes: {_PROCESSES}, window of {_MICRO_BATCHES} fp32 micro-batches, {shapes.GPT2_BLOCKS}, {kind}"
        tables.append(Table(title, [row for row in rows if ("fully_shard" in row["name"]) == (kind != "DDP")]))
    tables[0].notes.append(
        f"every process has one thread and keeps freed memory; the tail is the window without its backward passes, "
        f"{alone:.0f} ms; they talk over gloo, which on one machine is memory: a network's time is not in it"
    )
    return tables


class Given(nn.Module):
    """Parameters whose gradients are given: forward(number) is their dot product with the number-th set."""

    def __init__(self, of: shapes.Shapes, sets: list[list[Tensor]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.own = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in of)
        self.sets = sets

    def forward(self, number: int) -> Tensor:
        grads = self.sets[number % len(self.sets)]
        return torch.stack([torch.dot(p.flatten(), g.flatten()) for p, g in zip(self.own, grads, strict=True)]).sum()


Made = tuple[Callable[[], None], Any]  # a window, and its optimizer


def _made(optimizer: Any, micro_batch: Callable[[int], object], *tail: Callable[[], object]) -> Made:
    def window() -> None:
        for number in range(_MICRO_BATCHES):
            micro_batch(number)
        for call in tail:
            call()

    return window, optimizer


def ddp_stock(model: Given, *, zero: bool) -> Made:
    ddp = DistributedDataParallel(model)
    params = [*model.parameters()]
    if zero:
        # Not above: importing it warns of what torch itself uses, and in the processes alone nobody minds.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    ddp.register_comm_hook(None, _counting_hook)

    def micro_batch(number: int) -> None:
        with ddp.no_sync() if number < _LAST else nullcontext():
            (ddp(number) / _MICRO_BATCHES).backward()

    return _made(optimizer, micro_batch, stock.clip_and_step(params, optimizer), optimizer.zero_grad)


def ddp_ours(model: Given, *, released: bool = False, **settings: Any) -> Made:
    ddp = DistributedDataParallel(model)
    settings |= {"process_group": dist.group.WORLD, **ADAMW}
    optimizer = af.AdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **settings)
    af.attach_ddp(ddp, optimizer)
    optimizer._release = af.release_gradients(optimizer, 16 * 2**20) if released else None  # lives as long

    def micro_batch(number: int) -> None:
        with ddp.no_sync():  # DDP's copies to its buckets and back are of no use here
            optimizer.backward(ddp(number), 1.0)

    return _made(optimizer, micro_batch, optimizer.step)


def fsdp(model: Given, *, ours: bool) -> Made:
    fully_shard(model)
    params = [*model.parameters()]

    def micro_batch(number: int) -> None:
        model.set_requires_gradient_sync(number == _LAST)
        (model(number) / _MICRO_BATCHES).backward()

    if ours:
        optimizer: Any = af.AdamW(params, max_grad_norm=MAX_GRAD_NORM, **ADAMW)
        return _made(optimizer, micro_batch, optimizer.step, optimizer.zero_grad)
    optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    return _made(optimizer, micro_batch, stock.clip_and_step(params, optimizer), optimizer.zero_grad)


def alone(model: Given) -> Made:
    def micro_batch(number: int) -> None:
        model(number).backward()
        model.zero_grad()  # adding them up is the tail's

    return _made(None, micro_batch)


VARIANTS: dict[str, Callable[[Given], Made]] = {
    _ALONE: alone,
    "DDP + clip + AdamW(fused)": partial(ddp_stock, zero=False),
    "DDP + clip + ZeroRedundancyOptimizer": partial(ddp_stock, zero=True),
    "accumfused, attach_ddp": ddp_ours,
    "accumfused, attach_ddp, bf16 on the wire": partial(ddp_ours, reduce_dtype=torch.bfloat16),
    "accumfused, attach_ddp, release_gradients": partial(ddp_ours, released=True),
    "fully_shard + clip + AdamW(fused)": partial(fsdp, ours=False),
    "fully_shard + accumfused": partial(fsdp, ours=True),
}

_sent: list[int] = []  # payloads, in bytes, while they are counted


def _counting_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own reduction is not called from Python; this one is, and is counted there."""
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[no-any-return]


_counting_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # DDP looks


def _count_collectives() -> None:
    """Makes every collective that is called from Python note the payload that this process hands in."""

    def counting(collective: Callable[..., Any], given: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            _sent.append(tensors[given].nbytes)
            return collective(*args, **kwargs)

        return call

    names = {"all_reduce": 0, "broadcast": 0, "reduce_scatter_tensor": 1, "reduce_scatter_single": 1}
    names |= {"all_gather_into_tensor": 1, "all_gather_single": 1}
    for name, given in names.items():
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), given))


def _memory(optimizer: Any) -> int:
    if optimizer is None:
        return 0
    if isinstance(optimizer, af.FusedOptimizer):
        parts = af.memory_report(optimizer).total.parts
        return sum(size for part, size in parts.items() if part not in ("parameters", "gradients"))
    return state_bytes(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer has one


def work(rank: int, store: str, quick: bool) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, _PROCESSES), rank=rank, world_size=_PROCESSES)
    torch.set_num_threads(1)
    _count_collectives()
    of = shapes.model(shapes.GPT2_BLOCKS, quick)
    generator = torch.Generator().manual_seed(2 + rank)
    sets = [[torch.randn(shape, generator=generator) for shape in of] for _ in range(2)]
    windows: dict[str, Callable[[], None]] = {}
    counted: dict[str, dict[str, float]] = {}
    for name, make in VARIANTS.items():
        windows[name], optimizer = make(Given(of, sets))
        windows[name]()
        _sent.clear()
        windows[name]()  # the second one: what is agreed on once has been
        sent = {"collectives": len(_sent), "sent B/param": sum(_sent) / shapes.count(of)}
        counted[name] = {**sent, "kept B/param": _memory(optimizer) / shapes.count(of)}
    seconds: dict[str, list[float]] = {name: [] for name in windows}
    for _ in range(2 if quick else 3):
        for name, window in windows.items():
            dist.barrier()
            begin = time.perf_counter()
            window()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, taken in seconds.items():
        tail = [1e3 * (own - alone) for own, alone in zip(taken, seconds[_ALONE], strict=True)]
        rows.append({"name": name, "tail ms": quartiles(tail), "window ms": quartiles(taken, 1e3), **counted[name]})
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (f"{folder}/store", "--quick" in sys.argv), nprocs=_PROCESSES)


if __name__ == "__main__":
    main()
