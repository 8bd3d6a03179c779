"""Signum: the sign of the momentum.

    g <- g + weight_decay * p
    b <- momentum * b + (1 - momentum) * g
    p <- p - lr * sign(b)

Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems" (arXiv:1802.04434); momentum = 0 is
signSGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, sign, where


class SignumRule(Rule):
    """Signum, with accumulation, unscaling and clipping in the same pass.

    `Lion` with two equal betas is Signum with decoupled weight decay.

    Args:
        lr: the size of every element's update.
        momentum: the decay of the gradient's mean; 0 is signSGD, which still keeps the state.
        weight_decay: L2, added to the gradient.
    """

    name = "signum"
    states = ("momentum_buffer",)
    counts_steps = False
    hypers: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"momentum": (0.0, 1.0)}

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        (momentum_buffer,) = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        momentum_buffer = momentum_buffer * h.momentum + g * (1.0 - h.momentum)
        return p - sign(momentum_buffer) * h.lr, momentum_buffer


Signum = optimizer_of(SignumRule)
