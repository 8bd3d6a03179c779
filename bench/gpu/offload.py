"""Offload on a card: are the bits those of the same run on the card, is memory that a copy still reads left alone, and
what do bytes and times come to? Without a card (a dry run) the CPU is the card, which has no streams.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import accumfused as af
from accumfused.backends.offload import Offload
from accumfused.backends.transfer import Copies
from bench import shapes
from bench.gpu.card import DRY, card, run
from bench.shapes import Shapes
from bench.suites import Bench
from bench.workload import random_tensors

BF16 = torch.bfloat16
K, WINDOWS = 2, 3  # micro-batches of a window
# Runs of many tensors, and of one that is larger than a slot's usual bytes; sizes that no vector divides.
SHAPES: Shapes = [(300, 40), (7,), (33, 5)] if DRY else [(4096, 1024), (7,), (20_000_003,), (333, 5), (4096, 1024)]
STREAMED: Shapes = [(50_000,)] * 3 if DRY else [(1 << 24,)] * 3  # a run each: no copy waits for a slot
STALL = 400_000_000  # cycles, some 0.2 s: the host has queued all that comes before a copy begins

# ---- bits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained on the card and with offload.

    Args:
        skipped: the window whose last micro-batch has an infinite gradient.
    """

    make: Callable[..., af.FusedOptimizer] = af.AdamW
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    is_released: bool = False
    skipped: int | None = None
    on_side_stream: bool = False


CASES = {
    "AdamW": Case(),
    "AdamW, fp32": Case(dtype=torch.float32),
    "Lion": Case(af.Lion),
    "8-bit states": Case(settings={"state_dtype": "8bit", "master_weights": "split8"}),
    "8-bit states, no masters": Case(settings={"state_dtype": "8bit", "master_weights": None}),
    "two-byte sums": Case(settings={"sum_dtype": BF16}),
    "released gradients": Case(is_released=True),
    "clip": Case(settings={"max_grad_norm": 0.01}),
    "skip": Case(settings={"max_grad_norm": 0.01}, skipped=1),
    "side stream": Case(is_released=True, on_side_stream=True),
}


def bits(bench: Bench, name: str) -> None:
    """Prints a line.

    Raises:
        RuntimeError: the two runs have not the same bits.
    """
    case = CASES[name]
    on_card, offloaded = (train(bench, case, offload=offload) for offload in (False, True))
    wrong = [what for what, value in on_card.items() if not same(value, offloaded.get(what))]
    wrong += [what for what in offloaded if what not in on_card]
    print(f"bits, {name}: {len(on_card) - len(wrong)} of {len(on_card)} tensors equal")
    if wrong:
        raise RuntimeError(f"other bits in {', '.join(wrong)}")


def same(one: Tensor, other: Tensor | None) -> bool:
    """Compares bits: NaN is NaN."""
    if other is None or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def train(bench: Bench, case: Case, *, offload: bool) -> dict[str, Tensor]:
    """Returns what a few windows lead to, on the host: parameters, states, and each window's norm."""
    is_side = case.on_side_stream and bench.device.type == "cuda"
    stream: Any = torch.cuda.Stream(bench.device) if is_side else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        params = parameters(bench, SHAPES, case.dtype)
        optimizer = made(bench, params, case.make, offload=offload, **case.settings)
        release = af.release_gradients(optimizer, 2**20) if case.is_released else contextlib.nullcontext()
        found = {}
        with release:
            for number, micro_batch in itertools.product(range(WINDOWS), range(K)):
                grads = gradients(params, seed=number * K + micro_batch)
                if (number, micro_batch) == (case.skipped, K - 1):
                    grads[0].view(-1)[3] = torch.inf
                # The gradients of a dot product are the other factor.
                loss = torch.stack([(p * g).sum().float() for p, g in zip(params, grads, strict=True)]).sum()
                if case.is_released:
                    optimizer.backward(loss, weight=2.0)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.accumulate(2.0)
                if micro_batch == K - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    found[f"norm {number}"] = optimizer.grad_norm.cpu()
        found |= {f"parameter {i}": param.detach().cpu() for i, param in enumerate(params)}
        for index, entries in optimizer.state_dict()["state"].items():
            found |= {f"{key} {index}": value.cpu() for key, value in entries.items() if isinstance(value, Tensor)}
    return found


def parameters(bench: Bench, of: Shapes, dtype: torch.dtype = BF16) -> list[torch.nn.Parameter]:
    bench.release()
    torch.manual_seed(0)
    return [torch.nn.Parameter(tensor) for tensor in random_tensors(of, 0.02, dtype, bench.device)]


def gradients(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn_like(param).mul_(1e-3) for param in params]


