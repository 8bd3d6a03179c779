"""SGD, with momentum.

    g <- g + weight_decay * p
    b <- momentum * b + (1 - dampening) * g            (the first step sets b = g)
    p <- p - lr * (nesterov ? g + momentum * b : b)     (without momentum: p - lr * g)

torch's form of Sutskever et al. 2013 ("On the importance of initialization and momentum in deep learning").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rule import Rule, fp32
from accumfused.settings import SettingArguments, chosen, takes_settings

if TYPE_CHECKING:  # the package does not import Triton; its backend puts these names here when it needs them
    import triton.language as tl


class SgdRule(Rule):
    name = "sgd"
    states: ClassVar[tuple[str, ...]] = ()
    counts_steps = False
    hypers = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")

    @staticmethod
    def scalars(hyper: Mapping[str, float], step: Tensor, coefficient: Tensor) -> dict[str, Tensor]:
        numbers = {name: hyper[name] for name in ("lr", "momentum", "weight_decay")}
        # A number in where() would get torch's default dtype, so this is a tensor.
        later = torch.full_like(step, 1.0 - hyper["dampening"], dtype=torch.float32)
        incoming = torch.where(step == 1, torch.ones_like(later), later)
        return fp32(numbers, step.device) | {
            "coefficient": -coefficient if hyper["maximize"] else coefficient,
            "incoming": incoming,
            "nesterov": torch.tensor(bool(hyper["nesterov"]), device=step.device),
        }

    @staticmethod
    def update(s: Mapping[str, Tensor], param: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        g = grad * s["coefficient"]
        g = torch.where(s["weight_decay"] != 0, g + param * s["weight_decay"], g)
        if not states:
            return (param - g * s["lr"],)
        buffer = states[0] * s["momentum"] + g * s["incoming"]
        direction = torch.where(s["nesterov"], g + buffer * s["momentum"], buffer)
        return param - direction * s["lr"], buffer

    @staticmethod
    def triton_scalars(hyper: tl.tuple, step: tl.tensor, coefficient: tl.tensor) -> tl.tuple:
        coefficient = tl.where(hyper[5] != 0, coefficient * -1.0, coefficient)
        lr = hyper[0].to(tl.float32)
        weight_decay = hyper[4].to(tl.float32)
        momentum = hyper[1].to(tl.float32)
        incoming = tl.where(step == 1, 1.0, (1.0 - hyper[2]).to(tl.float32))
        nesterov = hyper[3] != 0
        return coefficient, lr, weight_decay, momentum, incoming, nesterov

    @staticmethod
    def triton_update(
        scalars: tl.tuple,
        p: tl.tensor,
        grad: tl.tensor,
        momentum_buffer: tl.tensor,
        unused1: tl.tensor,
        unused2: tl.tensor,
        states: tl.constexpr,
    ) -> tl.tuple:
        coefficient, lr, weight_decay, momentum, incoming, nesterov = scalars
        g = grad * coefficient
        g = tl.where(weight_decay != 0, g + p * weight_decay, g)
        if states == 0:
            p = p - g * lr
        else:
            momentum_buffer = momentum_buffer * momentum + g * incoming
            p = p - tl.where(nesterov, g + momentum_buffer * momentum, momentum_buffer) * lr
        return p, momentum_buffer, unused1, unused2


class MomentumRule(SgdRule):
    name = "sgd_momentum"
    states = ("momentum_buffer",)
    torch_states = ("momentum_buffer",)
    counts_steps = True  # so that a skipped first step leaves the second one the first


@takes_settings
class SGD(FusedOptimizer, torch.optim.SGD):
    """SGD, with accumulation, unscaling and clipping in the same pass.

    It replaces `torch.optim.SGD`: same arguments, group keys, state names and checkpoints (with momentum, the state
    also counts steps).

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        **settings: those of `accumfused.settings.Settings`.
        foreach, fused: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (SgdRule, MomentumRule)

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
        torch.optim.SGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self.configure(chosen(type(self).__name__, self.defaults, **settings))

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        return MomentumRule if group["momentum"] != 0 else SgdRule
