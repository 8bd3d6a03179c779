"""Trains a small GPT on real text with DistributedDataParallel: `torchrun --nproc-per-node 2 examples/ddp_text.py`.

Each process folds its own micro-batches, of unequal token counts; gradients are added up over the processes once for
each update, in fp32. The result is compared with a single process over the whole batch.
"""

from __future__ import annotations

import copy

import torch.distributed as dist
from text_processes import ADAMW, MAX_GRAD_NORM, loss_of, report, start, windows
from torch.nn.parallel import DistributedDataParallel

import accumfused as af


def main() -> None:
    initial, updates = start("DistributedDataParallel with accumfused")
    model = copy.deepcopy(initial)
    ddp = DistributedDataParallel(model)
    optimizer = af.AdamW(model.parameters(), **ADAMW, max_grad_norm=MAX_GRAD_NORM)
    af.attach_ddp(ddp, optimizer)
    for window in windows(dist.get_rank(), updates):
        for batch in window:
            loss_of(ddp, batch).backward()
            optimizer.accumulate(weight=batch.num_tokens)
        optimizer.step()
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    report(initial, trained, updates, af.memory_report(optimizer))


if __name__ == "__main__":
    main()
