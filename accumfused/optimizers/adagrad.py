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

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.peers import constructor
from accumfused.rules import Rule, sqrt, where
from accumfused.settings import takes_settings


class AdagradRule(Rule):
    name = "adagrad"
    states = ("sum",)
    second_moments = ("sum",)
    torch_states = ("step", "sum")
    starts: ClassVar[Mapping[str, str]] = {"sum": "initial_accumulator_value"}
    hypers = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        total = where(step == 1, h.initial_accumulator_value, states[0]) + g * g
        rate = h.lr / (1.0 + (step - 1.0) * h.lr_decay)
        return p - (g * rate) / (sqrt(total) + h.eps), total


@takes_settings
class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Adagrad, with accumulation, unscaling and clipping in the same pass.

    It replaces `torch.optim.Adagrad`: same arguments, group keys, state names and checkpoints. A parameter gets its
    state at its first step, not when the optimizer is made.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        **settings: those of `accumfused.settings.Settings`.
        foreach, fused: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (AdagradRule,)
    __init__ = constructor(torch.optim.Adagrad)
