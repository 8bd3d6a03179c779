"""An audit of several processes: the large batch is that of all of them."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from audited_loops import Batch, K, Language, count, end, ends, token_loss, tokens, total, update
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.integrations.audited import FirstSteps


def unequal(batches: list[Batch] | None = None) -> list[Batch]:
    """The second process has more tokens."""
    rank = dist.get_rank()
    return [(x, y if rank else y.where(torch.arange(12) < 2, -100)) for x, y in batches or tokens(2 * K, seed=rank)]


def ranks_of_one(has_group: bool) -> Any:
    """A process of DDP, which divides by the number of processes, whatever the number of their tokens."""
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = dist.group.WORLD if has_group else None
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=group) as report:
        for i, (x, y) in enumerate(unequal(tokens(1) * 2 * K)):
            with contextlib.nullcontext() if ends(i) else model.no_sync():
                (token_loss(model, x, y) / K).backward()
            end(optimizer, i)
    return report


def out_of_step(kind: str) -> Any:
    """no_sync() around other micro-batches than all but the last."""
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=dist.group.WORLD) as report:
        for i, (x, y) in enumerate(tokens(2 * K, seed=dist.get_rank())):
            with model.no_sync() if ends(i) or kind == "never" else contextlib.nullcontext():
                (token_loss(model, x, y) / K).backward()
            end(optimizer, i)
    return report


def fused() -> Any:
    model = DistributedDataParallel(Language())
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1, process_group=dist.group.WORLD)
    af.attach_ddp(model, optimizer)
    group = dist.group.WORLD
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=group) as report:
        for (x, y), last in af.windows(unequal(), K):
            token_loss(model, x, y).backward()
            optimizer.accumulate(weight=count(y))
            if last:
                optimizer.step()
    return report


def summed() -> Any:
    """Each process divides by the tokens of all, and undoes DDP's division by the number of processes."""
    model, batches = DistributedDataParallel(Language()), unequal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=dist.group.WORLD) as report:
        for i, (x, y) in enumerate(batches):
            everyones = total(batches, i)
            dist.all_reduce(everyones)
            (token_loss(model, x, y, "sum") * dist.get_world_size() / everyones).backward()
            end(optimizer, i)
    return report


class WithLoss(Language):
    """Returns its loss, as models of transformers do: DDP hides its graph behind a node that all outputs pass."""

    def forward(self, text: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(text)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def first_steps() -> list[str]:
    """What is logged of a training of five steps in each process, whose tokens differ."""
    logged: list[str] = []
    logger = logging.getLogger("accumfused")
    logger.addFilter(lambda record: logged.append(record.getMessage()) or False)
    logger.setLevel(logging.INFO)
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = FirstSteps()
    steps.begin(model.module, optimizer, 1)
    for x, y in unequal()[:5]:
        model(x, y)["loss"].backward()
        update(optimizer)
        steps.step()
    steps.end()
    logger.filters.clear()
    return logged


def test_processes_with_other_counts_and_the_same_weight_are_named() -> None:
    assert [report.names for report in processes.run(2, ranks_of_one, True)] == [["ranks"]] * 2


@pytest.mark.parametrize("kind", ["last", "never"])
def test_processes_that_step_with_gradients_of_their_own_are_named(kind: str) -> None:
    assert [report.names for report in processes.run(2, out_of_step, kind)] == [["unsynced"]] * 2


@pytest.mark.parametrize("loop", [fused, summed])
def test_processes_that_weigh_their_tokens_alike_are_sound(loop: Any) -> None:
    for report in processes.run(2, loop):
        assert report.matches, str(report)
        assert max(step.difference for step in report.steps) < 1e-5


def test_a_trainings_first_steps_are_compared_with_the_batches_of_all_processes_and_one_logs() -> None:
    (report,), none = processes.run(2, first_steps)
    assert none == []
    assert "\nranks (" in report
    assert "\n4 " in report
    assert "\n5 " not in report


def test_without_a_group_gradients_are_not_compared_and_the_report_says_so() -> None:
    for report in processes.run(2, ranks_of_one, False):
        assert (report.verdict, report.causes) == ("unknown", [])
        assert "process_group=" in str(report)
