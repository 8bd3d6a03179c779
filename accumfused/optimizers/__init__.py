"""The optimizers, one file each: rule, then class. CONTRIBUTING.md says how to add one."""

import torch

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.adam import Adam, AdamW
from accumfused.optimizers.lion import Lion
from accumfused.optimizers.sgd import SGD

__all__ = ["ALL", "PEERS", "RULES", "SGD", "Adam", "AdamW", "Lion"]

ALL = (SGD, Adam, AdamW, Lion)
PEERS: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {  # torch's classes with the same checkpoints
    torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: AdamW,
}  # fmt: skip
RULES = tuple(rule for optimizer in (SGD, Adam, Lion) for rule in optimizer.rules)
