"""ASGD: SGD with an average of its weights.

    p <- p (1 - lambd eta) - eta (g + weight_decay p)
    a <- a + mu (p - a)                            (mu = 1 copies p)
    eta <- lr / (1 + lambd lr t)^alpha;  mu <- 1 / max(1, t - t0)

torch's form of Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, maximum, power, where


class ASGDRule(Rule):
    name = "asgd"
    states = ("ax",)
    tensor_states: ClassVar[Mapping[str, float]] = {"eta": 0.0, "mu": 1.0}
    starts: ClassVar[Mapping[str, str]] = {"eta": "lr"}
    torch_states = ("step", "eta", "mu", "ax")
    hypers = ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        (ax,) = states
        eta = where(step == 1, h.lr, h.eta)
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        p = p * (1.0 - h.lambd * eta) - g * eta
        ax = where(h.mu == 1, p, ax + (p - ax) * h.mu)
        return p, ax, h.lr / power(1.0 + h.lambd * h.lr * step, h.alpha), 1.0 / maximum(step - h.t0, 1.0)


ASGD = optimizer_of(ASGDRule, peer=torch.optim.ASGD)
