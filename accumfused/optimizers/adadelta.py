"""Adadelta: steps as large as the root mean square of those before. The class has the formula."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adadelta import Adadelta as TorchAdadelta
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule, Symbol, sqrt, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class AdadeltaRule(Rule):
    name = "adadelta"
    states = ("square_avg", "acc_delta")
    second_moments = states
    eps_beside = "square"
    torch_states = ("step", *states)
    hypers = ("lr", "rho", "eps", "weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        square_avg, acc_delta = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        square_avg = square_avg * h.rho + (g * g) * (1.0 - h.rho)
        delta = sqrt(acc_delta + h.eps) / sqrt(square_avg + h.eps) * g
        acc_delta = acc_delta * h.rho + (delta * delta) * (1.0 - h.rho)
        return p - delta * h.lr, square_avg, acc_delta


@takes_settings
class Adadelta(FusedOptimizer, TorchAdadelta):
    """Adadelta, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        v <- rho v + (1 - rho) g^2
        d <- sqrt(u + eps) / sqrt(v + eps) * g
        u <- rho u + (1 - rho) d^2
        p <- p - lr * d

    Zeiler 2012 (arXiv:1212.5701), with torch's lr.

    It replaces `torch.optim.Adadelta`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, rho, eps, weight_decay, maximize: as in torch. eps is 0 or at least 1e-32 (1e-22 with 8-bit states), for the
            reason that `Adam` gives.
        foreach, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (AdadeltaRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchAdadelta.__init__(
            self, params, lr, rho, eps, weight_decay, foreach,
            capturable=capturable, maximize=maximize, differentiable=differentiable,
        )  # fmt: skip
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
