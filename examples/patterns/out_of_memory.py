"""Pattern: one effective batch, whatever fits in memory.

Pitfall: after an out-of-memory error the batch is halved and the training restarted. Its update is then that of another
batch: noisier, at a learning rate that was meant for twice as many samples.
Remedy: accumulate_batch() keeps the batch, and halves the parts in which it is computed.
"""

from __future__ import annotations

import torch
from data import micro_batches, model, off, whole_batches
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

BATCH, FITS = 32, 12  # samples
LR = 0.1


class Loss:
    """The loss of a model on a card that is too small for a whole batch."""

    def __init__(self) -> None:
        self.net = model()
        self.parts = 0  # that fit

    def __call__(self, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        if len(x) > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.parts += 1
        return F.cross_entropy(self.net(x), y)


def kept() -> tuple[nn.Module, int]:
    loss_of = Loss()
    optimizer = af.SGD(loss_of.net.parameters(), lr=LR)
    for batch in micro_batches([BATCH] * 4):
        af.accumulate_batch(optimizer, batch, loss_of, weight="samples")
        optimizer.step()
    return loss_of.net, loss_of.parts


def halved() -> nn.Module:
    loss_of = Loss()
    optimizer = torch.optim.SGD(loss_of.net.parameters(), lr=LR)
    for batch in micro_batches([BATCH // 4] * 16):  # as finders of a batch size leave it
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    return loss_of.net


def main() -> dict[str, float]:
    truth = whole_batches(model(), [BATCH] * 4, LR)
    net, parts = kept()
    found = {"accumulate_batch()": off(net, truth, model()), "a smaller batch": off(halved(), truth, model())}
    print(f"{parts} parts of 4 batches: off by", ", ".join(f"{value:.0%} with {way}" for way, value in found.items()))
    return found


if __name__ == "__main__":
    main()
