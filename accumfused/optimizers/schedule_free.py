"""Schedule-Free SGD and AdamW: an average of the iterates takes the place of a learning-rate schedule.

    y <- (1 - beta) z + beta x                       gradients are taken at y; x is the trained model
    z <- z - lr (d + weight_decay y)
    x <- (1 - c) x + c z                             c = w_t / (w_1 + ... + w_t),  w_t = t^r lr_max^weight_lr_power

d is g for SGD. For AdamW it is g / (sqrt(v / (1 - beta2^t)) + eps), with v <- beta2 v + (1 - beta2) g^2; with
inner_momentum a corrected mean of the gradients stands for g. lr rises linearly over warmup_steps, lr_max is its
maximum so far. Parameters hold y, the state z; x follows from both. Defazio et al. 2024, "The Road Less Scheduled"
(arXiv:2405.15682), with the authors' bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import optimizer_of
from accumfused.rules import Rule, float32, maximum, minimum, power, sqrt, where
from accumfused.saving import full_precision


class ScheduleFreeRule(Rule):
    # The sum of the weights w in units of the last one: a count, while lr_max stays and r is 0. The step's beta says
    # where x is; 1 before there is a weight, because x, y and z are the same then.
    tensor_states: ClassVar[Mapping[str, float]] = {"weight_sum": 0.0, "lr_max": 0.0, "last_beta": 1.0}
    needs_16_bits = "whose z is a copy of the weights"
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("momentum", "beta1"), (math.ulp(0.0), 1.0)),  # 0 has no x
        **dict.fromkeys(("warmup_steps", "r", "weight_lr_power"), (0.0, math.inf)),
        "inner_momentum": (0.0, 1.0),
    }

    @staticmethod
    def moved(h: Any, step: Any, beta: Any, y: Any, z: Any, direction: Any) -> tuple[Any, Any, tuple[Any, Any, Any]]:
        """The new y and z, and tensor states. The switch reads beta in fp32, so the step does too."""
        beta, lr = float32(beta), h.lr * minimum(step / maximum(h.warmup_steps, 1.0), 1.0)
        lr_max = maximum(float32(lr), h.lr_max)
        has_weight = lr_max > 0
        before = power(h.lr_max / where(has_weight, lr_max, 1.0), h.weight_lr_power) * power((step - 1.0) / step, h.r)
        weight_sum = where(has_weight, h.weight_sum * before + 1.0, 0.0)
        share = 1.0 / maximum(weight_sum, 1.0)

        z = where(h.weight_sum == 0, y, z)
        direction = where(h.weight_decay != 0, direction + y * h.weight_decay, direction)
        # x stays where it is if beta changes.
        y = y + (z - y) * (share + (1.0 - share) * (1.0 - beta / h.last_beta))
        y = y + direction * (lr * (beta * (1.0 - share) - 1.0))
        return y, z - direction * lr, (weight_sum, lr_max, where(has_weight, beta, 1.0))


class ScheduleFreeSgdRule(ScheduleFreeRule):
    """Schedule-Free SGD, with accumulation, unscaling and clipping in the same pass.

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.SGDScheduleFree`, and
    its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train() goes
    back.

    Args:
        lr: the learning rate; no schedule is needed.
        momentum: beta above, > 0 and < 1.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
    """

    name = "sgd_schedule_free"
    states = ("z",)
    torch_states = ("z",)
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0,
    }  # fmt: skip

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        y, z, sums = ScheduleFreeRule.moved(h, step, h.momentum, p, states[0], g)
        return y, z, *sums


class ScheduleFreeAdamWRule(ScheduleFreeRule):
    """Schedule-Free AdamW, with accumulation, unscaling and clipping in the same pass.

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.AdamWScheduleFree`,
    and its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train()
    goes back.

    Args:
        lr: the learning rate; no schedule is needed.
        betas: beta above, > 0, and the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
        inner_momentum: the decay of a mean of the gradients; 0: no mean is kept.
    """

    name = "adamw_schedule_free"
    states: ClassVar[tuple[str, ...]] = ("z", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    torch_states: ClassVar[tuple[str, ...]] = states
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 0.0025, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0,
        "weight_lr_power": 2.0,
    }  # fmt: skip
    flags: ClassVar[Mapping[str, bool]] = {"has_inner_momentum": False}

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        z, *means, exp_avg_sq = states
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        if h.has_inner_momentum:
            inner = h.inner_momentum
            means = [means[0] * inner + g * (1.0 - inner)]
            g = means[0] * (1.0 / (1.0 - power(inner, step)))
        direction = g / (sqrt(exp_avg_sq * (1.0 / (1.0 - power(h.beta2, step)))) + h.eps)
        y, z, sums = ScheduleFreeRule.moved(h, step, h.beta1, p, z, direction)
        return y, z, *means, exp_avg_sq, *sums


class ScheduleFreeAdamWInnerRule(ScheduleFreeAdamWRule):
    name = "adamw_schedule_free_inner"
    states = ("z", "exp_avg", "exp_avg_sq")
    torch_states = states
    hypers: ClassVar[Mapping[str, Any]] = {**ScheduleFreeAdamWRule.hypers, "inner_momentum": 0.0}
    flags: ClassVar[Mapping[str, bool]] = {"has_inner_momentum": True}


class ScheduleFree(FusedOptimizer):
    """The base of both: parameters hold y at first and after train(), and x, the trained model, after eval()."""

    def train(self) -> None:
        """Puts y, where gradients are taken, into the parameters. Call it after eval(), to go on training.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._switch(True, lambda x, states: states["z"] + (x - states["z"]) * states["last_beta"])

    def eval(self) -> None:
        """Puts x, the trained model, into the parameters. Call it before evaluation, and to save the model.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._switch(False, lambda y, states: states["z"] + (y - states["z"]) / states["last_beta"])

    def _switch(self, train_mode: bool, change: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> None:
        groups = [group for group in self.param_groups if group["train_mode"] != train_mode]
        if groups:
            full_precision.rewrite(self, {id(param) for group in groups for param in group["params"]}, change)
        for group in groups:
            group["train_mode"] = train_mode

    def _refuse_gradients(self) -> None:
        """Refuses those of the averaged weights.

        Raises:
            RuntimeError: eval() was called, and train() was not.
            ValueError: a group's momentum, or betas[0], is not between 0 and 1. (One on a GPU is not read.)
        """
        for group in self.param_groups:
            beta = group["momentum"] if "momentum" in group else group["betas"][0]
            if not (isinstance(beta, Tensor) and beta.device.type != "cpu") and not 0.0 < beta < 1.0:
                raise ValueError(f"Invalid momentum, or betas[0], of a group: {float(beta)}; it must be > 0 and < 1")
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                "the parameters are the averaged weights, where no gradient is to be taken; call optimizer.train() "
                "before the forward pass of a training step"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which is to be trained."""
        self.defaults["train_mode"] = True
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("train_mode", True)
            theirs = {name: group.pop(name, None) for name in ("k", "weight_sum", "lr_max", "scheduled_lr", "foreach")}
            steps = theirs["k"]  # the authors count for a group
            if not steps:
                continue
            lr_max, beta = theirs["lr_max"], group["momentum"] if "momentum" in group else group["betas"][0]
            weight = steps ** group["r"] * lr_max ** group["weight_lr_power"]
            numbers = {"weight_sum": theirs["weight_sum"] / (weight or 1.0), "lr_max": lr_max, "last_beta": beta}
            for param in group["params"]:
                if param in self.state:
                    for name, number in {"step": steps, **numbers}.items():
                        self.state[param].setdefault(name, torch.tensor(float(number), device=param.device))


SGDScheduleFree = optimizer_of(ScheduleFreeSgdRule, name="SGDScheduleFree", base=ScheduleFree)
AdamWScheduleFree = optimizer_of(
    ScheduleFreeAdamWRule, ScheduleFreeAdamWInnerRule, name="AdamWScheduleFree", base=ScheduleFree
)
