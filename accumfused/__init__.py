"""accumfused: what happens between loss.backward() and updated weights, in the fewest passes over memory."""

from accumfused.fuse import fuse
from accumfused.optimizer import FusedOptimizer
from accumfused.rules import SGD, Adam, AdamW, Lion
from accumfused.windows import windows

__version__ = "0.1.0"

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer", "Lion", "fuse", "windows"]
