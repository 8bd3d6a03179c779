"""Pattern: an epoch that is not a multiple of the window.

Pitfall: 10 micro-batches in windows of 4 leave two, which are never applied or leak into the next epoch. A step after
the loop divides the two by four.
Remedy: windows() closes the remainder, and the weights divide it by what it holds.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 9 + [5]
STEPS = 4
LR = 0.1


def taught(remainder: bool) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for i, (x, y) in enumerate(micro_batches(SIZES)):
        (F.cross_entropy(net(x), y) / STEPS).backward()
        if (i + 1) % STEPS == 0 or (remainder and i + 1 == len(SIZES)):
            optimizer.step()
            optimizer.zero_grad()
    return net


def here() -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for (x, y), last in af.windows(micro_batches(SIZES), STEPS):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [32, 32, 13], LR)
    nets = {"it dropped": taught(False), "it divided by 4": taught(True), "windows": here()}
    found = {way: off(net, truth, model()) for way, net in nets.items()}
    print("the remainder: off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
