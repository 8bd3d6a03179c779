"""Adam and AdamW.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2          (amsgrad: v_max <- max(v_max, v), used in place of v below)
    p <- p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Adam adds weight_decay * p to g instead (L2). Kingma & Ba 2015 (arXiv:1412.6980); decoupled weight decay: Loshchilov &
Hutter 2019 (arXiv:1711.05101); AMSGrad: Reddi et al. 2018 (arXiv:1904.09237).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.formats.numeric import power, square_root
from accumfused.optimizer import FusedOptimizer
from accumfused.rule import Rule, fp32
from accumfused.settings import SettingArguments, chosen, takes_settings

if TYPE_CHECKING:  # the package does not import Triton; its backend puts these names here when it needs them
    import triton.language as tl

    from accumfused.backends.triton import numeric as triton_numeric


class AdamRule(Rule):
    name = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    torch_states: ClassVar[tuple[str, ...]] = ("step", *states)
    second_moments: ClassVar[tuple[str, ...]] = ("exp_avg_sq", "max_exp_avg_sq")
    counts_steps = True
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize")

    @staticmethod
    def scalars(hyper: Mapping[str, float], step: Tensor, coefficient: Tensor) -> dict[str, Tensor]:
        lr, beta1, beta2, weight_decay = (hyper[k] for k in ("lr", "beta1", "beta2", "weight_decay"))
        decoupled = bool(hyper["decoupled_weight_decay"])
        bias_correction1, bias_correction2 = 1.0 - power(beta1, step), 1.0 - power(beta2, step)
        root = square_root(bias_correction2.float()).double()
        numbers = {
            "beta1": beta1,
            "one_minus_beta1": 1.0 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1.0 - beta2,
            "eps": hyper["eps"],
            "weight_decay": 0.0 if decoupled else weight_decay,
            "decay": 1.0 - lr * weight_decay if decoupled else 1.0,
        }
        return fp32(numbers, step.device) | {
            "coefficient": -coefficient if hyper["maximize"] else coefficient,
            "step_size": (torch.full_like(root, lr) / bias_correction1).float(),
            "inverse_root": (torch.ones_like(root) / root).float(),
        }

    @staticmethod
    def update(s: Mapping[str, Tensor], param: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        exp_avg, exp_avg_sq, *rest = states
        g = grad * s["coefficient"]
        g = torch.where(s["weight_decay"] != 0, g + param * s["weight_decay"], g)
        exp_avg = exp_avg * s["beta1"] + g * s["one_minus_beta1"]
        exp_avg_sq = exp_avg_sq * s["beta2"] + (g * g) * s["one_minus_beta2"]
        rest = [torch.maximum(exp_avg_sq, max_exp_avg_sq) for max_exp_avg_sq in rest]
        second = rest[0] if rest else exp_avg_sq
        denominator = square_root(second) * s["inverse_root"] + s["eps"]
        param = param * s["decay"] - (exp_avg * s["step_size"]) / denominator
        return param, exp_avg, exp_avg_sq, *rest

    @staticmethod
    def triton_scalars(hyper: tl.tuple, step: tl.tensor, coefficient: tl.tensor) -> tl.tuple:
        coefficient = tl.where(hyper[6] != 0, coefficient * -1.0, coefficient)
        beta1 = hyper[1].to(tl.float32)
        one_minus_beta1 = (1.0 - hyper[1]).to(tl.float32)
        beta2 = hyper[2].to(tl.float32)
        one_minus_beta2 = (1.0 - hyper[2]).to(tl.float32)
        eps = hyper[3].to(tl.float32)
        weight_decay = tl.where(hyper[5] != 0, 0.0, hyper[4].to(tl.float32))
        decay = tl.where(hyper[5] != 0, (1.0 - hyper[0] * hyper[4]).to(tl.float32), 1.0)
        step_size = (hyper[0] / (1.0 - triton_numeric.power(hyper[1], step))).to(tl.float32)
        root = tl.sqrt_rn((1.0 - triton_numeric.power(hyper[2], step)).to(tl.float32))
        inverse_root = (1.0 / root.to(tl.float64)).to(tl.float32)
        return (
            coefficient, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size,
            inverse_root,
        )  # fmt: skip

    @staticmethod
    def triton_update(
        scalars: tl.tuple,
        p: tl.tensor,
        grad: tl.tensor,
        exp_avg: tl.tensor,
        exp_avg_sq: tl.tensor,
        max_exp_avg_sq: tl.tensor,
        states: tl.constexpr,
    ) -> tl.tuple:
        (
            coefficient, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size,
            inverse_root,
        ) = scalars  # fmt: skip
        g = grad * coefficient
        g = tl.where(weight_decay != 0, g + p * weight_decay, g)
        exp_avg = exp_avg * beta1 + g * one_minus_beta1
        exp_avg_sq = exp_avg_sq * beta2 + (g * g) * one_minus_beta2
        second = exp_avg_sq
        if states == 3:
            second = tl.where(exp_avg_sq > max_exp_avg_sq, exp_avg_sq, max_exp_avg_sq)
            second = tl.where(exp_avg_sq != exp_avg_sq, exp_avg_sq, second)  # a NaN propagates, as in torch.maximum
            max_exp_avg_sq = second
        denominator = tl.sqrt_rn(second) * inverse_root + eps
        p = p * decay - tl.div_rn(exp_avg * step_size, denominator)
        return p, exp_avg, exp_avg_sq, max_exp_avg_sq


class AmsgradRule(AdamRule):
    name = "adam_amsgrad"
    states = (*AdamRule.states, "max_exp_avg_sq")
    torch_states = ("step", *states)
    keeps_maximum = True


@takes_settings
class Adam(FusedOptimizer, torch.optim.Adam):
    """Adam, with accumulation, unscaling and clipping in the same pass.

    It replaces `torch.optim.Adam`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch; weight_decay is L2.
        **settings: those of `accumfused.settings.Settings`.
        foreach, fused, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        decoupled_weight_decay: as in torch: True makes it AdamW.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes;
            amsgrad with 8-bit states.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (AdamRule, AmsgradRule)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        torch.optim.Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        self.configure(chosen(type(self).__name__, self.defaults, **settings))

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        return AmsgradRule if group["amsgrad"] else AdamRule


@takes_settings
class AdamW(Adam, torch.optim.AdamW):
    """AdamW: `Adam` with decoupled weight decay.

    It replaces `torch.optim.AdamW`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch; parameters decay by 1 - lr * weight_decay.
        **settings: those of `accumfused.settings.Settings`.
        foreach, fused, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.

    Raises:
        ValueError, TypeError, RuntimeError: as `Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=True, **settings,
        )  # fmt: skip