def made(
    bench: Bench,
    params: Sequence[torch.nn.Parameter],
    make: Callable[..., af.FusedOptimizer] = af.AdamW,
    *,
    offload: bool,
    **settings: Any,
) -> af.FusedOptimizer:
    backend = "cpu" if offload else bench.backends[0]
    settings = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1e9, "rounding_seed": 1, **settings}
    return make(params, backend=backend, offload=offload, **settings)


# ---- streams ---------------------------------------------------------------------------------------------------------


def streams(bench: Bench, *, are_kept: bool) -> None:
    """Overwrites gradients' memory while their copies wait, and reads weights at once after a step.

    Args:
        are_kept: the loop keeps the gradients, and overwrites them itself, as a replayed graph does, or DDP in its
            buckets. Else it lets go of them, and the allocator gives their memory to new tensors.

    Raises:
        RuntimeError: a sum or a weight is wrong; or none is, where nothing keeps the memory or orders the streams: then
            this sees nothing.
    """
    title = f"streams, gradients {'kept' if are_kept else 'freed'}"
    params = parameters(bench, STREAMED)
    train_once = partial(streamed, bench, params, are_kept=are_kept)
    right, found = train_once(stalls=False, overwrites=False), train_once()
    wrong = {what: _wrong(tensors, found[what]) for what, tensors in right.items()}
    print(f"{title}: {wrong} of {len(params)} tensors each wrong")
    if any(wrong.values()):
        raise RuntimeError("tensors are wrong")
    if bench.device.type != "cuda" or are_kept:
        return
    blind = {
        "sums": ("record_stream", mock.patch.object(Tensor, "record_stream", return_value=None)),
        "weights": ("join", mock.patch.object(Copies, "join", return_value=None)),
    }
    for what, (call, without) in blind.items():
        with without:
            lost = _wrong(right[what], train_once()[what])
        print(f"{title}: without {call} {lost} of {len(params)} {what} are wrong")
        if not lost:
            raise RuntimeError(f"{what} are right without {call}, so this stage would not see its lack")


def _wrong(right: Sequence[Tensor], found: Sequence[Tensor]) -> int:
    return sum(not same(*pair) for pair in zip(right, found, strict=True))


def streamed(
    bench: Bench, params: list[torch.nn.Parameter], *, are_kept: bool, stalls: bool = True, overwrites: bool = True
) -> dict[str, list[Tensor]]:
    """Returns the sums of a window, and the weights as the current stream reads them right after the step."""
    with torch.no_grad():
        torch.manual_seed(0)
        for param, value in zip(params, random_tensors(STREAMED, 0.02, BF16, bench.device), strict=True):
            param.copy_(value)
    optimizer = made(bench, params, offload=True)
    _window(bench, optimizer, params, are_kept, stalls, overwrites)  # makes the streams, and the slots
    found = _window(bench, optimizer, params, are_kept, stalls, overwrites)
    bench.synchronize()
    return found


def _window(
    bench: Bench,
    optimizer: af.FusedOptimizer,
    params: list[torch.nn.Parameter],
    are_kept: bool,
    stalls: bool,
    overwrites: bool,
) -> dict[str, list[Tensor]]:
    for number in range(K):
        grads = gradients(params, seed=number)
        for index, param in enumerate(params):
            param.grad = grads[index]
        if not are_kept:
            grads.clear()
        bench.release()  # so the allocator has no other memory at hand than that of freed gradients
        if stalls:
            stall(bench, optimizer, "down")
        optimizer.accumulate(1.0)
        poison = [torch.full_like(param, torch.nan) for param in params] if overwrites else []
        if overwrites:
            for grad in grads:
                grad.fill_(torch.nan)
        plan = optimizer._engine.plans.last
        assert plan is not None
        plan.wait()
        del poison
    sums = [accumulator.clone() for accumulator in optimizer._engine.window.sums if accumulator is not None]
    if stalls:
        stall(bench, optimizer, "up")
    optimizer.step()
    weights = [param.detach().clone() for param in params]
    return {"sums": sums, "weights": [weight.cpu() for weight in weights]}


def stall(bench: Bench, optimizer: af.FusedOptimizer, way: str) -> None:
    """Has the stream of copies sleep, once there is one, before it makes those that come."""
    stream = copies_of(optimizer)._streams.get((bench.device, way))
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(STALL)  # type: ignore[no-untyped-call]


def copies_of(optimizer: af.FusedOptimizer) -> Copies:
    backend = optimizer._engine.plans.current().backend
    assert isinstance(backend, Offload)
    return backend.copies


# ---- bytes and times -------------------------------------------------------------------------------------------------


