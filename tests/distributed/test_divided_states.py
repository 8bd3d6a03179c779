"""States divided by `fully_shard`, parameters whole within a window: the loop of docs/distributed.md."""

from __future__ import annotations

import processes
import sharded_models as models
import torch
import torch.distributed as dist
from compare import assert_close
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import accumfused as af

MAX_NORM = 0.1
LAYERS = 3  # with parameters


def train() -> tuple[list[Tensor], list[float], int]:
    """In a worker: parameters, norms, and how many elements a moment has here."""
    counts = models.COUNTS[dist.get_rank()]
    model = models.sharded(models.small_model(), reshard_after_forward=False)
    optimizer = af.AdamW(model.parameters(), **models.ADAMW, max_grad_norm=MAX_NORM)
    norms = []
    for step in range(models.STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as window:
            for part, count in enumerate(counts):
                last = part == len(counts) - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                optimizer.backward(models.loss_of(model, step, part, dist.get_rank(), count), weight=count)
        sent = {event.key: event.count for event in window.key_averages()}
        assert sent["c10d::_allgather_base_"] == sent["c10d::_reduce_scatter_base_"] == LAYERS, sent
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    own = sum(optimizer.state[param]["exp_avg"].to_local().numel() for param in model.parameters())
    return [models.whole(param) for param in model.parameters()], norms, own


def test_fully_shard_divides_states_and_gives_the_numbers_of_one_process() -> None:
    params, true_norms, _ = models.stock(2, lambda params: torch.optim.AdamW(params, **models.ADAMW), MAX_NORM)
    answers = processes.run(2, train)
    for found, norms, _ in answers:
        for param, wanted in zip(found, params, strict=True):
            assert_close(param, wanted, "model")
        assert_close(torch.tensor(norms), torch.tensor(true_norms), "model")
    sizes = [own for *_, own in answers]
    assert sum(sizes) == sum(param.numel() for param in params)
    assert max(sizes) < 0.7 * sum(sizes)
