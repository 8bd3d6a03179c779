"""Rprop: a step size for each element, which follows the signs of its gradients.

    d <- d * (g g' > 0 ? eta+ : g g' < 0 ? eta- : 1), within the smallest and the largest step size
    g <- 0 where g g' < 0
    p <- p - d * sign(g)
    g' <- g                                        (before the first step g' = 0 and d = lr)

Riedmiller & Braun 1993, "A Direct Adaptive Method for Faster Backpropagation Learning"; without going back where the
sign changes, as in torch: Igel & Huesken 2000, "Improving the Rprop Learning Algorithm" (iRprop-).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, maximum, minimum, sign, where


class RpropRule(Rule):
    name = "rprop"
    states = ("prev", "step_size")
    second_moments = ("step_size",)
    torch_states = ("step", *states)
    starts: ClassVar[Mapping[str, str]] = {"step_size": "lr"}
    hypers = ("lr", "eta1", "eta2", "step_size1", "step_size2", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        prev, step_size = states
        agreement = sign(g) * sign(prev)  # a product of gradients could underflow
        factor = where(agreement > 0, h.eta2, where(agreement < 0, h.eta1, 1.0))
        step_size = where(step == 1, h.lr, step_size) * factor
        step_size = minimum(maximum(step_size, h.step_size1), h.step_size2)
        g = where(agreement < 0, 0.0, g)
        return p - sign(g) * step_size, g, step_size


Rprop = optimizer_of(RpropRule, peer=torch.optim.Rprop)
