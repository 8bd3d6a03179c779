"""What fits on a card, and what is left for activations: python examples/what_fits.py

`af.memory_report` counts the bytes of a small model in an open window of two micro-batches, with released gradients.
Bytes per parameter do not depend on the size, so the tables multiply them. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

import accumfused as af
from accumfused.loop.release import CARD_BUCKET_BYTES
from accumfused.settings import SettingArguments

GB = 10**9
CARDS = (8, 12, 16, 24, 48, 80)  # GB
MODELS = {0.5: 1024, 1: 2048, 3: 3072, 7: 4096, 13: 5120}  # 10^9 parameters: elements in a row of the embedding
TOKENS = 128_256  # rows of the embedding, whose gradient is the largest
RESERVE = 1.0  # GB for CUDA's context, the workspaces of its libraries, and fragmentation
LEAST = 1.0  # GB for activations; where less is left, nothing fits
MICRO_BATCHES = 4  # of a window, for the bytes that it moves
ADAPTERS = 40e6 / 7e9  # of the parameters: LoRA of rank 16 on all linear layers

# The settings of AdamW, from the most accurate to the leanest.
SETTINGS: dict[str, SettingArguments] = {
    "A": {},
    "B": {"state_dtype": torch.bfloat16},
    "C": {"state_dtype": "8bit"},
    "D": {"state_dtype": "8bit", "master_weights": "split8"},
    "E": {"state_dtype": "8bit", "master_weights": None},
}
TWO_BYTES: SettingArguments = {"sum_dtype": torch.bfloat16}
RUNGS: dict[str, SettingArguments] = SETTINGS | {
    f"{name}2": settings | TWO_BYTES for name, settings in SETTINGS.items()
}


class Cost(NamedTuple):
    """Bytes per parameter."""

    stays: float  # at the peak of a window
    moves: float | None  # in a window of MICRO_BATCHES and its step, without forward and backward; None: not here
    is_whole: bool = True  # the embedding is trained, too


def small_model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=dtype) for _ in range(4)))


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    loss = model(torch.ones_like(weight[:1])).float().square().mean()
    if isinstance(optimizer, af.FusedOptimizer):
        optimizer.backward(loss, weight=1)
    else:
        loss.backward()


def windows(settings: SettingArguments, dtype: torch.dtype = torch.bfloat16) -> Cost:
    """Reads the report of an open window with released gradients."""
    model = small_model(dtype)
    optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0, **settings)
    with af.release_gradients(optimizer):
        for _ in range(2):
            backward(model, optimizer)
        total = af.memory_report(optimizer).total
        optimizer.step()
    stays, grads, summed = total.per_element, dtype.itemsize, total.parts["accumulators"] / total.elements
    first = 0 if summed == grads else grads + summed  # the first gradients are the sums, or are copied
    moves = first + (MICRO_BATCHES - 1) * (grads + 2 * summed) + 2 * (stays - summed) + summed
    return Cost(stays, moves)


def plain(dtype: torch.dtype) -> Cost:
    """Counts torch's tensors after a step on p.grad."""
    model = small_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model, optimizer)
    optimizer.step()
    params = list(model.parameters())
    tensors = [*params, *(param.grad for param in params), *(t for s in optimizer.state.values() for t in s.values())]
    elements = sum(param.numel() for param in params)
    return Cost(sum(tensor.nbytes for tensor in tensors if tensor is not None) / elements, None)


def costs() -> dict[str, Cost]:
    """All rows, by name: ours, then others."""
    adapters = windows({}, torch.float32)
    return {name: windows(settings) for name, settings in RUNGS.items()} | {
        "torch AdamW, fp32": plain(torch.float32),
        "torch AdamW, all bf16": plain(torch.bfloat16),
        "8-bit AdamW on `p.grad`": Cost(2 + 2 + 2 * (1 + 4 / 256), None),  # blocks of 256 with an fp32 scale
        "LoRA over bf16": Cost(2 + ADAPTERS * adapters.stays, None, False),
    }


def left(cost: Cost, card: float, billions: float) -> float:
    """GB for activations; below 0 if weights, states and sums alone are too large.

    Backward makes the largest gradient, in bf16, while a bucket is nearly full.
    """
    largest = 2 * TOKENS * MODELS[billions] if cost.is_whole else 0
    return card - RESERVE - billions * cost.stays - (largest + CARD_BUCKET_BYTES) / GB


def best(found: dict[str, Cost], card: float, billions: float) -> str:
    """The most accurate settings that fit, exact sums first, and the leanest, each with the GB that they leave."""
    fitting = [name for name in RUNGS if left(found[name], card, billions) >= LEAST]
    if not fitting and left(found["LoRA over bf16"], card, billions) >= LEAST:
        fitting = ["LoRA over bf16"]
    names = dict.fromkeys((fitting[0], fitting[-1])) if fitting else {}
    return ", ".join(f"{name.split()[0]}: {left(found[name], card, billions):.1f}" for name in names) or "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def tables() -> list[str]:
    """What the page has: GB by settings, and settings by card."""
    found = costs()
    taken = [
        [
            name, f"{cost.stays:.2f}", "-" if cost.moves is None else f"{cost.moves:.0f}",
            *(f"{billions * cost.stays:.1f}" for billions in MODELS),
        ]
        for name, cost in found.items()
    ]  # fmt: skip
    chosen = [[f"{billions}B", *(best(found, card, billions) for card in CARDS)] for billions in MODELS]
    return [
        table(["AdamW", "bytes", "moved", *(f"{billions}B" for billions in MODELS)], taken),
        table(["parameters", *(f"{card} GB" for card in CARDS)], chosen),
    ]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
