"""Pattern: a loop that is already there, with its optimizer and its scheduler.

Pitfall: a new optimizer beside the old one. The scheduler goes on with the old one's learning rate, that of the new one
never changes, and the moments begin again.
Remedy: fuse() converts the optimizer in place: same object, same state. The loop's own accumulation stays as it is.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import accumfused as af

STEPS = 4


def train(net: nn.Module, convert: str = "") -> float:
    """The loop as it was; `convert` after half of it. Returns: the learning rate at the end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda update: 0.8**update)
    for i, (x, y) in enumerate(micro_batches([8] * 32)):
        if i == 16 and convert == "new":
            optimizer = af.SGD(net.parameters(), lr=0.1, momentum=0.9)
        elif i == 16 and convert == "fuse":
            optimizer = af.fuse(optimizer)
        (F.cross_entropy(net(x.to(net[0].weight.dtype)), y) / STEPS).backward()
        if (i + 1) % STEPS == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return optimizer.param_groups[0]["lr"]


def main() -> dict[str, float]:
    truth, new, fused = model().double(), model(), model()
    found = {"lr": train(truth), "lr, new": train(new, "new"), "lr, fuse()": train(fused, "fuse")}
    found |= {"new": off(new, truth, model()), "fuse()": off(fused, truth, model())}
    print(f"off by {found['new']:.0%} with a new optimizer, {found['fuse()']:.0%} with fuse()")
    print("learning rate at the end:", ", ".join(f"{found[way]:.3f} {way[4:]}" for way in ("lr, new", "lr, fuse()")))
    return found


if __name__ == "__main__":
    main()
