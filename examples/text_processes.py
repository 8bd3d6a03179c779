"""What the examples with several processes share: micro-batches, the single process to compare with, the report."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from text_data import IGNORED, Batch, collate, paragraphs
from text_model import GPT
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST_SAMPLE = 128
MICRO_BATCH_SIZE = 4
GRADIENT_ACCUMULATION_STEPS = 4
MAX_GRAD_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def start(description: str) -> tuple[GPT, int]:
    """Joins the processes that torchrun has started; returns the model that all begin with, and how many updates."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--updates", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 FILE")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    torch.manual_seed(0)
    return GPT(LONGEST_SAMPLE, width=128, depth=2), args.updates


def windows(rank: int, updates: int) -> Iterator[list[Batch]]:
    """The micro-batches of one process for each update: as many tokens as they happen to have."""
    samples = paragraphs(LONGEST_SAMPLE)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    for update in range(updates):
        window = []
        for number in range(GRADIENT_ACCUMULATION_STEPS):
            place = (update * GRADIENT_ACCUMULATION_STEPS + number) * dist.get_world_size() + rank
            chosen = [order[place * MICRO_BATCH_SIZE + k] for k in range(MICRO_BATCH_SIZE)]
            inputs, targets, num_tokens = collate([samples[index] for index in chosen])
            device = torch.get_default_device()
            window.append(Batch(inputs.to(device), targets.to(device), num_tokens))
        yield window


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """As `GPT.loss`, through the forward() that DistributedDataParallel and `fully_shard` watch."""
    return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def train_alone(model: GPT, updates: int) -> None:
    """One process with stock PyTorch: the micro-batches of all, and the mean over all their tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for parts in zip(*(windows(rank, updates) for rank in range(dist.get_world_size())), strict=True):
        whole = [batch for window in parts for batch in window]
        num_tokens = sum(batch.num_tokens for batch in whole)
        for batch in whole:
            (loss_of(model, batch) * (batch.num_tokens / num_tokens)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()


def report(initial: GPT, trained: dict[str, Tensor], updates: int, memory: object) -> None:
    """Trains the same model in the first process alone, and prints the largest difference.

    Args:
        trained: whole parameters by name.
        memory: of the first process, as text.
    """
    if dist.get_rank() == 0:
        alone = copy.deepcopy(initial)
        train_alone(alone, updates)
        ends = dict(alone.named_parameters())
        difference = max(float((ends[name] - value).detach().abs().max()) for name, value in trained.items())
        moved = max(float((ends[name] - value).detach().abs().max()) for name, value in initial.named_parameters())
        print(f"{dist.get_world_size()} processes, {updates} updates, {GRADIENT_ACCUMULATION_STEPS} micro-batches each")
        print(f"parameters moved by up to {moved:.1e}")
        print(f"largest difference from a single process with stock PyTorch: {difference:.1e}")
        print(f"\nmemory of process 0:\n{memory}")
    dist.barrier()
    dist.destroy_process_group()
