"""Trains some layers with sums and states in the host's memory: python examples/offload.py

The same training runs without and with `offload=True`, on a card if there is one, otherwise with the CPU as the card.
It prints where the bytes of an open window lie, and whether the weights are equal in the end, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

WIDTH, LAYERS, CLASSES = 512, 3, 16
SIZES = (8, 8, 8, 8, 8, 8, 8, 3)  # samples of the micro-batches; the last one is a remainder
MB = 10**6


class Training(NamedTuple):
    weights: list[Tensor]
    on_card: int  # bytes of an open window, of weights and gradients too
    on_host: int
    slots: int  # bytes of the host's memory in which tensors travel
    peak: int  # bytes that torch had on the card at once; 0 without a card


def train(device: torch.device, *, offload: bool) -> Training:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device, torch.bfloat16)
    loader = [(torch.randn(n, WIDTH).bfloat16().to(device), torch.randint(CLASSES, (n,)).to(device)) for n in SIZES]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = af.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, offload=offload)
    report = af.memory_report(optimizer)
    for (x, y), last in af.windows(loader, gradient_accumulation_steps=4):
        F.cross_entropy(model(x), y).backward()
        optimizer.accumulate(weight=len(y))  # a number: with a tensor of the card the host would wait for it
        if last:
            report = af.memory_report(optimizer)
            optimizer.step()
    total, slots = report.total, af.memory_report(optimizer).slots
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    weights = [param.detach().cpu() for param in model.parameters()]
    return Training(weights, total.total - total.on_host, total.on_host, slots, peak)


def main() -> bool:
    """Returns whether the weights are equal."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = {"without": train(device, offload=False), "offload=True": train(device, offload=True)}
    print(f"{'MB':14}{'on the card':>14}{'on the host':>14}{'its slots':>14}{'peak of the card':>20}")
    for name, run in runs.items():
        peak = f"{run.peak / MB:.2f}" if run.peak else "no card"
        print(f"{name:14}{run.on_card / MB:14.2f}{run.on_host / MB:14.2f}{run.slots / MB:14.2f}{peak:>20}")
    here, there = (run.weights for run in runs.values())
    equal = all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    print("weights after both:", "equal, bit for bit" if equal else "DIFFERENT")
    return equal


if __name__ == "__main__":
    raise SystemExit(not main())
