"""Sums in bf16 over several processes: what travels, whose noise it is, and replicas that stay the same."""

from __future__ import annotations

import contextlib
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from spread import Net, adamw, loss_of, mesh_over, sharded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import accumfused as af
from accumfused.formats.shards import local

BF16 = torch.bfloat16
ELEMENTS, MICRO_BATCHES = 50_000, 16


def gradient(rank: int, number: int) -> Tensor:
    return (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * rank + number)) + 0.3).bfloat16()


def add_up(wire: torch.dtype | None) -> tuple[list[float], list[int]]:
    """In a worker: the relative error of a window's mean, that along the mean, and the gradients' own bits."""
    param = nn.Parameter(torch.zeros(ELEMENTS, dtype=BF16))
    settings: dict[str, Any] = {"process_group": dist.group.WORLD, "reduce_dtype": wire, "rounding_seed": 7}
    optimizer = af.SGD([param], lr=1.0, sum_dtype=BF16, **settings)
    size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(MICRO_BATCHES):
        param.grad = gradient(rank, number)
        optimizer.accumulate(last=number == MICRO_BATCHES - 1)
    assert param.grad is not None
    truth = torch.stack([gradient(r, n).double() for r in range(size) for n in range(MICRO_BATCHES)]).sum(0) / size
    error = param.grad.double() - truth
    along = float((error * truth).sum() / truth.square().sum())
    return [float(error.norm() / truth.norm()), along], param.grad.view(torch.int16).tolist()


@pytest.mark.parametrize("wire", [None, torch.float32, BF16])
def test_the_sum_over_processes_is_near_and_unbiased_and_the_same_in_all(wire: torch.dtype | None) -> None:
    (error, along), _ = processes.agreed(4, add_up, wire)
    assert error < 8e-3
    assert abs(along) < 2e-4


def own_noise() -> list[int]:
    """In a worker: the bits of a sum of the same gradients in every process, before they are added up."""
    param = nn.Parameter(torch.zeros(ELEMENTS, dtype=BF16))
    optimizer = af.SGD([param], lr=1.0, sum_dtype=BF16, process_group=dist.group.WORLD)
    for number in range(4):
        param.grad = gradient(0, number)
        optimizer.accumulate()
    (accumulator,) = optimizer._engine.window.sums
    assert accumulator is not None
    optimizer.zero_grad()
    return accumulator.view(torch.int16).tolist()


def test_each_process_rounds_with_noise_of_its_own() -> None:
    one, other = processes.run(2, own_noise)
    differ = sum(a != b for a, b in zip(one, other, strict=True)) / ELEMENTS
    assert differ > 0.3


def train(over: str, windows: int) -> list[Any]:
    """In a worker: all parameters after so many windows of unequal numbers of micro-batches."""
    model = Net(BF16)
    outer: Any = model
    settings: dict[str, Any] = {"sum_dtype": BF16, "max_grad_norm": 1.0}
    if over == "hsdp":
        outer = sharded(model, mesh_over(2, 2))
    elif over == "group":
        settings["process_group"] = dist.group.WORLD
    optimizer = adamw(model, **settings)
    if over == "ddp":
        outer = DistributedDataParallel(model, find_unused_parameters=True)
        af.attach_ddp(outer, optimizer)
    for number in range(windows):
        for index in range(3 if over == "hsdp" else 2 + dist.get_rank() % 2):
            with outer.no_sync() if over == "ddp" else contextlib.nullcontext():
                loss = loss_of(outer, 3, 10 * number + index + 1000 * dist.get_rank(), index == 0, BF16)
                optimizer.backward(loss.float(), weight=3)
        dtypes = {s.dtype for s in optimizer._engine.window.sums if s is not None}
        assert dtypes == {BF16}
        optimizer.step()
    told = [local(param).detach().clone() for param in model.parameters()]
    if over != "hsdp":
        return told
    replicas = [torch.zeros_like(each) for each in told]
    for each, replica in zip(told, replicas, strict=True):  # rank r's shard is also that of rank r + 2, or r - 2
        everyone = [torch.zeros(each.numel() + 64, dtype=torch.float32) for _ in range(4)]
        mine = torch.zeros(each.numel() + 64)
        mine[: each.numel()] = each.flatten().float()
        sizes = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(sizes, torch.full((1,), float(each.numel())))
        if len({float(size) for size in sizes}) == 1:
            dist.all_gather(everyone, mine)
            replica.copy_(everyone[(dist.get_rank() + 2) % 4][: each.numel()].view_as(each))
            assert torch.equal(replica, each)
    return []


@pytest.mark.parametrize(("size", "over", "windows"), [(2, "group", 20), (2, "ddp", 10), (4, "hsdp", 10)])
def test_replicas_stay_bit_for_bit_the_same(
    size: int, over: str, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.agreed(size, train, over, windows)


def save_and_resume() -> list[Any]:
    """In a worker: an open window of shards goes on from a checkpoint."""
    models = [sharded(Net(BF16)) for _ in range(2)]
    one, other = (adamw(model, sum_dtype=BF16, rounding_seed=seed) for model, seed in zip(models, (1, 2), strict=True))
    for index in range(2):
        one.backward(loss_of(models[0], 3, index, True, BF16).float(), weight=3)
    with torch.no_grad():
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            mine.copy_(theirs)
    other.load_state_dict(tree_map_only(Tensor, torch.clone, one.state_dict()))
    for model, optimizer in zip(models, (one, other), strict=True):
        for index in range(2):
            optimizer.backward(loss_of(model, 3, 5 + index, True, BF16).float(), weight=3)
        optimizer.step()
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs))
    return []


def test_an_open_window_of_shards_goes_on_from_a_checkpoint() -> None:
    processes.agreed(2, save_and_resume)


def differ_later() -> list[str]:
    """In a worker: one process alone asks for sums of two bytes."""
    param = nn.Parameter(torch.zeros(8, dtype=BF16))
    dtype = BF16 if dist.get_rank() == 1 else None
    optimizer = af.SGD([param], lr=1.0, sum_dtype=dtype, process_group=dist.group.WORLD)
    param.grad = torch.ones_like(param)
    optimizer.accumulate()
    with pytest.raises(ValueError, match="sum_dtype is") as raised:
        optimizer.step()
    optimizer.zero_grad()
    return [str(raised.value)]


def test_all_processes_have_sums_of_one_dtype() -> None:
    processes.agreed(2, differ_later)
