"""Pattern: a learning rate that goes with the effective batch.

Pitfall: windows of 4 make a quarter of the updates. With the learning rate of the small batch the same data move the
weights a quarter as far.
Remedy: scale_lr(): linear for SGD, rule="sqrt" for Adam and other adaptive methods; a large batch wants a warm-up too.
"""

from __future__ import annotations

from data import micro_batches, model
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 64
LR = 0.05  # that works with batches of 8


def loss_after_an_epoch(steps: int, lr: float) -> float:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=lr)
    for (x, y), last in af.windows(micro_batches(SIZES), steps):
        F.cross_entropy(net(x), y).backward()
        optimizer.accumulate(weight=len(y))
        if last:
            optimizer.step()
    ((x, y),) = micro_batches([sum(SIZES)])
    return F.cross_entropy(net(x), y).item()


def main() -> dict[str, float]:
    found = {
        "batch 8": loss_after_an_epoch(1, LR),
        "batch 32": loss_after_an_epoch(4, LR),
        "batch 32, scale_lr": loss_after_an_epoch(4, af.schedule.scale_lr(LR, base_batch=8, effective_batch=32)),
    }
    print("loss after an epoch:", ", ".join(f"{value:.3f} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