class Side:
    """An optimizer with offload, or without, and a model's parameters of its own."""

    def __init__(self, bench: Bench, of: Shapes, settings: dict[str, Any], *, offload: bool) -> None:
        self.bench, self.offload = bench, offload
        self.params = parameters(bench, of)
        self.optimizer = made(bench, self.params, offload=offload, **settings)
        self.grads = random_tensors(of, 1e-3, BF16, bench.device)
        self.bus: dict[str, int] = {"down": 0, "up": 0}

    def micro_batch(self) -> tuple[float, float]:
        """Returns the seconds until accumulate() returns, and until the folds are made."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.clone()
        self.bench.synchronize()
        start = time.perf_counter()
        self.optimizer.accumulate(1.0)
        returned = time.perf_counter() - start
        self.optimizer._engine.plans.last.wait()  # type: ignore[union-attr]
        self.bench.synchronize()
        return returned, time.perf_counter() - start

    def step(self) -> float:
        self.bench.synchronize()
        start = time.perf_counter()
        self.optimizer.step()
        self.bench.synchronize()
        return time.perf_counter() - start

    def peak(self) -> int:
        """The card's bytes at the peak of a window whose gradients are released."""
        self.grads.clear()
        self.bench.release()
        torch.cuda.reset_peak_memory_stats(self.bench.device)
        with af.release_gradients(self.optimizer):
            for _ in range(K):
                self.optimizer.backward(torch.stack([param.sum() for param in self.params]).sum(), weight=1.0)
        self.optimizer.step()
        return torch.cuda.max_memory_allocated(self.bench.device)

    def counting(self) -> None:
        """Has copies count their bytes."""
        copies = copies_of(self.optimizer)

        def counted(way: str, copy: Callable[..., Any], sources: Sequence[Tensor], *places: Any, **options: Any) -> Any:
            self.bus[way] += sum(source.nbytes for source in sources)
            return copy(sources, *places, **options)

        copies.down = partial(counted, "down", copies.down)  # type: ignore[method-assign]
        copies.up = partial(counted, "up", copies.up)  # type: ignore[method-assign]


ON_CARD, OFFLOAD = "on the card", "offload"
ROUNDS = 3
SIDES: dict[str, dict[str, Any]] = {
    "split16, fp32 states": {},
    "8-bit states, two-byte sums": {"state_dtype": "8bit", "master_weights": None, "sum_dtype": BF16},
}


def times(bench: Bench, name: str) -> None:
    """Prints the times with offload and without, in turn, and the bytes over the bus."""
    of = shapes.model(shapes.LLAMA_02B, bench.quick)
    sides = {how: Side(bench, of, SIDES[name], offload=how == OFFLOAD) for how in (ON_CARD, OFFLOAD)}
    figures: dict[str, list[list[float]]] = {how: [] for how in sides}
    for _ in range(1 + ROUNDS):
        for how, side in sides.items():
            _, first = side.micro_batch()
            returned, further = side.micro_batch()
            figures[how].append([first, further, returned, side.step()])
    for how, rows in figures.items():  # the first window makes states, streams and slots
        medians = [1e3 * statistics.median(column) for column in zip(*rows[1:], strict=True)]
        first, further, returned, step = (f"{ms:.4g} ms" for ms in medians)
        print(
            f"times, {name}, {how}: first micro-batch {first}, further {further} (accumulate() returns after "
            f"{returned}), step {step}"
        )
    offloaded, count = sides[OFFLOAD], shapes.count(of)
    offloaded.counting()
    offloaded.micro_batch()
    folded = offloaded.bus["down"]
    offloaded.step()
    down, up = (size / count for size in (offloaded.bus["down"] - folded, offloaded.bus["up"]))
    print(f"bus, {name}: {folded / count:.4g} B a parameter and micro-batch; a step {down:.4g} down, {up:.4g} up")


def peaks(bench: Bench, name: str) -> None:
    """Prints the card's peaks with offload and without."""
    if bench.device.type != "cuda":
        print("peak on the card: not measured, for the CPU is the card")
        return
    of = shapes.model(shapes.LLAMA_02B, bench.quick)
    for how in (ON_CARD, OFFLOAD):
        side = Side(bench, of, SIDES[name], offload=how == OFFLOAD)
        side.micro_batch()
        side.step()
        print(
            f"peak on the card, {name}, {how}, gradients released: {side.peak() / shapes.count(of):.4g} B a parameter"
        )


if __name__ == "__main__":
    bench = card()
    parts = {f"bits, {name}": partial(bits, bench, name) for name in CASES}
    parts["streams, freed"] = partial(streams, bench, are_kept=False)
    parts["streams, kept"] = partial(streams, bench, are_kept=True)
    parts |= {f"{what.__name__}, {name}": partial(what, bench, name) for name in SIDES for what in (times, peaks)}
    sys.exit(run(parts))
