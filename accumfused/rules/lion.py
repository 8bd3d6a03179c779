"""Lion: the sign of an interpolated momentum.

    p <- p (1 - lr weight_decay) - lr * sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accumfused.numeric import flush_subnormal
from accumfused.optimizer import FusedOptimizer, Nonfinite
from accumfused.rule import Rule, fp32


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
        exp_avg = flush_subnormal(exp_avg * s["beta2"] + g * s["one_minus_beta2"])
        sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, direction))  # 0 and NaN stay
        return param * s["decay"] - sign * s["lr"], exp_avg


class Lion(FusedOptimizer):
    """Lion, with accumulation, unscaling and clipping in the same pass.

    Args:
        params: fp32 parameters or parameter groups; gradients may be fp32, fp16 or bf16.
        lr: the size of every element's update; three to ten times smaller than AdamW's.
        betas: interpolation of the update, decay of the momentum.
        weight_decay: decoupled, multiplied by lr; three to ten times larger than AdamW's.
        maximize: ascend.
        max_grad_norm, nonfinite, backend: see `accumfused.Adam`.

    Raises:
        ValueError, TypeError: on hyper-parameters, and on parameters that are not fp32.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (LionRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        nonfinite: Nonfinite | None = None,
        backend: str = "auto",
    ) -> None:
        self._configure(max_grad_norm, nonfinite, backend)
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        return LionRule
