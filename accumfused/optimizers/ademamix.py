"""AdEMAMix: AdamW with a second, slow mean of the gradient. The class has the formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import construct
from accumfused.rules import Rule, Symbol, maximum, power, sqrt
from accumfused.settings import SettingArguments, takes_settings


class AdEMAMixRule(Rule):
    name = "ademamix"
    states = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    eps_beside = "root"
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 2.0, "beta3_warmup": None, "alpha_warmup": None,
        "eps": 1e-8, "weight_decay": 0.0, "maximize": False,
    }  # fmt: skip
    derived = ("half_life_ratio",)
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = dict.fromkeys(
        ("alpha", "beta3_warmup", "alpha_warmup"), (0.0, math.inf)
    )

    @classmethod
    def hyper(cls, group: Mapping[str, Any], name: str) -> Any:
        if name == "half_life_ratio":  # a logarithm has other bits on other backends, so the host takes it
            beta1, _, beta3 = (float(beta) + 1e-8 for beta in group["betas"])  # as the authors do: a beta may be 0
            return math.log(beta3) / math.log(beta1)
        value = super().hyper(group, name)
        return 0.0 if value is None else value

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        exp_avg_fast, exp_avg_slow, exp_avg_sq = states
        ramp = step / maximum(h.beta3_warmup, step)
        beta3 = power(h.beta3, 1.0 / ((1.0 - ramp) * h.half_life_ratio + ramp))
        step_size = h.lr / (1.0 - power(h.beta1, step))
        slow_step_size = h.lr * h.alpha * (step / maximum(h.alpha_warmup, step))
        exp_avg_fast = exp_avg_fast * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_slow = exp_avg_slow * beta3 + g * (1.0 - beta3)
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        update = exp_avg_fast * step_size + exp_avg_slow * slow_step_size
        denominator = sqrt(exp_avg_sq) * (1.0 / sqrt(1.0 - power(h.beta2, step))) + h.eps
        return p * (1.0 - h.lr * h.weight_decay) - update / denominator, exp_avg_fast, exp_avg_slow, exp_avg_sq


@takes_settings
class AdEMAMix(FusedOptimizer):
    """AdEMAMix, AdamW with a second, slow mean, with accumulation, unscaling and clipping in the same pass.

        m1 <- beta1 m1 + (1 - beta1) g
        m2 <- beta3(t) m2 + (1 - beta3(t)) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p (1 - lr weight_decay) - lr * (m1 / (1 - beta1^t) + alpha(t) m2) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    With r = min(t / warmup, 1): alpha(t) = r alpha, and beta3(t) = beta3 ^ (1 / ((1 - r) ln(beta3) / ln(beta1) + r)),
    whose half-life grows linearly from that of beta1 to that of beta3. Without warmup, r is 1. Pagliardini, Ablin &
    Grangier 2024, "The AdEMAMix Optimizer: Better, Faster, Older" (arXiv:2409.03137).

    Names, defaults and order of the arguments are those of the authors' code, and so are the states; a checkpoint of
    theirs loads. With betas[0] = 0 they keep no `exp_avg_fast`, and this class does.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate.
        betas: the decays of the fast mean, of the second moment, and of the slow mean.
        alpha: the weight of the slow mean.
        beta3_warmup: steps in which the slow mean's half-life grows from that of betas[0] to that of betas[2].
        alpha_warmup: steps in which alpha grows from 0. None: no warmup, for each of both.
        eps: added to the root of the second moment; 0 or at least 1e-16 (1e-11 with 8-bit states), as for `Adam`.
        weight_decay: decoupled, multiplied by lr.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (AdEMAMixRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {
            "lr": lr, "betas": betas, "alpha": alpha, "beta3_warmup": beta3_warmup, "alpha_warmup": alpha_warmup,
            "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        }  # fmt: skip
        construct(self, params, arguments, settings)
