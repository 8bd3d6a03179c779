"""Pattern: a mixture of experts with the usual loss that balances them, experts * sum(share * mean probability).

Pitfall: each factor is a mean over the micro-batch, and a mean of products is no product of means. Small micro-batches
are pressed to use all experts evenly, each for itself.
Remedy: the shares carry no gradient. Count them over the whole window first; what is left is linear in the samples.
"""

from __future__ import annotations

import copy

import torch
from data import off
from torch import Tensor, nn

import accumfused as af

LR, EXPERTS, K = 10.0, 4, 4
torch.manual_seed(0)
START = nn.Linear(8, EXPERTS)  # the router; the experts themselves have ordinary losses
X = torch.randn(64, 8)


def shares(router: nn.Module, x: Tensor) -> Tensor:
    """The share of samples that each expert gets: [experts], without a gradient."""
    return torch.bincount(router(x).argmax(-1), minlength=EXPERTS) / len(x)


def balance(router: nn.Module, x: Tensor, share: Tensor) -> Tensor:
    return EXPERTS * (share * router(x).softmax(-1).mean(0)).sum()


def one_batch() -> nn.Module:
    router = copy.deepcopy(START).double()
    optimizer = torch.optim.SGD(router.parameters(), lr=LR)
    balance(router, X.double(), shares(router, X.double())).backward()
    optimizer.step()
    return router


def each_for_itself() -> nn.Module:
    router = copy.deepcopy(START)
    optimizer = af.SGD(router.parameters(), lr=LR)
    for x in X.chunk(K):
        balance(router, x, shares(router, x)).backward()
        optimizer.accumulate(weight=len(x))
    optimizer.step()
    return router


def two_passes() -> nn.Module:
    router = copy.deepcopy(START)
    optimizer = af.SGD(router.parameters(), lr=LR)
    with torch.no_grad():
        share = torch.stack([shares(router, x) * len(x) for x in X.chunk(K)]).sum(0) / len(X)
    for x in X.chunk(K):
        balance(router, x, share).backward()
        optimizer.accumulate(weight=len(x))
    optimizer.step()
    return router


def main() -> dict[str, float]:
    truth = one_batch()
    nets = {"shares of each micro-batch": each_for_itself(), "shares of the window": two_passes()}
    found = {way: off(net, truth, START) for way, net in nets.items()}
    print("off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
