"""Pattern: a learning-rate schedule over accumulated updates.

Pitfall: a scheduler counts updates. Told len(loader) it never comes down; told len(loader) // 4 it misses the update of
the remainder, so that a cosine goes up again (and OneCycleLR raises at the end of training).
Remedy: step it after each step(), and tell it updates_per_epoch().
"""

from __future__ import annotations

from data import micro_batches, model
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import accumfused as af

LOADER = micro_batches([8] * 10)
STEPS = 4
EPOCHS = 4
LR = 0.5


def last_lr(updates_per_epoch: int) -> float:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    schedule = CosineAnnealingLR(optimizer, T_max=EPOCHS * updates_per_epoch)
    for _ in range(EPOCHS):
        for (x, y), last in af.windows(LOADER, STEPS):
            F.cross_entropy(net(x), y).backward()
            optimizer.accumulate(weight=len(y))
            if last:
                optimizer.step()
                schedule.step()
    return schedule.get_last_lr()[0]


def main() -> dict[str, float]:
    found = {
        "len(loader)": last_lr(len(LOADER)),
        "len(loader) // 4": last_lr(len(LOADER) // STEPS),
        "updates_per_epoch()": last_lr(af.schedule.updates_per_epoch(len(LOADER), STEPS)),
    }
    print(f"a cosine from {LR} to 0 ends at", ", ".join(f"{value:.2f} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
