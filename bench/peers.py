"""Other people's optimizers where they are installed: one launch per tensor, with torch's clipping in front."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import stock
from bench.exact import BETAS, EPS, LR, WEIGHT_DECAY
from bench.workload import Workload


@dataclass(frozen=True)
class Peer:
    name: str
    run: Callable[[], None]
    debiased: bool = False  # see exact.step


def peers(work: Workload) -> tuple[list[Peer], list[str]]:
    """Those that run here, over the workload's tensors; and why the others do not."""
    found, notes = [], []
    for name, make in {"clip + one Triton launch per tensor": _per_tensor, "clip + optimi": _optimi}.items():
        try:
            found.append(make(name, work))
        except (ImportError, RuntimeError) as error:
            notes.append(f"left out: {name}: {error}")
    return found, notes


def _per_tensor(name: str, work: Workload) -> Peer:
    if work.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton runs on GPUs")
    module: Any = importlib.import_module("bench.per_tensor")  # imports Triton, so not before
    return Peer(name, clipped(work, module.PerTensorAdamW(work.params, work.states, work.own_step())))


def _optimi(name: str, work: Workload) -> Peer:
    """torch-optimi, whose newer versions have Triton kernels; it keeps the moments with their bias corrected."""
    optimi: Any = importlib.import_module("optimi")
    on_gpu = work.device.type == "cuda"
    try:
        optimizer = optimi.AdamW(
            work.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, triton=on_gpu, foreach=False
        )
    except TypeError as error:
        raise RuntimeError(f"this version has no Triton kernels ({error})") from error
    for param, state in zip(work.params, work.states, strict=True):
        kahan = torch.zeros(1, dtype=torch.uint8, device=work.device) if on_gpu else None
        optimizer.state[param] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "kahan_comp": kahan}
    optimizer.param_groups[0].update(setup=True, step=work.own_step(torch.int32))
    return Peer(name, clipped(work, optimizer), debiased=True)


def clipped(work: Workload, optimizer: Any) -> Callable[[], None]:
    return stock.clip_and_step(work.params, optimizer)
