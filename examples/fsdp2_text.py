"""Trains a small GPT on real text with fully_shard (FSDP2): `torchrun --nproc-per-node 2 examples/fsdp2_text.py`.

Parameters, gradients and optimizer states are divided among the processes. Gradients arrive averaged over them, so the
weight of a micro-batch belongs into its loss: `optimizer.backward`. The result is compared with a single process over
the whole batch.
"""

from __future__ import annotations

import copy

import torch.distributed as dist
from text_processes import ADAMW, MAX_GRAD_NORM, loss_of, report, start, windows
from torch.distributed.fsdp import fully_shard

import accumfused as af


def main() -> None:
    initial, updates = start("fully_shard with accumfused")
    model = copy.deepcopy(initial)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = af.AdamW(model.parameters(), **ADAMW, max_grad_norm=MAX_GRAD_NORM)
    for window in windows(dist.get_rank(), updates):
        for number, batch in enumerate(window, start=1):
            model.set_requires_gradient_sync(number == len(window))  # one reduction for each update
            optimizer.backward(loss_of(model, batch), weight=batch.num_tokens)
        optimizer.step()
    trained = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    report(initial, trained, updates, af.memory_report(optimizer))


if __name__ == "__main__":
    main()
