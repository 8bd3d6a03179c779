"""Lion: the sign of an interpolated momentum.

    p <- p (1 - lr weight_decay) - lr * sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675). adam.py has the sources of the
cautious options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, agree, sign, where


class LionRule(Rule):
    """Lion, with accumulation, unscaling and clipping in the same pass.

    Args:
        lr: the size of every element's update; three to ten times smaller than AdamW's.
        betas: the update's interpolation factor and the momentum's decay.
        weight_decay: decoupled, multiplied by lr; three to ten times larger than AdamW's.
        cautious, cautious_weight_decay: as `accumfused.AdamW`.
    """

    is_common = True
    name = "lion"
    states = ("exp_avg",)
    counts_steps = False
    hypers: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    flags: ClassVar[Mapping[str, bool]] = {"is_cautious": False}

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        (exp_avg,) = states
        direction = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg = exp_avg * h.beta2 + g * (1.0 - h.beta2)
        update, decay = sign(direction), 1.0 - h.lr * h.weight_decay
        if h.is_cautious:
            update = update * where(agree(direction, g), 1.0, where(h.cautious != 0, 0.0, 1.0))
            decay = where(agree(update, -p), where(h.cautious_weight_decay != 0, 1.0, decay), decay)
        return p * decay - update * h.lr, exp_avg


class CautiousLionRule(LionRule):
    """Both cautious options: one kernel, in which numbers switch them."""

    is_common = False
    name = "lion_cautious"
    hypers: ClassVar[Mapping[str, Any]] = {**LionRule.hypers, "cautious": False, "cautious_weight_decay": False}
    flags: ClassVar[Mapping[str, bool]] = {"is_cautious": True}

    @classmethod
    def fits(cls, group: Mapping[str, Any]) -> bool:
        return bool(group.get("cautious") or group.get("cautious_weight_decay"))


Lion = optimizer_of(LionRule, CautiousLionRule)
