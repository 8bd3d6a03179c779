"""Processes with a batch each: process_group and attach_ddp, held to one process in float64 with all batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_close, assert_same_bits, everything
from snapshot import differences, snapshot
from table import random_grads, random_params, set_grads
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import accumfused as af
from accumfused import distributed

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}  # a gradient of another length shows
MAX_NORM = 0.5  # some steps are clipped, some are not
EVEN = ((3, 5, 2), (1, 4, 6), (6, 2, 2), (2, 7, 1))  # rows of each micro-batch, by rank
UNEVEN = ((3, 5, 2), (4,), (6, 2), (2, 7, 1))
HOLES = ((3, 5, 2), (4, 0, 6), (0, 2, 2), (0, 7, 1))  # an empty batch: its loss is NaN, and its weight 0
ONE = ((3,), (1,), (6,), (2,))
ABSENT = ((3, 5), (), (2,), (1,))  # one has no micro-batch at all
NEVER = 6  # numbers in the layer that nobody uses, the last of all


class Net(Module):
    """A small model with a layer that only some processes use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(7, 5), Linear(5, 3)
        self.sometimes, self.never = Linear(5, 3), Linear(2, 2)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden) + self.sometimes(hidden) if uses_all else self.second(hidden)


@dataclass(frozen=True)
class Loop:
    """How a model is trained in each process."""

    ddp: dict[str, bool] | None = field(default_factory=dict)  # its options; None: without it
    no_sync: str = "never"
    weighted: bool = True
    last: bool = False
    by: str = "accumulate"  # "backward": optimizer.backward(); "step": nothing but step()
    sizes: tuple[tuple[int, ...], ...] = EVEN
    is_frozen: bool = False  # `never`, and all use `sometimes`: a DDP that looks for no unused layer wants it so
    reduced_by_ddp: bool = False
    releases: bool = False
    travels_alone: bool = False  # every parameter is reduced by itself, as large ones are

    def loss(self, model: Any, step: int, rank: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
        x, y = (torch.randn(self.sizes[rank][index], n, generator=generator).to(dtype) for n in (7, 3))
        return (model(x, rank == 0 or self.is_frozen) - y).square().mean()

    def is_quiet(self, step: int, index: int, is_last: bool) -> bool:
        """Whether a backward() is under no_sync()."""
        if self.ddp is None or (step == index == 0 and self.ddp.get("static_graph")):
            return False  # torch looks at the first backward() of a static graph
        return self.no_sync == "all" or (self.no_sync == "all but the last" and not is_last)


@functools.cache
def alone(
    weighted: bool, sizes: tuple[tuple[int, ...], ...], is_frozen: bool, world: int
) -> tuple[Tensor, tuple[float, ...]]:
    """The same training by one process, by torch alone and in float64: parameters, and the norm of each step."""
    model, norms, loop = Net().double(), [], Loop(sizes=sizes, is_frozen=is_frozen)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        total = 0
        for rank, own in enumerate(sizes[:world]):
            for index, rows in enumerate(own):
                if rows:
                    loss = loop.loss(model, step, rank, index, torch.float64)
                    (loss * rows if weighted else loss).backward()
                    total += rows
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= total if weighted else world
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_to_vector(model.parameters()).detach(), tuple(norms)


def train(loop: Loop) -> tuple[Tensor, tuple[float, ...]]:
    """In a worker: the same by the processes together."""
    rank, model, norms = dist.get_rank(), Net(), []
    model.never.requires_grad_(not loop.is_frozen)
    wrapped = model if loop.ddp is None else DistributedDataParallel(model, **loop.ddp)
    group = {"process_group": dist.group.WORLD} if loop.ddp is None else {}
    given = {"grads_are_reduced": True} if loop.reduced_by_ddp else group
    optimizer = af.SGD(model.parameters(), **OPTIONS, max_grad_norm=MAX_NORM, **given)
    if loop.ddp is not None and not loop.reduced_by_ddp:
        af.attach_ddp(wrapped, optimizer)
    with af.release_gradients(optimizer, bucket_bytes=100) if loop.releases else contextlib.nullcontext():
        for step in range(STEPS):
            sizes = loop.sizes[rank]
            for index, rows in enumerate(sizes):
                is_last, weight = index == len(sizes) - 1, rows if loop.weighted else None
                with wrapped.no_sync() if loop.is_quiet(step, index, is_last) else contextlib.nullcontext():
                    loss = loop.loss(wrapped, step, rank, index)
                    if loop.by == "backward":
                        optimizer.backward(loss, weight, loop.last and is_last)
                    else:
                        loss.backward()
                if loop.by == "accumulate":
                    optimizer.accumulate(weight, last=loop.last and is_last)
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
            if loop.by == "step":
                assert all(param.grad is None for param in model.parameters())
    assert not any(param in optimizer.state for param in model.never.parameters())
    return parameters_to_vector(model.parameters()).detach(), tuple(norms)


def train_all(loops: list[Loop]) -> list[Any]:
    answers, usual = [], distributed.BUNDLED_BYTES
    for loop in loops:
        distributed.BUNDLED_BYTES = 0 if loop.travels_alone else usual
        answers.append(train(loop))
    distributed.BUNDLED_BYTES = usual
    return answers


def assert_as_alone(loops: list[Loop], world: int) -> None:
    answers = processes.run(world, train_all, loops)
    for index, loop in enumerate(loops):
        params, norms = alone(loop.weighted, loop.sizes, loop.is_frozen, world)
        for rank in range(world):
            given, lengths = answers[rank][index]
            assert_close(given, params, "model", f"{loop}, rank {rank}")
            assert_same_bits(given, answers[0][index][0], f"{loop}, ranks 0 and {rank}")
            assert_same_bits(given[-NEVER:], parameters_to_vector(Net().never.parameters()), f"{loop}, never used")
            assert lengths == pytest.approx(norms, rel=1e-5), f"{loop}, rank {rank}"
            assert lengths == answers[0][index][1], f"{loop}, ranks 0 and {rank}"


KINDS = [  # (weighted, last, by)
    *itertools.product((True, False), (True, False), ("accumulate",)),
    (True, False, "backward"),
    (True, True, "backward"),
]
DDP = [
    {"gradient_as_bucket_view": view, "static_graph": static, "find_unused_parameters": unused}
    for view, static, unused in itertools.product((False, True), repeat=3)
    if not (static and unused)  # of which torch warns: the one finds what the other does
]


@pytest.mark.parametrize("no_sync", ["never", "all but the last", "all"])
@pytest.mark.parametrize(("weighted", "last", "by"), KINDS)
def test_ddp_gives_what_one_process_with_all_batches_does(weighted: bool, last: bool, by: str, no_sync: str) -> None:
    loops = []
    for options in DDP:
        is_frozen = not (options["find_unused_parameters"] or options["static_graph"] or no_sync == "all")
        loops.append(Loop(options, no_sync, weighted, last, by, is_frozen=is_frozen))
    assert_as_alone(loops, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_other_loops_give_what_one_process_with_all_batches_does(world: int) -> None:
    plain, quiet = Loop(ddp=None), Loop(no_sync="all")
    frozen = Loop(is_frozen=True)
    loops = [
        *[replace(plain, weighted=weighted, last=last) for weighted in (True, False) for last in (True, False)],
        *[replace(plain, by="backward", last=last, releases=True) for last in (True, False)],
        replace(plain, weighted=False, releases=True),
        *[replace(quiet, by="backward", last=last, releases=True) for last in (True, False)],
        replace(quiet, sizes=HOLES, by="backward", releases=True),
        *[replace(kind, sizes=sizes, travels_alone=True) for kind in (plain, quiet) for sizes in (EVEN, HOLES, ABSENT)],
        *[replace(kind, sizes=HOLES, last=True, travels_alone=True) for kind in (plain, quiet)],
        replace(plain, weighted=False, travels_alone=True),
        replace(plain, by="backward", releases=True, travels_alone=True),
        *[replace(kind, sizes=sizes) for kind in (plain, quiet) for sizes in (UNEVEN, HOLES, ABSENT)],
        *[replace(kind, sizes=sizes, last=True) for kind in (plain, quiet) for sizes in (UNEVEN, HOLES, ABSENT)],
        *[replace(kind, sizes=UNEVEN, weighted=False) for kind in (plain, quiet)],
        *[replace(kind, sizes=HOLES, by="backward") for kind in (plain, quiet)],
        *[replace(kind, sizes=ONE, weighted=False, by="step") for kind in (plain, frozen)],
        *[replace(frozen, weighted=False, last=last, reduced_by_ddp=True) for last in (True, False)],
        frozen,
    ]
    assert_as_alone(loops, world)


def reduced_by_ddp() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a worker: what steps on DDP's gradients have made, and the same steps of a model that nobody has wrapped."""
    model, lone, loop = Net(), Net(), Loop(is_frozen=True)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizers = [af.AdamW(net.parameters(), lr=0.1, max_grad_norm=MAX_NORM) for net in (model, lone)]
    for step in range(STEPS):
        loop.loss(wrapped, step, dist.get_rank(), 0).backward()
        for param, twin in zip(model.parameters(), lone.parameters(), strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return everything(optimizers[0]), everything(optimizers[1])


def test_a_step_on_gradients_that_ddp_has_reduced_is_that_of_one_process() -> None:
    answers = processes.run(2, reduced_by_ddp)
    for together, lone in answers:
        assert together.keys() == lone.keys() == answers[0][0].keys()
        for name, value in together.items():
            assert_same_bits(value, lone[name], name)
            assert_same_bits(value, answers[0][0][name], f"{name}, between ranks")


# ---- what travels --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Dtype and bytes of each all-reduce that Python starts."""
    calls: list[tuple[torch.dtype, int]] = []
    all_reduce = dist.all_reduce

    def watch(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((tensor.dtype, tensor.nbytes))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = watch
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def gradients(rank: int, index: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values.to(dtype) for values in random_grads(random_params(SHAPES), 10 * rank + index)]


SHAPES = [(64, 33), (130,), (), (17, 3)]


def send(micro_batches: int, last: bool, reduce_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, list[Any]]:
    """In a worker: parameters before and after a window, and what was reduced in it."""
    params = random_params(SHAPES)
    optimizer = af.SGD(params, lr=1.0, process_group=dist.group.WORLD, reduce_dtype=reduce_dtype)
    before = parameters_to_vector(params).detach()
    with watched() as calls:
        for index in range(micro_batches):
            set_grads(params, gradients(dist.get_rank(), index))
            optimizer.accumulate(last=last and index == micro_batches - 1)
        optimizer.step()
    return before, parameters_to_vector(params).detach(), calls


def send_all(windows: list[tuple[Any, ...]]) -> list[Any]:
    return [send(*window) for window in windows]


def test_gradients_travel_once_a_window_in_the_dtype_that_was_asked_for() -> None:
    numel = sum(math.prod(shape) for shape in SHAPES)
    wires: tuple[torch.dtype | None, ...] = (None, torch.float32, torch.bfloat16)
    windows = list(itertools.product((1, 2, 5), (True, False), wires))
    answers = processes.run(2, send_all, windows)
    for index, (micro_batches, last, wire) in enumerate(windows):
        sums = []
        for rank in range(2):
            parts = [torch.cat([g.flatten() for g in gradients(rank, i)]) for i in range(micro_batches)]
            sums.append(functools.reduce(torch.add, parts))
        if last:  # divided before it travels, which is exact here
            sums = [total / 2 for total in sums]
        dtype = wire or torch.float32
        mean = (sums[0].to(dtype) + sums[1].to(dtype)).float() / (1 if last else 2)
        for before, after, calls in (answers[0][index], answers[1][index]):
            assert_same_bits(after, before - mean, f"{micro_batches} micro-batches, last={last}, {wire}")
            assert [kind for kind, _ in calls] == [torch.float64, dtype]
            assert calls[0][1] == 8 * (4 + len(SHAPES))
            assert numel <= calls[1][1] / dtype.itemsize < numel + 32 * len(SHAPES)  # with the gaps between them


HALVES = [  # accumulators, reduce_dtype, by how much a weight may be off: a few roundings of numbers up to 4, times lr
    (torch.float32, None, 2e-6),
    (torch.float32, torch.bfloat16, 0.005),
]


def halves(accumulators: torch.dtype, wire: torch.dtype | None, last: bool) -> tuple[Tensor, Tensor]:
    """In a worker: the fp32 values of bf16 parameters, before and after a window."""
    model = torch.nn.ParameterList([values.detach().bfloat16() for values in random_params(SHAPES)])
    optimizer = af.SGD(
        model.parameters(), lr=0.1, master_weights="split16", process_group=dist.group.WORLD, rounding_seed=3,
        reduce_dtype=wire,
    )  # fmt: skip
    before = parameters_to_vector(model.parameters()).detach().float()
    for index, weight in enumerate(WEIGHTS[dist.get_rank()]):
        set_grads(model.parameters(), gradients(dist.get_rank(), index, torch.bfloat16))
        optimizer.accumulate(weight, last=last and index == 2)
    optimizer.step()
    after = optimizer.full_precision_state_dict(model)
    return before, torch.cat([after[name].flatten() for name, _ in model.named_parameters()])


WEIGHTS = ([3, 1, 2], [5, 4, 1])


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("accumulators", "wire", "tolerance"), HALVES)
def test_parameters_in_16_bits(
    accumulators: torch.dtype, wire: torch.dtype | None, tolerance: float, last: bool
) -> None:
    answers = processes.run(2, halves, accumulators, wire, last)
    mean = torch.zeros(sum(math.prod(shape) for shape in SHAPES), dtype=torch.float64)
    for rank, weights in enumerate(WEIGHTS):
        for index, weight in enumerate(weights):
            values = torch.cat([g.flatten() for g in gradients(rank, index, torch.bfloat16)]).double()
            mean += values * weight / sum(map(sum, WEIGHTS))
    for before, after in answers:
        error = (after.double() - (before.double() - 0.1 * mean)).abs()
        assert float(error.max()) < tolerance
        assert float(error.mean()) < tolerance / 5
        assert_same_bits(after, answers[0][1], "between ranks")


# ---- one decision --------------------------------------------------------------------------------------------------

STOCK, OURS = torch.amp.GradScaler, af.GradScaler
DECISIONS: dict[str, tuple[Any, ...]] = {  # scaler, how a window ends, whether scaler.unscale_ and torch clip before
    "a stock scaler": (STOCK, "closed", False),
    "a stock scaler that unscales first": (STOCK, "closed", True),
    "our scaler": (OURS, "open", False),
    "our scaler, closed": (OURS, "closed", False),
    "our scaler that unscales first": (OURS, "closed", True),
    "our scaler, step() alone": (OURS, "none", False),
    "no scaler": (None, "open", False),
    "no scaler, closed": (None, "closed", False),
    "no scaler, step() alone": (None, "none", False),
}


def decide(kind: str, bad: float) -> list[Any]:
    """In a worker: scale, skipped steps, what has changed, and parameters, after each window; rank 1 has a bad one."""
    scaler_class, ends, unscales = DECISIONS[kind]
    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = af.AdamW(model.parameters(), lr=0.1, max_grad_norm=None if unscales else MAX_NORM)
    af.attach_ddp(wrapped, optimizer)
    scaler = (scaler_class or STOCK)("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaler_class is not None)
    told = []
    for step in range(4):
        for index in range(1 if ends == "none" else 2):
            scaler.scale(Loop().loss(wrapped, step, dist.get_rank(), index)).backward()
            if step == 1 and dist.get_rank() == 1 and index == 0:
                assert model.first.weight.grad is not None
                model.first.weight.grad[2, 3] = bad
            if ends != "none":
                optimizer.accumulate(last=ends == "closed" and index == 1)
        before = snapshot(optimizer)
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        changed = [n for n in differences(before, snapshot(optimizer)) if n.startswith(("param", "state"))]
        steps = [float(entry["step"]) for entry in optimizer.state.values() if entry]
        told.append(
            (scaler.get_scale(), int(optimizer.skipped_steps), changed, steps, parameters_to_vector(model.parameters()))
        )
        scaler.update()
        optimizer.zero_grad()
    return [(*rest, params.detach()) for *rest, params in told]


def decide_all(bad: float) -> list[Any]:
    return [decide(kind, bad) for kind in DECISIONS]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_processes_skip_together_and_go_on_together(bad: float) -> None:
    answers = processes.run(2, decide_all, bad)
    for index, (kind, (scaler, _, _)) in enumerate(DECISIONS.items()):
        windows = [answer[index] for answer in answers]
        for step, (own, other) in enumerate(zip(*windows, strict=True)):
            assert own[:-1] == other[:-1], f"{kind}, step {step}"
            assert_same_bits(own[-1], other[-1], f"{kind}, step {step}")
            assert bool(own[2]) == (step != 1), f"{kind}, step {step}: {own[2]}"
            assert set(own[3]) == {float(step + (step < 1))}, f"{kind}, step {step}"
            assert own[1] == (1 if step > 0 and scaler is not STOCK else 0), f"{kind}, step {step}"
        scales = [window[0] for window in windows[0]]
        assert scales == ([1.0] * 4 if scaler is None else [2.0**10, 2.0**10, 2.0**9, 2.0**9]), kind
