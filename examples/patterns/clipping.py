"""Pattern: clipping the gradient's norm.

Pitfall: clip_grad_norm_() after every backward() cuts the sum so far, again and again: early micro-batches count less,
and outliers are not averaged before they are judged.
Remedy: clip the whole window, once. max_grad_norm= does it inside step(), in the same pass over memory.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 4
LR = 0.5
MAX_NORM = 0.1  # of a gradient whose norm is 0.5


def taught() -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in micro_batches(SIZES):
        (F.cross_entropy(net(x), y) / len(SIZES)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)  # belongs behind the loop
    optimizer.step()
    return net


def here() -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR, max_grad_norm=MAX_NORM)
    for x, y in micro_batches(SIZES):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
    optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [sum(SIZES)], LR, MAX_NORM)
    found = {"each": off(taught(), truth, model()), "window": off(here(), truth, model())}
    print(f"off by {found['each']:.0%} with every micro-batch clipped, {found['window']:.0%} with the window clipped")
    return found


if __name__ == "__main__":
    main()
