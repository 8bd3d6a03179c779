"""The work between loss.backward() and updated weights, in the fewest passes over memory.

This window of unequal micro-batches gives the clipped update of one batch that holds them all:

>>> import torch
>>> import accumfused as af
>>> model = torch.nn.Linear(64, 10)
>>> batches = [(torch.randn(n, 64), torch.randint(10, (n,))) for n in (32, 32, 32, 7)]
>>> optimizer = af.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
>>> for (x, y), last in af.windows(batches, gradient_accumulation_steps=4):
...     torch.nn.functional.cross_entropy(model(x), y).backward()  # a mean over this micro-batch
...     optimizer.accumulate(weight=len(y))
...     if last:
...         optimizer.step()
>>> bool(optimizer.step_was_skipped)
False

``af.fuse(optimizer, max_grad_norm=1.0)`` converts an existing optimizer in place. `help(af.AdamW)` describes the
settings, and `python -m accumfused` lists the backends that run on this machine.
"""

from accumfused import versions as versions  # first: it refuses an old torch

# isort: split
from accumfused import clip, schedule
from accumfused.auditing.calls import audit
from accumfused.auditing.report import AuditReport
from accumfused.batch_norm import BatchNormWarning, check_model
from accumfused.clip import PerTensor as PerTensor  # these and those of `schedule`: other names of theirs
from accumfused.clip import RunningMean as RunningMean
from accumfused.clip import ZScore as ZScore
from accumfused.core.metrics import Metrics
from accumfused.core.noise import NoiseEstimate
from accumfused.loop.batch_size import gradient_accumulation_steps as gradient_accumulation_steps
from accumfused.loop.batch_size import scale_lr as scale_lr
from accumfused.loop.batch_size import updates as updates
from accumfused.loop.batch_size import updates_per_epoch as updates_per_epoch
from accumfused.loop.batches import windows
from accumfused.loop.clip_group import ClipGroup
from accumfused.loop.ddp import attach_ddp
from accumfused.loop.fusing import fuse
from accumfused.loop.grad_scaler import GradScaler
from accumfused.loop.linears import FusedLinears, fuse_linears
from accumfused.loop.micro_batches import accumulate_batch
from accumfused.loop.noise_scale import NoiseScale as NoiseScale
from accumfused.loop.release import release_gradients
from accumfused.loop.report import MemoryReport, memory_report
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AdamWScheduleFree,
    Adan,
    AdEMAMix,
    Lion,
    Muon,
    RAdam,
    RMSprop,
    SGDScheduleFree,
    Signum,
)
from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule
from accumfused.warn import AccumulationWarning, AfterStepWarning, strict

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AccumulationWarning",
    "AdEMAMix",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adamax",
    "Adan",
    "AfterStepWarning",
    "AuditReport",
    "BatchNormWarning",
    "ClipGroup",
    "FusedLinears",
    "FusedOptimizer",
    "GradScaler",
    "Lion",
    "MemoryReport",
    "Metrics",
    "Muon",
    "NoiseEstimate",
    "RAdam",
    "RMSprop",
    "Rule",
    "SGDScheduleFree",
    "Signum",
    "accumulate_batch",
    "attach_ddp",
    "audit",
    "check_model",
    "clip",
    "fuse",
    "fuse_linears",
    "memory_report",
    "optimizer_of",
    "release_gradients",
    "schedule",
    "strict",
    "windows",
]


def __dir__() -> list[str]:
    """Returns the public names alone, for completion."""
    return [*__all__, "__version__"]
