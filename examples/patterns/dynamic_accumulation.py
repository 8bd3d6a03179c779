"""Pattern: an effective batch that grows while training goes on.

Pitfall: (i + 1) % steps == 0 counts from the start of the epoch: where `steps` changes, windows are cut short, and
their losses divided by more micro-batches than came.
Remedy: give windows() a function of the update's index, and weights: the division is by what came.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 15
LR = 0.1


def steps_of(update: int) -> int:
    return 2**update


def taught() -> nn.Module:
    net, update = model(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for i, (x, y) in enumerate(micro_batches(SIZES)):
        (F.cross_entropy(net(x), y) / steps_of(update)).backward()
        if (i + 1) % steps_of(update) == 0:
            optimizer.step()
            optimizer.zero_grad()
            update += 1
    return net


def here() -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for (x, y), last in af.windows(micro_batches(SIZES), steps_of):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [8, 16, 32, 64], LR)
    found = {"modulo": off(taught(), truth, model()), "windows": off(here(), truth, model())}
    print("batches of 8, 16, 32, 64: off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
