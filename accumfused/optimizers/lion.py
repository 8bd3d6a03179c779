"""Lion: the sign of an interpolated momentum. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import construct
from accumfused.rules import Rule, Symbol, agree, sign, where
from accumfused.settings import SettingArguments, takes_settings


class LionRule(Rule):
    is_common = True
    name = "lion"
    states = ("exp_avg",)
    counts_steps = False
    hypers: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    flags: ClassVar[Mapping[str, bool]] = {"is_cautious": False}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
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


@takes_settings
class Lion(FusedOptimizer):
    """Lion, the sign of an interpolated momentum, with accumulation, unscaling and clipping in the same pass.

        p <- p (1 - lr weight_decay) - lr * sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675).

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the size of every element's update; three to ten times smaller than AdamW's.
        betas: the update's interpolation factor and the momentum's decay.
        weight_decay: decoupled, multiplied by lr; three to ten times larger than AdamW's.
        maximize: True ascends instead of descending.
        cautious: True moves only elements whose update and gradient have the same sign, as in `Adam`.
        cautious_weight_decay: True leaves out the decay of elements that the update moves away from 0.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (CautiousLionRule, LionRule)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "cautious": cautious,
            "cautious_weight_decay": cautious_weight_decay,
        }  # fmt: skip
        construct(self, params, arguments, settings)
