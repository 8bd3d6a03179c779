"""RAdam: Adam with a rectified variance, and none while few gradients are averaged. The class has the formula."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.radam import RAdam as TorchRAdam
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule, Symbol, power, sqrt, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class RadamRule(Rule):
    name = "radam"
    states = ("exp_avg", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    eps_beside = "root"
    torch_states = ("step", *states)
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        exp_avg, exp_avg_sq = states
        is_decoupled = h.decoupled_weight_decay != 0
        remaining = power(h.beta2, step)
        longest = 2.0 / (1.0 - h.beta2) - 1.0
        length = longest - 2.0 * step * remaining / (1.0 - remaining)
        is_rectified = length > 5.0
        length, longest = where(is_rectified, length, 6.0), where(is_rectified, longest, 6.0)
        rectification = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        step_size = h.lr / (1.0 - power(h.beta1, step))
        step_size = where(is_rectified, step_size * sqrt((1.0 - remaining) * rectification), step_size)

        weight_decay = where(is_decoupled, 0.0, h.weight_decay)
        g = where(weight_decay != 0, g + p * weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        denominator = where(is_rectified, sqrt(exp_avg_sq) + h.eps, 1.0)
        p = p * where(is_decoupled, 1.0 - h.lr * h.weight_decay, 1.0)
        return p - (exp_avg * step_size) / denominator, exp_avg, exp_avg_sq


@takes_settings
class RAdam(FusedOptimizer, TorchRAdam):
    """RAdam, Adam with a rectified variance, with accumulation, unscaling and clipping in the same pass.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        n = 2 / (1 - beta2) - 1,  n_t = n - 2 t beta2^t / (1 - beta2^t)
        r = sqrt((n_t - 4) (n_t - 2) n / ((n - 4) (n - 2) n_t))
        p <- p - lr / (1 - beta1^t) * m * (n_t > 5 ? r sqrt(1 - beta2^t) / (sqrt(v) + eps) : 1)

    Before, weight_decay * p is added to g (L2), or p shrinks by 1 - lr weight_decay (decoupled). Liu et al. 2020
    (arXiv:1908.03265), with torch's eps.

    It replaces `torch.optim.RAdam`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as in torch. eps is 0 or at least 1e-16 (1e-11
            with 8-bit states), as for `Adam`.
        foreach, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (RadamRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchRAdam.__init__(
            self, params, lr, betas, eps, weight_decay, decoupled_weight_decay,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable,
        )  # fmt: skip
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
