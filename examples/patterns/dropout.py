"""Pattern: accumulation with dropout.

Pitfall: to expect the numbers of the large batch. Masks are drawn per forward pass, so two runs drop other units: one
update differs, as it does between two seeds.
Remedy: none is needed: the mean over masks is the same. To compare two implementations, take p=0 (or eval()).
"""

from __future__ import annotations

import torch
from data import micro_batches, model
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

SAMPLES = 32
DRAWS = 100


def gradients(net: nn.Module, size: int, draws: int = 1) -> Tensor:
    """[draws, parameters]: of the mean loss over all samples, from micro-batches of this size."""
    optimizer = af.SGD(net.parameters(), lr=0.1)
    batches = micro_batches([size] * (SAMPLES // size))
    found = []
    for (x, y), last in af.windows(batches * draws, len(batches)):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y), last=last)
        if last:
            found.append(torch.cat([param.grad.flatten() for param in net.parameters()]))
            optimizer.zero_grad()
    return torch.stack(found)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main() -> dict[str, float]:
    found = {"p=0": apart(gradients(model(), 8)[0], gradients(model(), SAMPLES)[0])}
    net = model(nn.Dropout(0.5))
    many, whole = gradients(net, 8, DRAWS), gradients(net, SAMPLES, DRAWS)
    found |= {"p=0.5, one draw": apart(many[0], whole[0]), "mean of 100 draws": apart(many.mean(0), whole.mean(0))}
    print("4 x 8 and 32 samples, apart by", ", ".join(f"{value:.1%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
