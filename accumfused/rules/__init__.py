"""The optimizers, one file each: class, then rule. To add one, see CONTRIBUTING.md."""

from accumfused.rules.adam import Adam, AdamW
from accumfused.rules.lion import Lion
from accumfused.rules.sgd import SGD

__all__ = ["ALL", "RULES", "SGD", "Adam", "AdamW", "Lion"]

ALL = (SGD, Adam, AdamW, Lion)
RULES = tuple(rule for optimizer in (SGD, Adam, Lion) for rule in optimizer.rules)
