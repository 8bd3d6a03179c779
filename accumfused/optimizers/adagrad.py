"""Adagrad: each element's rate falls with its squared gradients so far. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.adagrad import Adagrad as TorchAdagrad
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule, Symbol, sqrt, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class AdagradRule(Rule):
    name = "adagrad"
    states = ("sum",)
    second_moments = ("sum",)
    eps_beside = "root"
    torch_states = ("step", "sum")
    starts: ClassVar[Mapping[str, str]] = {"sum": "initial_accumulator_value"}
    hypers = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        total = where(step == 1, h.initial_accumulator_value, states[0]) + g * g
        rate = h.lr / (1.0 + (step - 1.0) * h.lr_decay)
        return p - (g * rate) / (sqrt(total) + h.eps), total


@takes_settings
class Adagrad(FusedOptimizer, TorchAdagrad):
    """Adagrad, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        s <- s + g^2                                  (s = initial_accumulator_value before the first step)
        p <- p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Duchi, Hazan & Singer 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization"
    (JMLR 12).

    It replaces `torch.optim.Adagrad`: same arguments, group keys, state names and checkpoints.
    A parameter gets its state at its first step, not when the optimizer is made.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch. eps is 0 or at least
            1e-16 (1e-11 with 8-bit states), as for `Adam`.
        foreach, fused: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (AdagradRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchAdagrad.__init__(
            self, params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, foreach,
            maximize=maximize, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self.state.clear()  # torch makes the states here; the step makes them, in their format
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
