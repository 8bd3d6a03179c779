"""Fused linear layers in several processes: added up once per window, or left alone."""

from __future__ import annotations

import contextlib
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from spread import Net, loss_of, sharded
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.loop import linears

LAYERS = ["first", "second", "sometimes", "never"]
ROWS = ((3, 5, 2), (4, 1, 6))  # of each micro-batch, by rank


def fused(over: str, releases: bool = False) -> tuple[Any, Any, Any]:
    linears.SMALLEST = 1
    model: Any = Net()
    if over == "attached":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    group = dist.group.WORLD if over == "group" else None
    optimizer = af.SGD(model.parameters(), lr=0.5, process_group=group)
    if over == "attached":
        af.attach_ddp(model, optimizer)
    if releases:
        af.release_gradients(optimizer, 1)
    return model, optimizer, af.fuse_linears(model, optimizer)


def trained(over: str, last: bool, releases: bool) -> list[Tensor]:
    """Parameters after a window of unequal micro-batches, and one layer that only rank 0 uses."""
    model, optimizer, handle = fused(over, releases)
    prefix = "module." if over == "attached" else ""
    assert handle.fused == [prefix + name for name in LAYERS]
    rank = dist.get_rank()
    with model.no_sync() if over == "attached" else contextlib.nullcontext():
        for number, rows in enumerate(ROWS[rank]):
            loss = loss_of(model, rows, 10 * rank + number, rank == 0)
            optimizer.backward(loss, rows, last=last and number == 2)
            assert all((p.grad is None) is (not (last and number == 2) or "never" in n) for n, p in named(model)), (
                number
            )
    optimizer.step()
    return [param.detach() for param in model.parameters()]


def named(model: Any) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


@pytest.mark.parametrize("over", ["attached", "group"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("releases", [False, True])
def test_processes_add_up_what_their_layers_added(over: str, last: bool, releases: bool) -> None:
    found = processes.agreed(2, trained, over, last, releases)
    exact = Net(torch.float64)
    for rank, sizes in enumerate(ROWS):
        for number, rows in enumerate(sizes):
            (loss_of(exact, rows, 10 * rank + number, rank == 0, torch.float64) * rows).backward()
    for param, value in zip(exact.parameters(), found, strict=True):
        grad = 0 if param.grad is None else param.grad / sum(map(sum, ROWS))
        assert_close(value, param.detach() - 0.5 * grad, "model")


def refusals() -> list[str]:
    """What is raised without a group, and by backward() outside no_sync()."""
    said = []
    for over in ("none", "attached"):
        try:
            model, optimizer, _ = fused(over)
            loss_of(model, 3, 0).backward()
        except RuntimeError as error:
            said.append(str(error))
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, 3, 0).backward()
    optimizer.accumulate()
    return said


def test_a_reduction_of_somebody_elses_is_refused() -> None:
    without, outside = processes.agreed(2, refusals)
    assert "more than one process and no process_group" in without
    assert "do not call release_gradients() or fuse_linears()" in without
    assert "run forward and backward within ddp.no_sync()" in outside


def spread() -> list[Any]:
    linears.SMALLEST = 1
    model = sharded(Net())
    optimizer = af.SGD(model.parameters(), lr=0.5)
    handle = af.fuse_linears(model, optimizer)
    optimizer.backward(loss_of(model, 3, 0))
    optimizer.step()
    return [handle.fused, handle.left, *(param.full_tensor() for param in model.parameters())]


def test_fully_sharded_layers_are_left_alone() -> None:
    found, left, *values = processes.agreed(2, spread)
    assert found == []
    assert left == dict.fromkeys(
        LAYERS, "its weight is spread over processes, which reduce its gradient after backward"
    )
    exact = Net(torch.float64)
    loss_of(exact, 3, 0, dtype=torch.float64).backward()
    for param, value in zip(exact.parameters(), values, strict=True):
        assert_close(value, param.detach() - 0.5 * (0 if param.grad is None else param.grad), "model")
