"""Pattern: the basic loop, one update from several micro-batches.

Pitfall: backward() adds up, so four means make a gradient four times too large. And loss / 4 is a mean of means: the
mean over all samples only if all micro-batches have the same size. With weights, loss / 4 is divided twice.
Remedy: accumulate(weight=len(y)): the window divides by the sum of the weights, whatever has come.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8, 8, 8, 3]
LR = 0.1


def taught(divisor: int) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in micro_batches(SIZES):
        (F.cross_entropy(net(x), y) / divisor).backward()
    optimizer.step()
    return net


def here(divisor: int = 1) -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for x, y in micro_batches(SIZES):
        (F.cross_entropy(net(x), y) / divisor).backward()
        optimizer.accumulate(weight=len(y))
    optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [sum(SIZES)], LR)
    nets = {
        "loss": taught(1),
        "loss / 4": taught(len(SIZES)),
        "weight=len(y)": here(),
        "weight and loss / 4": here(len(SIZES)),
    }
    found = {way: off(net, truth, model()) for way, net in nets.items()}
    print("off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
