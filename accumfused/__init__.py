"""accumfused: what happens between loss.backward() and updated weights, in the fewest passes over memory."""

from accumfused.batch_norm import BatchNormWarning
from accumfused.clipping import clip_together
from accumfused.ddp import attach_ddp
from accumfused.fuse import fuse
from accumfused.grad_scaler import GradScaler
from accumfused.memory_report import MemoryReport, memory_report
from accumfused.optimizer import FusedOptimizer
from accumfused.release import release_gradients
from accumfused.rules import SGD, Adam, AdamW, Lion
from accumfused.schedule import gradient_accumulation_steps, scale_lr, updates_per_epoch
from accumfused.warn import AccumulationWarning, strict
from accumfused.windows import windows

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AccumulationWarning",
    "Adam",
    "AdamW",
    "BatchNormWarning",
    "FusedOptimizer",
    "GradScaler",
    "Lion",
    "MemoryReport",
    "attach_ddp",
    "clip_together",
    "fuse",
    "gradient_accumulation_steps",
    "memory_report",
    "release_gradients",
    "scale_lr",
    "strict",
    "updates_per_epoch",
    "windows",
]
