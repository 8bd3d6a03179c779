"""Pattern: accumulation with a network for images.

Pitfall: BatchNorm takes its statistics over each micro-batch, so 4 x 8 is not 32, whatever is done to the gradients.
Its running statistics move four times per update.
Remedy: GroupNorm (or LayerNorm), which looks at one sample at a time. `af.check_model` names the layers to replace.
"""

from __future__ import annotations

import warnings

from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 4
LR = 0.1


def accumulated(norm: nn.Module) -> nn.Module:
    net = model(norm)
    af.check_model(net)
    optimizer = af.SGD(net.parameters(), lr=LR)
    for x, y in micro_batches(SIZES):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
    optimizer.step()
    return net


def main() -> dict[str, float]:
    found = {}
    for norm in (nn.BatchNorm1d, lambda width: nn.GroupNorm(4, width)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", af.BatchNormWarning)
            net = accumulated(norm(16))
        truth = whole_batches(model(norm(16)), [sum(SIZES)], LR)
        name = type(net[1]).__name__
        found |= {name: off(net, truth, model(norm(16))), f"warnings of {name}": len(caught)}
        print(f"off by {found[name]:.0%} with {name}", *(f"({warning.message})" for warning in caught))
    return found


if __name__ == "__main__":
    main()
