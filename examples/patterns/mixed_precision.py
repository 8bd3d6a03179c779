"""Pattern: fp16 with torch's own GradScaler, and clipping.

Pitfall: clipping before unscale_() judges gradients that are 65536 times too large: hardly anything is left of them.
Remedy: close the window with last=True, so that p.grad is the accumulator, and keep the manual's order: unscale_, clip,
step, update, zero_grad (a step that the scaler skips would otherwise leave its window behind, which is refused).
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import nn
from torch.nn import functional as F

import accumfused as af

SIZES = [8] * 8
LR = 0.5
MAX_NORM = 0.3  # of gradients whose norm is around 0.5


def train(unscale_first: bool) -> nn.Module:
    net = model()
    optimizer = af.SGD(net.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu")
    for (x, y), last in af.windows(micro_batches(SIZES), 4):
        loss = F.cross_entropy(net(x), y)  # under torch.autocast; without, it can be compared with float64
        scaler.scale(loss).backward()
        optimizer.accumulate(weight=len(y), last=last)
        if last:
            if unscale_first:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [32, 32], LR, MAX_NORM)
    found = {
        "clip first": off(train(unscale_first=False), truth, model()),
        "unscale first": off(train(unscale_first=True), truth, model()),
    }
    print("off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
