"""An audit of several processes: the large batch is that of all of them."""

from __future__ import annotations

from typing import Any

import audited_loops
import processes
import pytest
import torch
import torch.distributed as dist
from audited_loops import K, Language, token_loss, tokens
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import accumfused as af


def unequal(rank: int) -> list[tuple[Tensor, Tensor]]:
    """The second process has more tokens."""
    return [(x, y if rank else y.where(torch.arange(12) < 2, -100)) for x, y in tokens(2 * K, seed=rank)]


def fused() -> Any:
    model = DistributedDataParallel(Language())
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1, process_group=dist.group.WORLD)
    af.attach_ddp(model, optimizer)
    group = dist.group.WORLD
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=group) as report:
        for (x, y), last in af.windows(unequal(dist.get_rank()), K):
            token_loss(model, x, y).backward()
            optimizer.accumulate(weight=(y != -100).sum())
            if last:
                optimizer.step()
    return report


def summed() -> Any:
    """Each process divides by the tokens of all, and undoes DDP's division by the number of processes."""
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = unequal(dist.get_rank())
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=dist.group.WORLD) as report:
        for start in range(0, len(batches), K):
            window = batches[start : start + K]
            count = torch.stack([(y != -100).sum() for _, y in window]).sum()
            dist.all_reduce(count)
            for x, y in window:
                (token_loss(model, x, y, "sum") * dist.get_world_size() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def alone() -> Any:
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer) as report:
        for x, y in tokens(2):
            token_loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def test_processes_with_other_counts_and_the_same_weight_are_named() -> None:
    assert [report.names for report in processes.run(2, audited_loops.ranks_of_one)] == [["ranks"]] * 2


@pytest.mark.parametrize("loop", [fused, summed])
def test_processes_that_weigh_their_tokens_alike_are_sound(loop: Any) -> None:
    for report in processes.run(2, loop):
        assert report.matches, str(report)
        assert max(step.difference for step in report.steps) < 1e-5


def test_without_a_group_gradients_are_not_compared_and_a_note_says_so() -> None:
    for report in processes.run(2, alone):
        assert report.causes == []
        assert any("process_group=" in note for note in report.notes)
