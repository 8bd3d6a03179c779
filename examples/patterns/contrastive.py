"""Pattern: a contrastive loss, whose negatives are the other samples of the batch.

Pitfall: negatives do not cross micro-batches. 4 x 16 samples give each one 15 negatives, not 63, whatever is done to
the gradients.
Remedy: two passes (GradCache, Gao et al. 2021). The first embeds all samples without a graph, and differentiates the
loss by the embeddings; the second pulls each micro-batch's part of that back through the model.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

LR, SAMPLES, SIZE, TEMPERATURE = 0.1, 64, 16, 0.1
X = torch.cat([x for x, _ in micro_batches([SAMPLES])])
PAIRS = torch.stack([X, X + 0.3 * torch.randn(X.shape, generator=torch.Generator().manual_seed(2))], dim=1)  # two views


def embedded(net: nn.Module, pairs: Tensor) -> Tensor:
    """Unit vectors [samples, 2, dimensions]."""
    return F.normalize(net(pairs), dim=-1)


def info_nce(z: Tensor) -> Tensor:
    """The mean over samples: which of the second views belongs to a first one?"""
    return F.cross_entropy(z[:, 0] @ z[:, 1].T / TEMPERATURE, torch.arange(len(z)))


def one_batch() -> nn.Module:
    net = model().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    info_nce(embedded(net, PAIRS.double())).backward()
    optimizer.step()
    return net


def each_for_itself() -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for pairs in PAIRS.split(SIZE):
        info_nce(embedded(net, pairs)).backward()
        optimizer.accumulate(weight=len(pairs))
    optimizer.step()
    return net


def two_passes() -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    with torch.no_grad():
        z = torch.cat([embedded(net, pairs) for pairs in PAIRS.split(SIZE)])
    (grads,) = torch.autograd.grad(info_nce(z.requires_grad_()), z)
    for pairs, grad in zip(PAIRS.split(SIZE), grads.split(SIZE), strict=True):
        embedded(net, pairs).backward(grad)
        optimizer.accumulate()  # no weight: the parts of one loss add up
    optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = one_batch()
    nets = {"each micro-batch for itself": each_for_itself(), "two passes": two_passes()}
    found = {way: off(net, truth, model()) for way, net in nets.items()}
    print("off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
