"""Adan: Adam with the gradient's change, by which it looks ahead as Nesterov does. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.clip import LIMIT
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import construct
from accumfused.rules import Rule, Symbol, power, sqrt, where
from accumfused.settings import SettingArguments, takes_settings


class AdanRule(Rule):
    name = "adan"
    states = ("exp_avg", "exp_avg_diff", "neg_pre_grad", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    eps_beside = "root"
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.0, "no_prox": False, "maximize": False,
    }  # fmt: skip

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        exp_avg, exp_avg_diff, neg_pre_grad, exp_avg_sq = states
        decay = h.lr * h.weight_decay
        diff = where(step == 1, 0.0, g + neg_pre_grad)
        ahead = g + diff * h.beta2
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_diff = exp_avg_diff * h.beta2 + diff * (1.0 - h.beta2)
        exp_avg_sq = exp_avg_sq * h.beta3 + (ahead * ahead) * (1.0 - h.beta3)
        update = exp_avg * (h.lr / (1.0 - power(h.beta1, step)))
        update = update + exp_avg_diff * (h.lr * h.beta2 / (1.0 - power(h.beta2, step)))
        denominator = sqrt(exp_avg_sq) * (1.0 / sqrt(1.0 - power(h.beta3, step))) + h.eps
        p = p * where(h.no_prox != 0, 1.0 - decay, 1.0) - update / denominator
        p = p * where(h.no_prox != 0, 1.0, 1.0 / (1.0 + decay))
        return p, exp_avg, exp_avg_diff, -g, exp_avg_sq


class LoadsTheAuthors(FusedOptimizer):
    """Loads the authors' checkpoints, whose groups count steps."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint, without the limit of all groups that the authors' groups hold."""
        groups = state_dict.get("param_groups")
        if isinstance(groups, list) and any("step" in group for group in groups):
            without = [{name: value for name, value in group.items() if name != LIMIT} for group in groups]
            state_dict = {**state_dict, "param_groups": without}
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            steps = group.pop("step", None)  # the authors count them once for a group
            for param in group["params"] if steps is not None else ():
                if param in self.state:
                    self.state[param].setdefault("step", torch.tensor(float(steps), device=param.device))


@takes_settings
class Adan(LoadsTheAuthors):
    """Adan, Adam with the gradient's change, with accumulation, unscaling and clipping in the same pass.

        d <- g - g_before                        (0 in the first step)
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) d
        n <- beta3 n + (1 - beta3) (g + beta2 d)^2
        p <- (p - lr * (m / (1 - beta1^t) + beta2 * v / (1 - beta2^t)) / (sqrt(n) / sqrt(1 - beta3^t) + eps))
             / (1 + lr weight_decay)

    With no_prox, p (1 - lr weight_decay) stands for p, and nothing divides. Xie et al. 2022, "Adan: Adaptive Nesterov
    Momentum Algorithm for Faster Optimizing Deep Models" (arXiv:2208.06677), with the authors' bias corrections and
    betas, which are 1 minus the paper's.

    Names, defaults and order of the arguments are those of the authors' code, and so are the states; a checkpoint of
    theirs loads. The state also counts steps, for each parameter.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate.
        betas: the decays of the gradient's mean, of its change's mean, and of the second moment.
        eps: added to the root of the second moment; 0 or at least 1e-16 (1e-11 with 8-bit states), as for `Adam`.
        weight_decay: decoupled, multiplied by lr.
        no_prox: True decays before the update, as AdamW does; False decays by a division after it.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (AdanRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        no_prox: bool = False,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "no_prox": no_prox,
            "maximize": maximize,
        }  # fmt: skip
        construct(self, params, arguments, settings)
