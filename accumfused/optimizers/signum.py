"""Signum: the sign of the momentum. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import construct
from accumfused.rules import Rule, Symbol, sign, where
from accumfused.settings import SettingArguments, takes_settings


class SignumRule(Rule):
    name = "signum"
    states = ("momentum_buffer",)
    counts_steps = False
    hypers: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"momentum": (0.0, 1.0)}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        (momentum_buffer,) = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        momentum_buffer = momentum_buffer * h.momentum + g * (1.0 - h.momentum)
        return p - sign(momentum_buffer) * h.lr, momentum_buffer


@takes_settings
class Signum(FusedOptimizer):
    """Signum, the sign of the momentum, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        b <- momentum * b + (1 - momentum) * g
        p <- p - lr * sign(b)

    Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems" (arXiv:1802.04434). `Lion` with
    two equal betas is Signum with decoupled weight decay.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the size of every element's update.
        momentum: the decay of the gradient's mean; 0 is signSGD, which still keeps the state.
        weight_decay: L2, added to the gradient.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (SignumRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        construct(self, params, arguments, settings)
