"""RMSprop, with momentum, and centered. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.rmsprop import RMSprop as TorchRMSprop
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule, Symbol, maximum, sqrt, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class RmspropRule(Rule):
    name = "rmsprop"
    states: ClassVar[tuple[str, ...]] = ("square_avg",)
    second_moments: ClassVar[tuple[str, ...]] = ("square_avg",)
    eps_beside = "root"
    torch_states: ClassVar[tuple[str, ...]] = ("step", *states)
    hypers = ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize")
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": False, "centered": False}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        *averages, square_avg = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        second = square_avg = square_avg * h.alpha + (g * g) * (1.0 - h.alpha)
        if h.centered:
            averages[-1] = averages[-1] * h.alpha + g * (1.0 - h.alpha)
            second = maximum(square_avg - averages[-1] * averages[-1], 0.0)  # roundings may make it negative
        direction = g / (sqrt(second) + h.eps)
        if h.has_momentum:
            direction = averages[0] = averages[0] * h.momentum + direction
        return p - direction * h.lr, *averages, square_avg


class RmspropMomentumRule(RmspropRule):
    name = "rmsprop_momentum"
    states = ("momentum_buffer", "square_avg")
    torch_states = ("step", *states)
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": True, "centered": False}


class RmspropCenteredRule(RmspropRule):
    name = "rmsprop_centered"
    states = ("grad_avg", "square_avg")
    torch_states = ("step", *states)
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": False, "centered": True}


class RmspropMomentumCenteredRule(RmspropRule):
    name = "rmsprop_momentum_centered"
    states = ("momentum_buffer", "grad_avg", "square_avg")
    torch_states = ("step", *states)
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": True, "centered": True}


@takes_settings
class RMSprop(FusedOptimizer, TorchRMSprop):
    """RMSprop, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        v <- alpha v + (1 - alpha) g^2
        a <- alpha a + (1 - alpha) g              (centered: v - a^2, the variance, is used in place of v below)
        b <- momentum * b + g / (sqrt(v) + eps)    (without momentum: b = g / (sqrt(v) + eps))
        p <- p - lr * b

    Hinton 2012, "Neural Networks for Machine Learning", lecture 6e; centered: Graves 2013 (arXiv:1308.0850). eps stands
    outside of the root, as in torch. A centered variance that roundings make negative is 0 here, and NaN in torch; the
    smaller the format of the states, the larger eps should be.

    It replaces `torch.optim.RMSprop`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as in torch. eps is 0 or at least 1e-16 (1e-11 with
            8-bit states), as for `Adam`.
        capturable, foreach: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (RmspropMomentumRule, RmspropCenteredRule, RmspropMomentumCenteredRule, RmspropRule)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchRMSprop.__init__(
            self, params, lr, alpha, eps, weight_decay, momentum, centered, capturable, foreach, maximize,
            differentiable,
        )  # fmt: skip
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
