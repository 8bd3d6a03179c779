"""Pattern: one large batch, or several small ones: B = 8, N = 1 or B = 2, N = 4.

Pitfall: loss / N weighs micro-batches alike. That is the large batch only where they count alike: samples of one
length, no padding, no remainder.
Remedy: a loss that is a mean over what counts, and that count as the weight. Then B and N only decide memory and time.
"""

from __future__ import annotations

import copy

import torch
from data import off
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

LR = 0.5
torch.manual_seed(0)
START = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
TOKENS = torch.randint(16, (8, 12))
LENGTHS = torch.tensor([12, 3, 9, 12, 5, 2, 7, 11])
ALIKE = (TOKENS * 7 + 3) % 16
PADDED = ALIKE.where(torch.arange(12) < LENGTHS[:, None], -100)


def loss(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).flatten(0, -2), targets.flatten(), ignore_index=-100)


def taught(targets: Tensor, size: int) -> nn.Module:
    net = copy.deepcopy(START)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in zip(TOKENS.split(size), targets.split(size), strict=True):
        (loss(net, x, y) / (len(TOKENS) // size)).backward()
    optimizer.step()
    return net


def here(targets: Tensor, size: int) -> nn.Module:
    net = copy.deepcopy(START)
    optimizer = af.SGD(net.parameters(), lr=LR)
    for x, y in zip(TOKENS.split(size), targets.split(size), strict=True):
        loss(net, x, y).backward()
        optimizer.accumulate(weight=(y != -100).sum())
    optimizer.step()
    return net


def main() -> dict[str, float]:
    found = {}
    for name, targets in (("one length", ALIKE), ("padding", PADDED)):
        truth = copy.deepcopy(START).double()
        optimizer = torch.optim.SGD(truth.parameters(), lr=LR)
        loss(truth, TOKENS, targets).backward()
        optimizer.step()
        for way, loop in (("loss / N", taught), ("weights", here)):
            found[f"{name}, {way}"] = off(loop(targets, 2), truth, START)
    print(f"{'4 micro-batches of 2, off one batch of 8 by':44}{'loss / N':>10}{'weights':>10}")
    for name in ("one length", "padding"):
        print(f"{name:44}", *(f"{found[f'{name}, {way}']:10.1e}" for way in ("loss / N", "weights")), sep="")
    return found


if __name__ == "__main__":
    main()
