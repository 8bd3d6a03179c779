"""Accelerate with accumfused's AdamW: its loop unchanged, and the loop that weighs micro-batches by their tokens.

Trains a small GPT on the help texts of Python and compares each loop with torch.optim.AdamW in the same one. Needs
accelerate; downloads nothing. `python examples/accelerate_loop.py`

Beware of the names: `accelerator.accumulate(model)` is a context manager which decides whether the optimizer steps
after this micro-batch, and touches no gradient; `optimizer.optimizer.accumulate(weight)` adds gradients to the window.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from text_data import Batch, collate, paragraphs
from text_model import GPT
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accumfused as af

LONGEST_SAMPLE = 64
GRADIENT_ACCUMULATION_STEPS = 4
MICRO_BATCHES = 18  # four windows, and a remainder of two
MAX_GRAD_NORM = 1.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parts() -> tuple[GPT, DataLoader[Batch]]:
    """A new model, the same each time, and its data: micro-batches of 8 samples of 1 to 64 bytes."""
    torch.manual_seed(0)
    model = GPT(context=LONGEST_SAMPLE, width=64, depth=2)
    samples = paragraphs(LONGEST_SAMPLE)[: 8 * MICRO_BATCHES]
    return model, DataLoader(samples, batch_size=8, collate_fn=collate)


def decay(update: int) -> float:
    return 0.9**update


def unchanged(make_optimizer: Callable[..., torch.optim.Optimizer]) -> GPT:
    """The loop of Accelerate's manual: only the optimizer's class is another one.

    It divides every loss by 4: the micro-batches count alike whatever their tokens, and the remainder counts half.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)
    model, loader = parts()
    optimizer = make_optimizer(model.parameters(), **ADAMW)
    scheduler = LambdaLR(optimizer, decay)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model.loss(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def weighed_by_tokens() -> tuple[GPT, list[Tensor]]:
    """Windows with weights: the mean over all tokens of the window, in the remainder too. The norms, as well."""
    accelerator = Accelerator(cpu=True)  # without gradient_accumulation_steps, by which backward() would divide
    model, loader = parts()
    optimizer = af.AdamW(model.parameters(), **ADAMW, max_grad_norm=MAX_GRAD_NORM)
    scheduler = LambdaLR(optimizer, decay)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    norms = []
    for batch, last in af.windows(loader, GRADIENT_ACCUMULATION_STEPS):
        accelerator.backward(model.loss(batch))
        # Accelerate's wrapper has torch's methods only; what it wraps has accumulate(). With fp16, and so with a
        # scaler, add last=last here, and optimizer.zero_grad() after the step.
        optimizer.optimizer.accumulate(weight=batch.num_tokens)
        if last:
            optimizer.step()  # clips too
            scheduler.step()
            norms.append(optimizer.optimizer.grad_norm)
    return accelerator.unwrap_model(model), norms


def weighed_by_hand() -> GPT:
    """The same with torch alone: every window is fetched ahead, for its tokens are needed first."""
    model, loader = parts()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = LambdaLR(optimizer, decay)
    batches = list(loader)
    for begin in range(0, len(batches), GRADIENT_ACCUMULATION_STEPS):
        window = batches[begin : begin + GRADIENT_ACCUMULATION_STEPS]
        num_tokens = sum(batch.num_tokens for batch in window)
        for batch in window:
            (model.loss(batch) * batch.num_tokens / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def difference(one: GPT, other: GPT) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


stock, ours = unchanged(torch.optim.AdamW), unchanged(af.AdamW)
weighed, norms = weighed_by_tokens()
print("largest difference between parameters after 5 updates")
print(f"  the unchanged loop, torch.optim and accumfused:   {difference(stock, ours):.1e}")
print(f"  weighed by tokens, by hand and with accumfused:   {difference(weighed_by_hand(), weighed):.1e}")
print(f"  what the weights change:                          {difference(weighed, ours):.1e}")
print("gradient norms before clipping:", " ".join(f"{float(norm):.3f}" for norm in norms))
