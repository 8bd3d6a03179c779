"""Adadelta.

    g <- g + weight_decay * p
    v <- rho v + (1 - rho) g^2
    d <- sqrt(u + eps) / sqrt(v + eps) * g
    u <- rho u + (1 - rho) d^2
    p <- p - lr * d

Zeiler 2012 (arXiv:1212.5701), with torch's lr.
"""

from __future__ import annotations

from typing import Any

import torch

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.peers import constructor
from accumfused.rules import Rule, sqrt, where
from accumfused.settings import takes_settings


class AdadeltaRule(Rule):
    name = "adadelta"
    states = ("square_avg", "acc_delta")
    second_moments = states
    torch_states = ("step", *states)
    hypers = ("lr", "rho", "eps", "weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        square_avg, acc_delta = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        square_avg = square_avg * h.rho + (g * g) * (1.0 - h.rho)
        delta = sqrt(acc_delta + h.eps) / sqrt(square_avg + h.eps) * g
        acc_delta = acc_delta * h.rho + (delta * delta) * (1.0 - h.rho)
        return p - delta * h.lr, square_avg, acc_delta


@takes_settings
class Adadelta(FusedOptimizer, torch.optim.Adadelta):
    """Adadelta, with accumulation, unscaling and clipping in the same pass.

    It replaces `torch.optim.Adadelta`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr, rho, eps, weight_decay, maximize: as in torch.
        **settings: those of `accumfused.settings.Settings`.
        foreach, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (AdadeltaRule,)
    __init__ = constructor(torch.optim.Adadelta)
