"""The optimizers, one file each: class, then rule. To add one, see CONTRIBUTING.md."""

from accumfused.optimizers.adam import Adam, AdamW
from accumfused.optimizers.lion import Lion
from accumfused.optimizers.sgd import SGD

__all__ = ["ALL", "RULES", "SGD", "Adam", "AdamW", "Lion"]

ALL = (SGD, Adam, AdamW, Lion)
RULES = tuple(rule for optimizer in (SGD, Adam, Lion) for rule in optimizer.rules)
