"""RAdam: Adam with a rectified variance, and none while few gradients are averaged.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    n = 2 / (1 - beta2) - 1,  n_t = n - 2 t beta2^t / (1 - beta2^t)
    r = sqrt((n_t - 4) (n_t - 2) n / ((n - 4) (n - 2) n_t))
    p <- p - lr / (1 - beta1^t) * m * (n_t > 5 ? r sqrt(1 - beta2^t) / (sqrt(v) + eps) : 1)

Before, weight_decay * p is added to g (L2), or p shrinks by 1 - lr weight_decay (decoupled). Liu et al. 2020
(arXiv:1908.03265), with torch's eps.
"""

from __future__ import annotations

from typing import Any

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, power, sqrt, where


class RadamRule(Rule):
    name = "radam"
    states = ("exp_avg", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    eps_beside = "root"
    torch_states = ("step", *states)
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        exp_avg, exp_avg_sq = states
        is_decoupled = h.decoupled_weight_decay != 0
        remaining = power(h.beta2, step)
        longest = 2.0 / (1.0 - h.beta2) - 1.0
        length = longest - 2.0 * step * remaining / (1.0 - remaining)
        is_rectified = length > 5.0
        length, longest = where(is_rectified, length, 6.0), where(is_rectified, longest, 6.0)
        rectification = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        step_size = h.lr / (1.0 - power(h.beta1, step))
        step_size = where(is_rectified, step_size * sqrt((1.0 - remaining) * rectification), step_size)

        weight_decay = where(is_decoupled, 0.0, h.weight_decay)
        g = where(weight_decay != 0, g + p * weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        denominator = where(is_rectified, sqrt(exp_avg_sq) + h.eps, 1.0)
        p = p * where(is_decoupled, 1.0 - h.lr * h.weight_decay, 1.0)
        return p - (exp_avg * step_size) / denominator, exp_avg, exp_avg_sq


RAdam = optimizer_of(RadamRule, peer=torch.optim.RAdam)
