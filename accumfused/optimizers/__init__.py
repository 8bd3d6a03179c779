"""The optimizers, one file each: class, then rule. To add one, see CONTRIBUTING.md."""

import torch

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.adam import Adam, AdamW
from accumfused.optimizers.lion import Lion
from accumfused.optimizers.sgd import SGD

__all__ = ["ALL", "PEERS", "RULES", "SGD", "Adam", "AdamW", "Lion"]

ALL = (SGD, Adam, AdamW, Lion)
PEERS: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {  # of torch's classes, whose checkpoints are ours
    torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: AdamW,
}  # fmt: skip
RULES = tuple(rule for optimizer in (SGD, Adam, Lion) for rule in optimizer.rules)
