"""Adam and AdamW. The classes have the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.adam import Adam as TorchAdam
from torch.optim.adamw import AdamW as TorchAdamW
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import MAXIMUM_RATCHETS, Rule, Symbol, agree, float32, maximum, named, power, sqrt, where
from accumfused.settings import SettingArguments, chosen, takes_settings


class AdamRule(Rule):
    is_common = True
    name = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    second_moments: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    eps_beside = "root"
    torch_states: ClassVar[tuple[str, ...]] = ("step", *states)
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False,
        "maximize": False,
    }  # fmt: skip
    flags: ClassVar[Mapping[str, bool]] = {
        "amsgrad": False, "cautious": False, "cautious_weight_decay": False, "is_cautious": False,
    }  # fmt: skip

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        exp_avg, exp_avg_sq, *maximum_so_far = states
        is_decoupled = h.decoupled_weight_decay != 0
        weight_decay = where(is_decoupled, 0.0, h.weight_decay)
        decay = where(is_decoupled, 1.0 - h.lr * h.weight_decay, 1.0)
        step_size = h.lr / (1.0 - power(h.beta1, step))
        inverse_root = 1.0 / float32(sqrt(float32(1.0 - power(h.beta2, step))))
        named(weight_decay=weight_decay, decay=decay, step_size=step_size, inverse_root=inverse_root)
        named(one_minus_beta1=1.0 - h.beta1, one_minus_beta2=1.0 - h.beta2)  # csrc/cuda/step_packed.cuh has Adam, too

        g = where(weight_decay != 0, g + p * weight_decay, g)
        exp_avg = exp_avg * h.beta1 + g * (1.0 - h.beta1)
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        maxima = [maximum(exp_avg_sq, max_exp_avg_sq) for max_exp_avg_sq in maximum_so_far]
        denominator = sqrt(maxima[0] if h.amsgrad else exp_avg_sq) * inverse_root + h.eps
        update = (exp_avg * step_size) / denominator
        if h.is_cautious:
            update = update * where(agree(exp_avg, g), 1.0, where(h.cautious != 0, 0.0, 1.0))
            decay = where(agree(update, -p), where(h.cautious_weight_decay != 0, 1.0, decay), decay)
        return p * decay - update, exp_avg, exp_avg_sq, *maxima


class AmsgradRule(AdamRule):
    name = "adam_amsgrad"
    states = (*AdamRule.states, "max_exp_avg_sq")
    second_moments = ("exp_avg_sq", "max_exp_avg_sq")
    torch_states = ("step", *states)
    flags: ClassVar[Mapping[str, bool]] = {**AdamRule.flags, "amsgrad": True}
    needs_16_bits = MAXIMUM_RATCHETS


class CautiousAdamRule(AdamRule):
    """Both cautious options: one kernel, in which numbers switch them."""

    is_common = False
    name = "adam_cautious"
    hypers: ClassVar[Mapping[str, Any]] = {**AdamRule.hypers, "cautious": False, "cautious_weight_decay": False}
    flags: ClassVar[Mapping[str, bool]] = {"amsgrad": False, "is_cautious": True}

    @classmethod
    def fits(cls, group: Mapping[str, Any]) -> bool:
        if group["amsgrad"]:
            raise ValueError("amsgrad=True has no cautious form; leave one of both out")
        if group.get("cautious_weight_decay") and not group["decoupled_weight_decay"]:
            raise ValueError("cautious_weight_decay needs decoupled_weight_decay=True, which AdamW has")
        return True  # the others have no cautious option


@takes_settings
class Adam(FusedOptimizer, TorchAdam):
    """Adam, with accumulation, unscaling and clipping in the same pass.

        g <- g + weight_decay * p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2          (amsgrad: v_max <- max(v_max, v), used in place of v below)
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Kingma & Ba 2015 (arXiv:1412.6980); AMSGrad: Reddi et al. 2018 (arXiv:1904.09237).

    It replaces `torch.optim.Adam`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch; weight_decay is L2. eps is 0 or at least 1e-16
            (1e-11 with 8-bit states; fp64 parameters take any): second moments below 2^-126 (in 8-bit blocks 2^-94) are
            stored as 0. With eps=0 gradients whose squares are smaller make steps that are too large.
        foreach, fused, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        decoupled_weight_decay: as in torch: True makes it AdamW.
        cautious: True moves only elements whose update and gradient have the same sign (Liang et al. 2024,
            arXiv:2411.16085), without the paper's division by the share of such elements, which is a sum over the
            tensor: updates are smaller by it.
        cautious_weight_decay: True leaves out the decay of elements that the update moves away from 0 (Chen et al.
            2025, arXiv:2510.12402); needs decoupled weight decay. Groups have the key of an option only where it is on.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes;
            amsgrad with 8-bit states or a cautious option.
        RuntimeError: a backend asked for by name cannot run; fused with foreach, as in torch.
    """

    rules = (AdamRule, AmsgradRule, CautiousAdamRule)

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
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        TorchAdam.__init__(  # no attribute of torch's modules: any may be this class by now
            self, params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        for name, value in (("cautious", cautious), ("cautious_weight_decay", cautious_weight_decay)):
            if value:  # else the groups are torch's
                for options in (self.defaults, *self.param_groups):
                    options.setdefault(name, value)
        self._configure(chosen(type(self).__name__, self.defaults, **settings))


@takes_settings
class AdamW(Adam, TorchAdamW):
    """AdamW, with accumulation, unscaling and clipping in the same pass: `Adam` with decoupled weight decay.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2          (amsgrad: v_max <- max(v_max, v), used in place of v below)
        p <- p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Loshchilov & Hutter 2019 (arXiv:1711.05101).

    It replaces `torch.optim.AdamW`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch; parameters decay by 1 - lr * weight_decay. eps is
            0 or at least 1e-16 (1e-11 with 8-bit states), as for `Adam`.
        foreach, fused, capturable: unused; the groups keep them, because torch's own optimizer reads them.
        differentiable: not supported.
        cautious: True moves only elements whose update and gradient have the same sign, as in `Adam`.
        cautious_weight_decay: True leaves out the decay of elements that the update moves away from 0.
        **settings: those of `accumfused.settings.Settings`.

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
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=True, cautious=cautious, cautious_weight_decay=cautious_weight_decay, **settings,
        )  # fmt: skip
