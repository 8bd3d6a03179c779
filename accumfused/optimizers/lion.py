"""Lion: the sign of an interpolated momentum.

    p <- p (1 - lr weight_decay) - lr * sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rule import Rule, fp32
from accumfused.settings import SettingArguments, chosen, takes_settings

if TYPE_CHECKING:  # the package does not import Triton; its backend puts these names here when it needs them
    import triton.language as tl


class LionRule(Rule):
    name = "lion"
    states = ("exp_avg",)
    counts_steps = False
    hypers = ("lr", "beta1", "beta2", "weight_decay", "maximize")

    @staticmethod
    def scalars(hyper: Mapping[str, float], step: Tensor, coefficient: Tensor) -> dict[str, Tensor]:
        numbers = {
            "lr": hyper["lr"],
            "beta1": hyper["beta1"],
            "one_minus_beta1": 1.0 - hyper["beta1"],
            "beta2": hyper["beta2"],
            "one_minus_beta2": 1.0 - hyper["beta2"],
            "decay": 1.0 - hyper["lr"] * hyper["weight_decay"],
        }
        return fp32(numbers, step.device) | {"coefficient": -coefficient if hyper["maximize"] else coefficient}

    @staticmethod
    def update(s: Mapping[str, Tensor], param: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (exp_avg,) = states
        g = grad * s["coefficient"]
        direction = exp_avg * s["beta1"] + g * s["one_minus_beta1"]
        exp_avg = exp_avg * s["beta2"] + g * s["one_minus_beta2"]
        sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, direction))  # 0 and NaN stay
        return param * s["decay"] - sign * s["lr"], exp_avg

    @staticmethod
    def triton_scalars(hyper: tl.tuple, step: tl.tensor, coefficient: tl.tensor) -> tl.tuple:
        coefficient = tl.where(hyper[4] != 0, coefficient * -1.0, coefficient)
        lr = hyper[0].to(tl.float32)
        beta1 = hyper[1].to(tl.float32)
        one_minus_beta1 = (1.0 - hyper[1]).to(tl.float32)
        beta2 = hyper[2].to(tl.float32)
        one_minus_beta2 = (1.0 - hyper[2]).to(tl.float32)
        decay = (1.0 - hyper[0] * hyper[3]).to(tl.float32)
        return coefficient, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay

    @staticmethod
    def triton_update(
        scalars: tl.tuple,
        p: tl.tensor,
        grad: tl.tensor,
        exp_avg: tl.tensor,
        unused1: tl.tensor,
        unused2: tl.tensor,
        states: tl.constexpr,
    ) -> tl.tuple:
        coefficient, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay = scalars
        g = grad * coefficient
        direction = exp_avg * beta1 + g * one_minus_beta1
        exp_avg = exp_avg * beta2 + g * one_minus_beta2
        sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction))  # 0 and NaN stay
        p = p * decay - sign * lr
        return p, exp_avg, unused1, unused2


@takes_settings
class Lion(FusedOptimizer):
    """Lion, with accumulation, unscaling and clipping in the same pass.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr: the size of every element's update; three to ten times smaller than AdamW's.
        betas: the update's interpolation factor and the momentum's decay.
        weight_decay: decoupled, multiplied by lr; three to ten times larger than AdamW's.
        maximize: True ascends in place of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (LionRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        for name, number in (("lr", lr), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if isinstance(number, Tensor) and number.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.configure(chosen(type(self).__name__, self.defaults, **settings))

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        return LionRule
