"""Adamax: Adam with an infinity norm in place of the second moment. The class has the formula."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adamax import Adamax as TorchAdamax
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import MAXIMUM_RATCHETS, Rule, Symbol, maximum, power, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class AdamaxRule(Rule):
    name = "adamax"
    states = ("exp_avg", "exp_inf")
    second_moments = ("exp_inf",)
    torch_states = ("step", *states)
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    needs_16_bits = MAXIMUM_RATCHETS

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        exp_avg, exp_inf = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_inf = maximum(exp_inf * h.beta2, abs(g) + h.eps)
        return p - (exp_avg * (h.lr / (1.0 - power(h.beta1, step)))) / exp_inf, exp_avg, exp_inf


@takes_settings
class Adamax(FusedOptimizer, TorchAdamax):
    """Adamax, Adam with an infinity norm, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        m <- beta1 m + (1 - beta1) g
        u <- max(beta2 u, |g| + eps)
        p <- p - lr / (1 - beta1^t) * m / u

    Kingma & Ba 2015 (arXiv:1412.6980), section 7.1, with torch's eps.

    It replaces `torch.optim.Adamax`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, maximize: as in torch.
        foreach, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes;
            8-bit states.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (AdamaxRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchAdamax.__init__(
            self, params, lr, betas, eps, weight_decay, foreach,
            maximize=maximize, differentiable=differentiable, capturable=capturable,
        )  # fmt: skip
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
