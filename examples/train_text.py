"""Trains a small GPT on real text twice: with accumfused, and with the stock recipe of PyTorch.

Both runs begin with the same weights and see the same micro-batches, one update of each in turn. Prints what they
reached and what they cost, and draws it. `python examples/train_text.py --help` lists the options.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text_data import Batch, collate, paragraphs
from text_model import GPT
from text_noise import noise_of
from text_question import one_batch_or_four
from text_report import Result, Update, draw, print_question, print_result
from text_watch import MemoryWatch, Stopwatch, Watch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accumfused as af

LONGEST_SAMPLE = 128
MICRO_BATCH_SIZE = 4
GRADIENT_ACCUMULATION_STEPS = 4
UPDATES, QUICK_UPDATES = 69, 6
NOISE_MICRO_BATCHES, QUICK_NOISE_MICRO_BATCHES = 48, 8  # as long as six updates of both runs
MAX_GRAD_NORM = 1.0
BUSY = 0.5  # load of the minute before, from which on times are worth little
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}

Schedule = Callable[[int], float]


def train_with_accumfused(model: GPT, loader: DataLoader[Batch], schedule: Schedule, watch: Watch) -> Iterator[Update]:
    """One update per `next()`, without end."""
    optimizer = af.AdamW(model.parameters(), **ADAMW, max_grad_norm=MAX_GRAD_NORM)
    scheduler = LambdaLR(optimizer, schedule)
    while True:
        losses = []
        for batch, last in af.windows(loader, GRADIENT_ACCUMULATION_STEPS):
            with watch("forward"):
                loss = model.loss(batch)
            with watch("backward"):
                loss.backward()
            with watch("accumulate"):
                optimizer.accumulate(weight=batch.num_tokens)
            losses.append((loss.detach(), batch.num_tokens))
            if last:
                with watch("step"):
                    optimizer.step()
                scheduler.step()
                yield Update(token_mean(losses), optimizer.grad_norm.item())
                losses = []


def train_with_stock(model: GPT, loader: DataLoader[Batch], schedule: Schedule, watch: Watch) -> Iterator[Update]:
    """The same with torch.optim; a window is fetched ahead, for each loss is scaled by the window's count of tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    scheduler = LambdaLR(optimizer, schedule)
    watch.accumulation_inside_backward(model)
    while True:
        batches = iter(loader)
        while window := list(islice(batches, GRADIENT_ACCUMULATION_STEPS)):
            num_tokens = sum(batch.num_tokens for batch in window)
            losses = []
            for batch in window:
                with watch("forward"):
                    loss = model.loss(batch)
                    scaled_loss = loss * (batch.num_tokens / num_tokens)
                with watch("backward"):
                    scaled_loss.backward()
                losses.append((loss.detach(), batch.num_tokens))
            with watch("clip"):
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            with watch("step"):
                optimizer.step()
            with watch("zero_grad"):
                optimizer.zero_grad()
            scheduler.step()
            yield Update(token_mean(losses), grad_norm.item())


def token_mean(losses: list[tuple[torch.Tensor, int]]) -> float:
    """The mean over all tokens of means over some tokens."""
    return sum(loss.item() * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)


def cosine_with_warmup(updates: int) -> Schedule:
    """The factor of the learning rate, counted in updates, not in micro-batches."""
    warmup = max(1, updates // 10)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))

    return factor


RECIPES = {"accumfused": train_with_accumfused, "stock": train_with_stock}


def compare(updates: int, seed: int, noise_micro_batches: int) -> Result:
    """Trains two copies of one model, one with each recipe, in turn, update by update; then measures the noise."""
    torch.manual_seed(seed)
    initial = GPT(LONGEST_SAMPLE)
    samples = paragraphs(LONGEST_SAMPLE)

    def shuffled(seed: int) -> DataLoader[Batch]:
        shuffle = torch.Generator().manual_seed(seed)
        return DataLoader(samples, MICRO_BATCH_SIZE, shuffle=True, collate_fn=collate, generator=shuffle)

    def start(recipe: str, watch: Watch) -> tuple[GPT, Iterator[Update]]:
        model = copy.deepcopy(initial)
        return model, RECIPES[recipe](model, shuffled(seed), cosine_with_warmup(updates), watch)

    memory = {recipe: MemoryWatch() for recipe in RECIPES}
    for recipe in RECIPES:
        _, run = start(recipe, memory[recipe])
        next(run)

    clocks = {recipe: Stopwatch() for recipe in RECIPES}
    models, runs = {}, {}
    for recipe in RECIPES:
        models[recipe], runs[recipe] = start(recipe, clocks[recipe])
    peak_bytes = {recipe: memory[recipe].peak_bytes for recipe in RECIPES}
    result = Result({recipe: [] for recipe in RECIPES}, clocks, peak_bytes, [])
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=updates)
        for update in range(updates):
            for recipe in RECIPES if update % 2 else reversed(RECIPES):  # neither is always the first
                result.updates[recipe].append(next(runs[recipe]))
                clocks[recipe].end_update()
            result.parameter_differences.append(largest_difference(*models.values()))
            progress.update(task, advance=1, description=f"loss {result.updates['accumfused'][-1].loss:.3f}")
    loader = shuffled(seed + 1)  # in another order: the true gradient is that of all samples
    result.noise = noise_of(models["accumfused"], loader, noise_micro_batches, GRADIENT_ACCUMULATION_STEPS)
    return result


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Between a parameter of one model and the same parameter of the other."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return float(
        torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max()
    )  # NaN stays, unlike in Python's max


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=positive, default=UPDATES, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("train_text.png"), help="picture (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_UPDATES} updates, to see that everything works")
    args = parser.parse_args()
    if not args.output.parent.is_dir():
        parser.error(f"there is no folder {args.output.parent}")
    torch.set_num_threads(args.threads)

    console = Console()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    if load > BUSY:
        console.print(f"This machine is busy: a load of {load:.1f}; times below are worth little\n", style="bold")
    answers = one_batch_or_four(paragraphs(LONGEST_SAMPLE), args.seed)
    print_question(console, answers)
    updates = QUICK_UPDATES if args.quick else args.updates
    result = compare(updates, args.seed, QUICK_NOISE_MICRO_BATCHES if args.quick else NOISE_MICRO_BATCHES)
    print_result(console, result)
    draw(result, args.output)
    console.print(f"The picture is {args.output}.")

    disagreements = result.disagreements()
    if not answers.exact:
        disagreements.append("weighted micro-batches are not the one batch")
    if disagreements:
        console.print(f"[bold red]More than rounding sets the runs apart:[/] {disagreements[0]}")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
