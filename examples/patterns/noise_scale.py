"""Pattern: how large a batch, and so how large an N, still helps.

Pitfall: a batch far above the gradient noise scale (McCandlish et al. 2018) brings hardly fewer updates, for more data.
Remedy: estimate it from norms that a window has anyway: of its micro-batches, and of their mean.
"""

from __future__ import annotations

import torch
from data import micro_batches, model
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

SIZE, K, SAMPLES = 8, 8, 2048


def squared_norm(net: nn.Module) -> Tensor:
    return torch.stack([param.grad.square().sum() for param in net.parameters() if param.grad is not None]).sum()


def estimated(net: nn.Module) -> float:
    """tr(covariance of a sample's gradient) / |mean gradient|^2, from windows of K micro-batches."""
    optimizer = af.SGD(net.parameters(), lr=0.0)
    small, large = torch.zeros(()), torch.zeros(())  # squared norms, summed up
    for (x, y), last in af.windows(micro_batches([SIZE] * (SAMPLES // SIZE)), K):
        F.cross_entropy(net(x), y).backward()
        small += squared_norm(net) / K
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
            large += optimizer.grad_norm**2  # the norm comes free with the window
    noise = (small - large) / (1 / SIZE - 1 / (SIZE * K))
    signal = (K * large - small) / (K - 1)
    return float(noise / signal)


def exact(net: nn.Module) -> float:
    """The same from each sample's own gradient, in float64."""
    net = net.double()
    ((x, y),) = micro_batches([SAMPLES])
    params = {name: param.detach() for name, param in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, params, x), y)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x.double(), y)
    grads = torch.cat([grad.flatten(1) for grad in each.values()], dim=1)
    return float(grads.var(0).sum() / grads.mean(0).square().sum())


def trained(updates: int) -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=0.5)
    for x, y in micro_batches([64] * updates):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def main() -> dict[str, float]:
    found = {}
    for name, updates in (("at first", 0), ("after 30 updates", 30)):
        net = trained(updates)
        found |= {f"estimated {name}": estimated(net), f"exact {name}": exact(net)}
    print("noise scale in samples:", ", ".join(f"{value:.0f} {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
