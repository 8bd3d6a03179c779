"""SGD, with momentum. The class has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import sgd as torch_sgd
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule, Symbol, where
from accumfused.settings import SettingArguments, chosen, takes_settings

TorchSGD = torch_sgd.SGD  # some programs put ours into its place


class SgdRule(Rule):
    is_common = True
    name = "sgd"
    states: ClassVar[tuple[str, ...]] = ()
    counts_steps = False
    hypers = ("lr", "momentum", "dampening", "weight_decay", "maximize")
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": False}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        g = where(h.weight_decay != 0, g + p * h.weight_decay, g)
        incoming = where(step == 1, 1.0, 1.0 - h.dampening)
        buffers = tuple(buffer * h.momentum + g * incoming for buffer in states)
        direction = buffers[0] if buffers else g
        if buffers and h.nesterov:
            direction = g + direction * h.momentum
        return p - direction * h.lr, *buffers


class MomentumRule(SgdRule):
    name = "sgd_momentum"
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": True, "nesterov": False}
    states = ("momentum_buffer",)
    torch_states = ("momentum_buffer",)
    restarts = ("momentum_buffer",)
    counts_steps = True  # so that a skipped first step leaves the second one the first


class NesterovRule(MomentumRule):
    name = "sgd_nesterov"
    flags: ClassVar[Mapping[str, bool]] = {"has_momentum": True, "nesterov": True}


@takes_settings
class SGD(FusedOptimizer, TorchSGD):
    """SGD, with momentum, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        b <- momentum * b + (1 - dampening) * g            (the first step sets b = g)
        p <- p - lr * (nesterov ? g + momentum * b : b)     (without momentum: p - lr * g)

    torch's form of Sutskever et al. 2013 ("On the importance of initialization and momentum in deep learning").

    It replaces `torch.optim.SGD`: same arguments, group keys, state names and checkpoints (with momentum, the state
    also counts steps).

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, fused: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (SgdRule, MomentumRule, NesterovRule)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchSGD.__init__(  # no attribute of torch's modules: any may be this class by now
            self, params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self._configure(chosen(type(self).__name__, self.defaults, **settings))
