"""NAdam: Adam with Nesterov momentum.

    mu_t <- beta1 (1 - 0.96^(t momentum_decay) / 2);  M_t <- mu_t M_(t-1)
    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;  d <- sqrt(v / (1 - beta2^t)) + eps
    p <- p - lr (1 - mu_t) / (1 - M_t) g / d - lr mu_(t+1) / (1 - M_t mu_(t+1)) m / d

with g + weight_decay p for g; decoupled: p (1 - lr weight_decay) first. Dozat 2016, "Incorporating Nesterov Momentum
into Adam".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, power, sqrt, where


class NAdamRule(Rule):
    name = "nadam"
    states = ("exp_avg", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    tensor_states: ClassVar[Mapping[str, float]] = {"mu_product": 1.0}
    torch_states = ("step", "mu_product", *states)
    hypers = (
        "lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"
    )  # fmt: skip

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        exp_avg, exp_avg_sq = states
        is_decoupled = h.decoupled_weight_decay != 0
        mu, following = (h.beta1 * (1.0 - 0.5 * power(0.96, count * h.momentum_decay)) for count in (step, step + 1))
        mu_product = h.mu_product * mu
        weight_decay = where(is_decoupled, 0.0, h.weight_decay)
        g = where(weight_decay != 0, g + p * weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        of_gradient = h.lr * (1.0 - mu) / (1.0 - mu_product)
        of_momentum = h.lr * following / (1.0 - mu_product * following)
        denominator = sqrt(exp_avg_sq * (1.0 / (1.0 - power(h.beta2, step)))) + h.eps
        p = p * where(is_decoupled, 1.0 - h.lr * h.weight_decay, 1.0)
        return p - (g * of_gradient + exp_avg * of_momentum) / denominator, exp_avg, exp_avg_sq, mu_product


NAdam = optimizer_of(NAdamRule, peer=torch.optim.NAdam)
