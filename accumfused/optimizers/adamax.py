"""Adamax: Adam with an infinity norm in place of the second moment.

    g <- g + weight_decay * p
    m <- beta1 m + (1 - beta1) g
    u <- max(beta2 u, |g| + eps)
    p <- p - lr / (1 - beta1^t) * m / u

Kingma & Ba 2015 (arXiv:1412.6980), section 7.1, with torch's eps.
"""

from __future__ import annotations

from typing import Any

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import MAXIMUM_RATCHETS, Rule, maximum, power, where


class AdamaxRule(Rule):
    name = "adamax"
    states = ("exp_avg", "exp_inf")
    second_moments = ("exp_inf",)
    torch_states = ("step", *states)
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    needs_16_bits = MAXIMUM_RATCHETS

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        exp_avg, exp_inf = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_inf = maximum(exp_inf * h.beta2, abs(g) + h.eps)
        return p - (exp_avg * (h.lr / (1.0 - power(h.beta1, step)))) / exp_inf, exp_avg, exp_inf


Adamax = optimizer_of(AdamaxRule, peer=torch.optim.Adamax)
