"""Signum: the sign of the momentum.

    g <- g + weight_decay * p
    b <- momentum * b + (1 - momentum) * g
    p <- p - lr * sign(b)

Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems" (arXiv:1802.04434); momentum = 0 is
signSGD.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.peers import check_hypers
from accumfused.rules import Rule, sign, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class SignumRule(Rule):
    name = "signum"
    states = ("momentum_buffer",)
    counts_steps = False
    hypers = ("lr", "momentum", "weight_decay", "maximize")

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        (momentum_buffer,) = states
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        momentum_buffer = momentum_buffer * h.momentum + g * (1.0 - h.momentum)
        return p - sign(momentum_buffer) * h.lr, momentum_buffer


@takes_settings
class Signum(FusedOptimizer):
    """Signum, with accumulation, unscaling and clipping in the same pass.

    `Lion` with two equal betas is Signum with decoupled weight decay.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr: the size of every element's update.
        momentum: the decay of the gradient's mean; 0 is signSGD, which still keeps the state.
        weight_decay: L2, added to the gradient.
        maximize: True ascends in place of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules: ClassVar[tuple[type[Rule], ...]] = (SignumRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        check_hypers(lr, weight_decay=weight_decay)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.configure(chosen(type(self).__name__, self.defaults, **settings))
