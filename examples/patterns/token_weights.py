"""Pattern: a loss over tokens, of which some count (masked language models, padding, prompts).

Pitfall: micro-batches hold different numbers of tokens that count, so the mean of their means is not the mean over
tokens. Where none counts, the loss is NaN, and if the mask is a product by hand so are the gradients.
Remedy: weight = the number of tokens that count. A weight of 0 leaves the micro-batch out, NaN or not.
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
TOKENS = torch.randint(16, (4, 2, 12))  # 4 micro-batches of 2 samples
MASKED = torch.rand(4, 2, 12) < torch.tensor([0.8, 0.2, 0.0, 0.4])[:, None, None]  # none in the third
TARGETS = ((TOKENS * 7 + 3) % 16).where(MASKED, -100)


def loss(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).flatten(0, -2), targets.flatten(), ignore_index=-100)


def taught() -> nn.Module:
    net = copy.deepcopy(START)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for tokens, targets in zip(TOKENS, TARGETS, strict=True):
        (loss(net, tokens, targets) / len(TOKENS)).backward()
    optimizer.step()
    return net


def here() -> nn.Module:
    net = copy.deepcopy(START)
    optimizer = af.SGD(net.parameters(), lr=LR)
    for tokens, targets in zip(TOKENS, TARGETS, strict=True):
        loss(net, tokens, targets).backward()
        optimizer.accumulate(weight=(targets != -100).sum())  # a tensor: no wait for a GPU
    optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = copy.deepcopy(START).double()
    optimizer = torch.optim.SGD(truth.parameters(), lr=LR)
    loss(truth, TOKENS, TARGETS).backward()
    optimizer.step()
    found = {"means": off(taught(), truth, START), "tokens": off(here(), truth, START)}
    found["loss of the empty one"] = loss(START, TOKENS[2], TARGETS[2]).item()
    print(f"off by {found['means']:.0%} with the mean of means, {found['tokens']:.0%} with tokens as weights")
    print(f"the loss of the micro-batch without targets is {found['loss of the empty one']}")
    return found


if __name__ == "__main__":
    main()
