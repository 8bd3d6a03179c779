"""The optimizers, one file each: rule, then class. CONTRIBUTING.md says how to add one."""

import torch

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.adadelta import Adadelta
from accumfused.optimizers.adagrad import Adagrad
from accumfused.optimizers.adam import Adam, AdamW
from accumfused.optimizers.adamax import Adamax
from accumfused.optimizers.adan import Adan
from accumfused.optimizers.ademamix import AdEMAMix
from accumfused.optimizers.lion import Lion
from accumfused.optimizers.muon import Muon, OrthogonalRule
from accumfused.optimizers.radam import RAdam
from accumfused.optimizers.rmsprop import RMSprop
from accumfused.optimizers.schedule_free import AdamWScheduleFree, SGDScheduleFree
from accumfused.optimizers.sgd import SGD
from accumfused.optimizers.signum import Signum

__all__ = [
    "ALL",
    "PEERS",
    "RULES",
    "SGD",
    "AdEMAMix",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adamax",
    "Adan",
    "Lion",
    "Muon",
    "RAdam",
    "RMSprop",
    "SGDScheduleFree",
    "Signum",
]  # fmt: skip

ALL = (
    SGD, Adam, AdamW, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Lion, Signum, Adan, AdEMAMix, SGDScheduleFree,
    AdamWScheduleFree, Muon,
)  # fmt: skip
PEERS: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {  # torch's classes with the same checkpoints
    torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.RAdam: RAdam,
    torch.optim.Adamax: Adamax, torch.optim.Adagrad: Adagrad, torch.optim.Adadelta: Adadelta,
    torch.optim.RMSprop: RMSprop, torch.optim.Muon: Muon,
}  # fmt: skip
RULES = (*dict.fromkeys(rule for optimizer in ALL for rule in optimizer.rules), OrthogonalRule)
