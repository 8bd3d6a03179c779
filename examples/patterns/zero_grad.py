"""Pattern: where zero_grad() stands.

Pitfall: at the top of the loop's body, as in loops without accumulation, it throws away all micro-batches but the last.
Stock PyTorch says nothing, and the loss still falls.
Remedy: leave it away: step() releases the window. Two windows that are dropped in a row draw a warning.
"""

from __future__ import annotations

import warnings

from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 12
LR = 0.1


def train(zero_grad_first: bool) -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for (x, y), last in af.windows(micro_batches(SIZES), 4):
        if zero_grad_first:
            optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [32] * 3, LR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        wrong = off(train(zero_grad_first=True), truth, model())
    found = {"zero_grad first": wrong, "warnings": len(caught), "without": off(train(False), truth, model())}
    print(f"off by {wrong:.0%} with zero_grad() first, {found['without']:.0%} without")
    print("warned:", *(warning.message for warning in caught))
    return found


if __name__ == "__main__":
    main()
