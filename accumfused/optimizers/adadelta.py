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

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, sqrt, where


class AdadeltaRule(Rule):
    name = "adadelta"
    states = ("square_avg", "acc_delta")
    second_moments = states
    eps_beside = "square"
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


Adadelta = optimizer_of(AdadeltaRule, peer=torch.optim.Adadelta)
