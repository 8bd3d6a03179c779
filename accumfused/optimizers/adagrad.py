"""Adagrad.

    g <- g + weight_decay * p
    s <- s + g^2                                  (s = initial_accumulator_value before the first step)
    p <- p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

Duchi, Hazan & Singer 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization" (JMLR 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, sqrt, where


class AdagradRule(Rule):
    """Adagrad, with accumulation, unscaling and clipping in the same pass.

    A parameter gets its state at its first step, not when the optimizer is made.
    """

    name = "adagrad"
    states = ("sum",)
    second_moments = ("sum",)
    eps_beside = "root"
    torch_states = ("step", "sum")
    starts: ClassVar[Mapping[str, str]] = {"sum": "initial_accumulator_value"}
    hypers = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        total = where(step == 1, h.initial_accumulator_value, states[0]) + g * g
        rate = h.lr / (1.0 + (step - 1.0) * h.lr_decay)
        return p - (g * rate) / (sqrt(total) + h.eps), total


Adagrad = optimizer_of(AdagradRule, peer=torch.optim.Adagrad)
