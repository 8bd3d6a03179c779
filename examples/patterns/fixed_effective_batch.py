"""Pattern: one effective batch on every machine.

Pitfall: a fixed number of steps. With another micro-batch (a larger card) or more processes the effective batch
changes, and with it the result and the right learning rate.
Remedy: fix the effective batch and have the steps computed; what does not divide is refused, with the nearest that do.
"""

from __future__ import annotations

from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SAMPLES = 128
EFFECTIVE = 32
LR = 0.1


def train(per_device: int, steps: int) -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    for (x, y), last in af.windows(micro_batches([per_device] * (SAMPLES // per_device)), steps):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [EFFECTIVE] * (SAMPLES // EFFECTIVE), LR)
    found = {}
    for per_device in (4, 8, 16, 32):
        steps = af.schedule.gradient_accumulation_steps(EFFECTIVE, per_device)
        found[f"4 x {per_device}"] = off(train(per_device, 4), truth, model())
        found[f"{steps} x {per_device}"] = off(train(per_device, steps), truth, model())
    print("off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
