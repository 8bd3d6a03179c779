"""Pattern: two optimizers, as in a GAN.

Pitfall: the generator's loss goes through the discriminator, so its backward leaves gradients there. Other loops over
windows need no zero_grad(); here the discriminator's next window begins with what is not its own.
Remedy: discriminator_optimizer.zero_grad() before its window, as everybody writes it; or the discriminator's parameters
with requires_grad_(False) during the generator's backward; optimizer.backward() refuses what it finds there.
"""

from __future__ import annotations

import torch
from data import off
from torch import Tensor, nn

import accumfused as af

LR, UPDATES, SIZE = 0.1, 3, 16


def networks() -> nn.ModuleList:
    """A generator and a discriminator, always with the same weights."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))])


def batches() -> list[tuple[Tensor, Tensor]]:
    """Real samples [2 * SIZE, 8] and noise [2 * SIZE, 4] of each update, in float64."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((2 * SIZE, 8), (2 * SIZE, 4))
    drawn = [[torch.randn(size, generator=draw).double() for size in sizes] for _ in range(UPDATES)]
    return [(real + 1.0, noise) for real, noise in drawn]


def losses(nets: nn.ModuleList, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Of the discriminator and of the generator: least squares (Mao et al. 2017)."""
    generator, discriminator = nets
    fake = generator(noise)
    of_discriminator = (discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()
    return of_discriminator, (discriminator(fake) - 1).square().mean()


def truth() -> nn.ModuleList:
    """Whole batches in float64, with torch's own SGD and zero_grad() before each backward()."""
    nets = networks().double()
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in nets]
    for real, noise in batches():
        for index in (1, 0):
            optimizers[index].zero_grad()
            losses(nets, real, noise)[1 - index].backward()
            optimizers[index].step()
    return nets


def here(zero_grad: bool) -> nn.ModuleList:
    nets = networks()
    optimizers = [af.SGD(net.parameters(), lr=LR) for net in nets]
    for real, noise in batches():
        for index in (1, 0):
            if zero_grad:
                optimizers[index].zero_grad()
            for part in (slice(0, SIZE), slice(SIZE, None)):
                losses(nets, real[part].float(), noise[part].float())[1 - index].backward()
                optimizers[index].accumulate(weight=SIZE)
            optimizers[index].step()
    return nets


def main() -> dict[str, float]:
    found = {
        "no zero_grad": off(here(zero_grad=False), truth(), networks()),
        "zero_grad": off(here(zero_grad=True), truth(), networks()),
    }
    print(f"off by {found['no zero_grad']:.0%} without zero_grad(), {found['zero_grad']:.0%} with it")
    return found


if __name__ == "__main__":
    main()
