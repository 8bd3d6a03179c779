"""States divided by `fully_shard`, parameters whole within a window: the loop of docs/distributed.md."""

from __future__ import annotations

from typing import Any

import processes
import torch
import torch.distributed as dist
from compare import assert_close
from spread import ADAMW, Net, adamw, loss_of, params_of, sharded, whole
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

STEPS, MAX_NORM = 3, 0.1
ROWS = ((3, 5), (1, 4))  # of the micro-batches of each rank
LAYERS = 3  # that are trained


def seed_of(step: int, rank: int, part: int) -> int:
    return 100 * step + 10 * rank + part


def train() -> tuple[list[Tensor], list[float], int]:
    """In a worker: parameters, norms, and how many elements a moment has here."""
    rank = dist.get_rank()
    model = sharded(Net(), reshard_after_forward=False)
    optimizer: Any = adamw(model, max_grad_norm=MAX_NORM)
    norms = []
    for step in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as window:
            for part, rows in enumerate(ROWS[rank]):
                last = part == len(ROWS[rank]) - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                optimizer.backward(loss_of(model, rows, seed_of(step, rank, part)), weight=rows)
        sent = {event.key: event.count for event in window.key_averages()}
        assert sent["c10d::_allgather_base_"] == sent["c10d::_reduce_scatter_base_"] == LAYERS, sent
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    own = sum(optimizer.state[param]["exp_avg"].to_local().numel() for param in params_of(optimizer))
    return [whole(param) for param in params_of(optimizer)], norms, own


def test_fully_shard_divides_states_and_gives_the_numbers_of_one_process() -> None:
    model, true_norms = Net(torch.float64), []
    model.never.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    stock = torch.optim.AdamW(params, **ADAMW)
    for step in range(STEPS):
        stock.zero_grad()
        for rank, micro_batches in enumerate(ROWS):
            for part, rows in enumerate(micro_batches):
                loss = loss_of(model, rows, seed_of(step, rank, part), dtype=torch.float64)
                (loss * rows / sum(map(sum, ROWS))).backward()
        true_norms.append(clip_grad_norm_(params, MAX_NORM))
        stock.step()
    answers = processes.run(2, train)
    for found, norms, _ in answers:
        for param, wanted in zip(found, params, strict=True):
            assert_close(param, wanted, "model")
        assert_close(torch.tensor(norms), torch.stack(true_norms), "model")
    sizes = [own for *_, own in answers]
    assert sum(sizes) == sum(param.numel() for param in params)
    assert max(sizes) < 0.7 * sum(sizes)
