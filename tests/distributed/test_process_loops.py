"""Processes with a batch each, in loops of every kind, held to one process in float64 with all batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any
from unittest import mock

import inside
import oracle
import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from spread import Net, loss_of, mesh_over, sharded, tensor_parallel, whole
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import accumfused as af
from accumfused.loop import linears

STEPS = 2  # the second one has momentum, and what the first one has left
DECAY = 0.5  # of the noise scale's means
SCALE = 2.0**10
LAYERS = ["first", "second", "sometimes", "never"]
OPTIONS: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}  # a gradient of another length shows
MAX_NORM = 0.5  # some steps are clipped, some are not
SIZES = {  # rows of each micro-batch, by rank
    "even": ((3, 5, 2), (1, 4, 6), (6, 2, 2), (2, 7, 1)),
    "uneven": ((3, 5, 2), (4,), (6, 2), (2, 7, 1)),
    "holes": ((3, 5, 2), (4, 0, 6), (0, 2, 2), (0, 7, 1)),  # an empty batch: its loss is NaN, and its weight 0
    "absent": ((3, 5), (), (2,), (1,)),  # one has no micro-batch at all
    "one": ((3,), (1,), (6,), (2,)),
    "zeros": ((3, 5), (0, 0), (6, 2), (0, 7)),  # for weights within the loss, which is 0 of an empty batch
}
DDP: dict[str, dict[str, bool]] = {
    "ddp": {}, "static": {"static_graph": True}, "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "reduced": {"find_unused_parameters": True},  # by DDP: grads_are_reduced=True
}  # fmt: skip
# How many of its processes differ; "divided": parameters are whole within a window, docs/guide/distributed.md.
SPREAD = {"fully_shard": None, "divided": None, "hsdp": None, "tensor parallel": 1, "both": 2}
CLOSES = {  # weighted, last=True, by which call
    "weights": (True, False, "accumulate"), "weights, last": (True, True, "accumulate"),
    "sums": (False, False, "accumulate"), "sums, last": (False, True, "accumulate"),
    "backward": (True, False, "backward"), "backward, last": (True, True, "backward"),
    "step": (False, False, "step"),  # nothing but step()
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """How a model is trained in each process."""

    over: str = "group"  # process_group alone, or as named in DDP or SPREAD
    closes: str = "weights"
    sizes: str = "even"
    quiet: str = "never"  # or "all", "all but the last": under no_sync(), set_requires_gradient_sync(False)
    processes: int = 2
    releases: bool = False
    travels_alone: bool = False  # every parameter is reduced by itself and in pieces, as large ones are
    scaler: str = "none"
    clips: str = "step"  # "torch": clip_grad_norm_ between window and step; "together": two optimizers by one norm
    backend: str = "auto"
    linears: bool = False  # the layers add to the sums themselves
    noise: bool = False  # the noise scale is measured
    reduce_dtype: Any = None

    @property
    def uses_all(self) -> bool:
        """Also of `sometimes`, and `never` is frozen: a DDP that looks for no unused layer wants it so."""
        return self.over in ("reduced", *SPREAD) or (self.over in ("ddp", "views") and self.quiet != "all")

    def lawful(self) -> Loop:
        """The nearest loop that is none of those that are refused, or cannot be."""
        loop, reduced = self, self.over in ("reduced", *SPREAD)
        if loop.over in ("hsdp", "both"):
            loop = replace(loop, processes=4)
        if loop.over in ("tensor parallel", "both") and "torch" in (loop.clips, loop.scaler):  # which takes one mesh
            loop = replace(loop, clips="step", scaler="ours")
        if loop.over == "tensor parallel":  # whose other layers are plain, and in no process group
            loop = replace(loop, linears=False)
        if loop.over in ("static", "reduced"):  # its first backward() is outside no_sync(), or DDP reduces them all
            loop = replace(loop, sizes="even", releases=False, linears=False)
        if loop.closes == "step":
            scaler = loop.scaler if reduced else "none"
            loop = replace(loop, sizes="one", quiet="never", releases=False, clips="step", scaler=scaler, linears=False)
        if reduced:
            sizes = loop.sizes if loop.sizes in ("even", "one") else "zeros" if loop.over in SPREAD else "even"
            loop = replace(loop, sizes=sizes, releases=False, closes=loop.closes.replace("weights", "backward"))
        if loop.clips == "together":
            closes = loop.closes.replace("backward", "sums" if reduced else "weights")
            scaler = "ours" if loop.scaler != "none" else "none"
            loop = replace(loop, releases=False, closes=closes, scaler=scaler, linears=False)
        if loop.clips == "torch" or loop.scaler == "torch":
            closes = loop.closes if loop.closes == "step" or CLOSES[loop.closes][1] else f"{loop.closes}, last"
            loop = replace(loop, closes=closes, sizes="holes" if loop.sizes == "absent" else loop.sizes)
        if loop.sizes in ("holes", "zeros") and not CLOSES[loop.closes][0]:
            loop = replace(loop, sizes="even" if reduced else "uneven")
        if loop.releases or loop.linears:
            loop = replace(loop, closes=loop.closes.replace("weights", "backward"))
        if loop.over in DDP and (loop.releases or loop.linears or loop.sizes in ("uneven", "holes", "absent")):
            loop = replace(loop, quiet="all")
        if loop.over in ("group", "reduced", "tensor parallel", "both") or (reduced and loop.quiet == "all"):
            loop = replace(loop, quiet="never")
        return replace(loop, quiet="all but the last") if loop.over == "divided" else loop


AXES: dict[str, tuple[Any, ...]] = {
    "closes": tuple(CLOSES), "quiet": ("never", "all but the last", "all"), "scaler": ("none", "ours", "torch"),
    "clips": ("step", "torch", "together"), "linears": (False, True),
}  # fmt: skip
PLAIN = AXES | {
    "over": ("group", *DDP), "sizes": ("even", "uneven", "holes", "absent"), "releases": (False, True),
    "travels_alone": (False, True),
}  # fmt: skip
PARTS = AXES | {"over": tuple(SPREAD), "sizes": ("zeros", "even"), "backend": ("auto", "reference")}


def covering(axes: dict[str, tuple[Any, ...]]) -> list[Loop]:
    """Few lawful loops, in which every two values of two axes meet that meet in any lawful loop.

    The last one of some kinds is trained by 4 processes, the others by 2 where these will do.
    """
    draw = random.Random(0)
    drawn = [Loop(**{axis: draw.choice(values) for axis, values in axes.items()}).lawful() for _ in range(1500)]
    pairs = {loop: set(itertools.combinations(asdict(loop).items(), 2)) for loop in drawn}
    left, chosen = set[Any]().union(*pairs.values()), list[Loop]()
    while left:
        chosen.append(max(pairs, key=lambda loop: len(pairs[loop] & left)))
        left -= pairs[chosen[-1]]
    by_four = {loop.over: loop for loop in chosen if loop.over in ("group", "ddp", "fully_shard", "tensor parallel")}
    return [replace(loop, processes=4) if loop is by_four.get(loop.over) else loop for loop in chosen]


NOISE = [Loop(noise=True, **axes) for axes in (
    {}, {"closes": "weights, last", "sizes": "uneven"}, {"closes": "backward", "sizes": "holes"}, {"sizes": "absent"},
    {"closes": "sums, last", "sizes": "absent"}, {"closes": "sums, last", "sizes": "uneven", "releases": True},
    {"over": "ddp", "quiet": "all", "closes": "sums"}, {"over": "ddp", "quiet": "all", "sizes": "one"},
    {"over": "ddp", "quiet": "all", "sizes": "one", "closes": "step"},
    {"over": "ddp", "quiet": "all", "closes": "backward, last", "releases": True, "scaler": "ours"},
    {"over": "ddp", "quiet": "all", "closes": "weights, last", "scaler": "torch", "clips": "torch"},
    {"closes": "weights, last", "reduce_dtype": torch.bfloat16},
    {"closes": "weights, last", "backend": "torch"},
    {"sizes": "uneven", "closes": "weights, last", "backend": "reference", "scaler": "torch", "clips": "torch"},
    {"over": "reduced", "closes": "sums"}, {"over": "fully_shard", "closes": "sums, last"},
)]  # fmt: skip


Part = tuple[int, float, Tensor]  # a micro-batch: its number in its process, its weight and its gradient


@functools.cache
def alone(weighted: bool, sizes: str, uses_all: bool, ranks: int) -> tuple[Tensor, list[float], list[list[Part]]]:
    """The same training by one process, by torch alone and in float64: parameters, and norm and parts of each step."""
    model, norms, windows = Net(torch.float64), list[float](), list[list[Part]]()
    params = [param for layer in LAYERS[:-1] for param in model.get_submodule(layer).parameters()]
    before = parameters_to_vector(params).detach()
    optimizer = torch.optim.SGD(params, **OPTIONS)
    for step in range(STEPS):
        parts = []
        for rank, own in enumerate(SIZES[sizes][:ranks]):
            for index, rows in ((index, rows) for index, rows in enumerate(own) if rows):
                loss = loss_of(model, rows, 1000 * step + 10 * rank + index, rank == 0 or uses_all, torch.float64)
                grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
                parts.append((index, float(rows) if weighted else 1.0, parameters_to_vector(grads)))
        mean: Any = sum(weight * grad for _, weight, grad in parts)
        mean = mean / (sum(weight for _, weight, _ in parts) if weighted else ranks)
        for param, grad in zip(params, mean.split([param.numel() for param in params]), strict=True):
            param.grad = grad.view_as(param).clone()
        norms.append(float(clip_grad_norm_(params, MAX_NORM)))
        optimizer.step()
        windows.append(parts)
    assert float((parameters_to_vector(params).detach() - before).abs().mean()) > 0.01, (
        "a loop that does nothing would pass"
    )
    return parameters_to_vector(model.parameters()).detach(), norms, windows


def noise_of(loop: Loop, windows: list[list[Part]]) -> tuple[float, float]:
    """Signal and noise in float64."""
    found = []
    for parts in windows:
        ranks = 2
        if loop.over in ("reduced", *SPREAD):  # a micro-batch is the mean of those of all processes
            ranks, numbers = 1, {index for index, *_ in parts}
            parts = [(i, 1.0, torch.stack([g for j, _, g in parts if i == j]).mean(0)) for i in numbers]
        # Without weights a window is a sum of micro-batches, and the mean of processes: all of them are of weight 1.
        factor = 1.0 if CLOSES[loop.closes][0] else len(parts) / ranks
        weights = torch.tensor([weight for _, weight, _ in parts], dtype=torch.float64)
        found.append((torch.stack([grad for *_, grad in parts]) * factor, weights))
    return oracle.noise_scale(found, DECAY)


def wrapped(loop: Loop, model: Net) -> Any:
    model.never.requires_grad_(not loop.uses_all)
    if loop.over in DDP:
        return DistributedDataParallel(model, **DDP[loop.over])
    if loop.over in ("group", "tensor parallel"):
        return model if loop.over == "group" else tensor_parallel(model, mesh_over())
    mesh = mesh_over(2, 2) if loop.over in ("hsdp", "both") else mesh_over()
    if loop.over == "both":
        return sharded(tensor_parallel(model, mesh["b"]), mesh["a"])
    return sharded(model, mesh, reshard_after_forward=False if loop.over == "divided" else None)


def optimizers_of(loop: Loop, model: Net, outer: Any) -> tuple[list[af.SGD], list[Any]]:
    """Returns: the optimizers, and what steps them."""
    params, settings = list(model.parameters()), dict[str, Any](OPTIONS, backend=loop.backend)
    if loop.over in ("reduced", "tensor parallel"):
        settings["grads_are_reduced"] = True
    elif loop.over == "group":
        settings |= {"process_group": dist.group.WORLD, "reduce_dtype": loop.reduce_dtype}
    settings["noise_scale"] = DECAY if loop.noise else False
    if loop.clips == "together":
        optimizers = [af.SGD(own, **settings) for own in (params[::2], params[1::2])]
        steppers = [af.ClipGroup(optimizers, MAX_NORM)]
    else:
        steppers = optimizers = [af.SGD(params, **settings, max_grad_norm=MAX_NORM if loop.clips == "step" else None)]
    if loop.over in DDP and loop.over != "reduced":
        af.attach_ddp(outer, *optimizers)
    return optimizers, steppers


def loss_in(loop: Loop, model: Any, step: int, rank: int, index: int) -> Tensor:
    rows = SIZES[loop.sizes][rank][index]
    loss = loss_of(model, rows, 1000 * step + 10 * rank + index, rank == 0 or loop.uses_all)
    return loss if rows or loop.sizes == "holes" else loss.nan_to_num(0.0)


def quietly(loop: Loop, model: Any, is_first: bool, is_last: bool) -> Any:
    """A backward() under no_sync(), where the loop has it so."""
    quiet = loop.quiet == "all" or (loop.quiet == "all but the last" and not is_last)
    if loop.over in SPREAD and loop.quiet != "never":
        model.set_requires_gradient_sync(not quiet)
        if loop.over == "divided":
            model.set_reshard_after_backward(not quiet)
    is_looked_at = is_first and loop.over == "static"  # by torch, without no_sync()
    return model.no_sync() if loop.over in DDP and quiet and not is_looked_at else contextlib.nullcontext()


@mock.patch.object(linears, "SMALLEST", 1)
def fuse_linears(loop: Loop, model: Any, optimizer: Any) -> None:
    """Lets the layers add to the sums; those that are spread are left alone."""
    handle = af.fuse_linears(model, optimizer)
    fused = [] if loop.over in SPREAD else LAYERS
    assert [name.removeprefix("module.") for name in handle.fused] == fused
    reason = "its weight is spread over processes, which reduce its gradient after backward"
    assert handle.left == dict.fromkeys(LAYERS[len(fused) :], reason)


def train(loop: Loop) -> tuple[Tensor, list[float], Any]:
    """In a worker: the same by the processes together; and the noise scale."""
    model, norms = Net(), []
    outer = wrapped(loop, model)
    optimizers, steppers = optimizers_of(loop, model, outer)
    scaler = (torch.amp if loop.scaler == "torch" else af).GradScaler("cpu", SCALE, enabled=loop.scaler != "none")
    scaler.scale(torch.ones(()))  # also where no micro-batch will do it
    weighted, last, by = CLOSES[loop.closes]
    rank = {None: dist.get_rank(), 1: 0, 2: dist.get_rank() // 2}[SPREAD.get(loop.over)]
    own = SIZES[loop.sizes][rank]
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside.sizes_on_the_way(0, 64) if loop.travels_alone else contextlib.nullcontext())
        for optimizer in optimizers if loop.releases else ():
            stack.enter_context(af.release_gradients(optimizer, bucket_bytes=100))
        if loop.linears:
            fuse_linears(loop, outer, *optimizers)
        for step in range(STEPS):
            for index, rows in enumerate(own):
                is_last, weight = index == len(own) - 1, rows if weighted else None
                brings_none = loop.over in SPREAD and loop.quiet == "all but the last" and not is_last
                with quietly(loop, outer, step == index == 0, is_last):
                    loss = scaler.scale(loss_in(loop, outer, step, rank, index))
                    if by == "backward":
                        optimizers[0].backward(loss, weight, last and is_last)
                        assert (last and is_last) or brings_none or all(p.grad is None for p in model.parameters())
                    else:
                        loss.backward()
                for optimizer in optimizers if by == "accumulate" and not brings_none else ():
                    optimizer.accumulate(weight, last=last and is_last)
            if loop.clips == "torch":
                scaler.unscale_(optimizers[0])
                norms.append(float(whole(clip_grad_norm_(model.parameters(), MAX_NORM))))
            for stepper in steppers:
                scaler.step(stepper)
            scaler.update()
            if loop.clips != "torch":
                norms.append(float(optimizers[0].grad_norm))
                assert float(optimizers[-1].grad_norm) == norms[-1]
            if by == "step" and loop.over in ("reduced", *SPREAD):
                model.zero_grad()
            assert all(param.grad is None for param in model.parameters())
    assert not any(param in optimizer.state for param in model.never.parameters() for optimizer in optimizers)
    noise = optimizers[0].noise_scale() if loop.noise else None
    found = noise and [float(each) for each in (noise.noise_scale, noise.signal, noise.noise, noise.windows)]
    return torch.cat([whole(param).flatten() for param in model.parameters()]), norms, found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not where a worker imports this module: the search takes a third of a second."""
    loops = covering(PLAIN) + covering(PARTS) + NOISE
    metafunc.parametrize("loop", loops, ids=lambda loop: "-".join(map(str, astuple(loop))))


def test_processes_give_what_one_process_with_all_batches_does(loop: Loop) -> None:
    params, norms, noise = processes.agreed(loop.processes, train, loop)
    ranks = SPREAD.get(loop.over) or loop.processes
    expected, lengths, windows = alone(CLOSES[loop.closes][0], loop.sizes, loop.uses_all, ranks)
    if loop.reduce_dtype is None:
        assert_close(params, expected, "model")
        assert norms == pytest.approx(lengths, rel=1e-5)
    if loop.noise:
        signal, spread = noise_of(loop, windows)
        unscaled = SCALE**2 if loop.scaler == "torch" else 1.0  # it has unscaled gradients without a word
        rel = 1e-2 if loop.reduce_dtype else 1e-5  # the sums are rounded to bf16, and their squares are differences
        scale = spread / signal if signal > 0 else math.inf
        assert noise == pytest.approx([scale, signal * unscaled, spread * unscaled, STEPS], rel=rel)
