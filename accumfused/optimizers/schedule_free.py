"""Schedule-Free SGD and AdamW: an average of the iterates takes the place of a learning-rate schedule.

The classes have the formulas. Parameters hold y, where gradients are taken, and the state holds z; x, the trained
model, follows from both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.core.engine import Engine
from accumfused.core.norm import Measured
from accumfused.core.plan import Plan
from accumfused.core.protocol import Commit, Hypers, Number, Outcome, OwnStep, on_device, run
from accumfused.core.rows import Grads
from accumfused.eager import without_grad
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.making import construct
from accumfused.rules import Rule, Symbol, float32, power, sqrt, where
from accumfused.saving import full_precision
from accumfused.settings import SettingArguments, takes_settings


class ScheduleFreeRule(Rule):
    # What the group has counted before this step, and c; h.lr is what the warmup makes of it: see `_counted`.
    derived = ("weight_sum", "last_beta", "share")
    counts = ("k", "weight_sum", "lr_max")
    needs_16_bits = "whose z is a copy of the weights"
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("momentum", "beta1"), (math.ulp(0.0), 1.0)),  # 0 has no x
        **dict.fromkeys(("warmup_steps", "r", "weight_lr_power"), (0.0, math.inf)),
        "inner_momentum": (0.0, 1.0),
    }

    @classmethod
    def hyper(cls, group: Mapping[str, Any], name: str) -> Any:
        return group.get(name, 0.0) if name in cls.derived else super().hyper(group, name)

    @staticmethod
    def moved(h: Any, step: Symbol, beta: Any, y: Symbol, z: Symbol, direction: Symbol) -> tuple[Symbol, Symbol]:
        """Computes the new y and z. The switch reads beta in fp32, so the step does too."""
        beta, last_beta = float32(beta), float32(h.last_beta)
        z = where((step == 1) | (h.weight_sum == 0), y, z)
        direction = where(h.weight_decay != 0, direction + y * h.weight_decay, direction)
        # x stays where it is if beta changes.
        y = y + (z - y) * (h.share + (1.0 - h.share) * (1.0 - beta / last_beta))
        y = y + direction * (h.lr * (beta * (1.0 - h.share) - 1.0))
        return y, z - direction * h.lr


class ScheduleFreeSgdRule(ScheduleFreeRule):
    name = "sgd_schedule_free"
    states = ("z",)
    torch_states = ("z",)
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0,
    }  # fmt: skip

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        return ScheduleFreeRule.moved(h, step, h.momentum, p, states[0], g)


class ScheduleFreeAdamWRule(ScheduleFreeRule):
    name = "adamw_schedule_free"
    states: ClassVar[tuple[str, ...]] = ("z", "exp_avg_sq")
    second_moments = ("exp_avg_sq",)
    eps_beside = "root"
    torch_states: ClassVar[tuple[str, ...]] = states
    hypers: ClassVar[Mapping[str, Any]] = {
        "lr": 0.0025, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0,
        "weight_lr_power": 2.0,
    }  # fmt: skip
    flags: ClassVar[Mapping[str, bool]] = {"has_inner_momentum": False}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        z, *means, exp_avg_sq = states
        exp_avg_sq = exp_avg_sq * h.beta2 + (g * g) * (1.0 - h.beta2)
        if h.has_inner_momentum:
            inner = h.inner_momentum
            means = [means[0] * inner + g * (1.0 - inner)]
            g = means[0] * (1.0 / (1.0 - power(inner, step)))
        direction = g / (sqrt(exp_avg_sq * (1.0 / (1.0 - power(h.beta2, step)))) + h.eps)
        y, z = ScheduleFreeRule.moved(h, step, h.beta1, p, z, direction)
        return y, z, *means, exp_avg_sq


class ScheduleFreeAdamWInnerRule(ScheduleFreeAdamWRule):
    name = "adamw_schedule_free_inner"
    states = ("z", "exp_avg", "exp_avg_sq")
    torch_states = states
    hypers: ClassVar[Mapping[str, Any]] = {**ScheduleFreeAdamWRule.hypers, "inner_momentum": 0.0}
    flags: ClassVar[Mapping[str, bool]] = {"has_inner_momentum": True}


# What a group counts, under the authors' names, and where it begins: steps, the sum of the weights w, the largest lr.
# The last step's beta says where x is. In a group they are tensors, fp64, shape [].
SUMS = {"k": 0.0, "weight_sum": 0.0, "lr_max": 0.0, "last_beta": 1.0}


def _beta(group: Mapping[str, Any]) -> Number:
    return group["momentum"] if "momentum" in group else group["betas"][0]  # type: ignore[no-any-return]


def _step(optimizer: Any, engine: Engine, measured: Measured) -> None:
    engine.update(measured, partial(_update, optimizer.param_groups))


def _update(
    groups: Sequence[dict[str, Any]], plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit
) -> None:
    """Steps the optimizer's plan, as `Backend.step`, and counts the step in the groups that have a gradient."""
    hypers, ends, can_read = [*hypers], [*commit.ends], _can_read(plan)
    skipped = outcome.values.tolist()[2] if can_read else outcome.skipped
    for index in {row.group for row, grad in zip(plan.rows, grads, strict=True) if grad is not None}:
        group = groups[index]
        if can_read:
            counted, numbers = _counted(group, float, max)
            sums = {} if skipped else counted
        else:
            at_hand = partial(_at_hand, device=plan.device)
            group.update({name: at_hand(group[name]) for name in SUMS})
            counted, numbers = _counted(group, at_hand, torch.clamp)
            sums = {name: torch.where(skipped, group[name], number) for name, number in counted.items()}
        if can_read:  # no operation of torch, which could fail, comes after the kernel
            new = {name: torch.full_like(group[name], number) for name, number in sums.items()}
            ends.append(partial(group.update, new))
        else:  # where a graph's replay writes them
            ends += [partial(group[name].fill_, number) for name, number in sums.items()]
        hyper_numbers = zip(plan.rules[index].hyper_names, hypers[index], strict=True)
        hypers[index] = tuple(numbers.get(name, number) for name, number in hyper_numbers)
    plan.backend.step(plan, grads, hypers, outcome, Commit(ends, commit.begins))


def _can_read(plan: Plan) -> bool:
    """Tells whether the host can read the plan's values, and whether a step is skipped, without a wait for a GPU."""
    return plan.device.type == "cpu"


def _at_hand(number: Number, device: torch.device) -> Number:
    return on_device(number, device, torch.float64) if isinstance(number, Tensor) else number


def _counted(
    group: Mapping[str, Any], read: Callable[[Number], Any], at_least: Callable[[Any, Any], Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Computes the group's `SUMS` after its next step, and its kernel's numbers, by the names of hyper-parameters."""
    names = *SUMS, "lr", "warmup_steps", "r", "weight_lr_power"
    k, last_weight_sum, lr_max, last_beta, lr, warmup_steps, r, power_of_lr = (read(group[name]) for name in names)
    k = k + 1.0
    lr = k / at_least(k, warmup_steps) * lr
    has_moved = lr_max > 0  # else x, y and z are one point, and a step's y is to be it
    lr_max = at_least(lr_max, lr)
    weight = k**r * lr_max**power_of_lr  # 0^0 is 1, as in the authors' code: steps with lr 0 may count
    weight_sum = last_weight_sum + weight
    share = weight / at_least(weight_sum, sys.float_info.min)
    counted = {"k": k, "weight_sum": weight_sum, "lr_max": lr_max, "last_beta": read(_beta(group))}
    return counted, {"lr": lr, "share": share, "weight_sum": has_moved * last_weight_sum, "last_beta": last_beta}


class ScheduleFree(FusedOptimizer):
    """The base of both: parameters hold y at first and after train(), and x, the trained model, after eval().

    A group has one average, as in the authors' code. It counts the steps in which one of its parameters has a gradient.
    In such a step the others rest: their x, y and z stay. (x moves if beta changes meanwhile.) A parameter whose first
    gradient is late begins there with x = y = z and takes the group's c, as after gradients of zero; AdamW corrects its
    second moment by its own number of steps, where the authors take the group's.
    """

    _own_step: ClassVar[OwnStep | None] = staticmethod(_step)

    def train(self) -> None:
        """Puts y, where gradients are taken, into the parameters. Call it after eval(), to go on training.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._switch(True, lambda x, z, beta: z + (x - z) * beta)

    def eval(self) -> None:
        """Puts x, the trained model, into the parameters. Call it before evaluation, and to save the model.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._switch(False, lambda y, z, beta: z + (y - z) / beta)

    def _switch(self, train_mode: bool, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Moves each parameter, and notes it in the same call: a switch that failed can be repeated, or taken back."""
        moved: set[int] = self.__dict__.setdefault("_moved", set())  # ids of parameters not in their group's mode
        moved &= {id(param) for group in self.param_groups for param in group["params"]}  # others are removed
        for group in self.param_groups:

            def changed(weights: Tensor, states: Mapping[str, Tensor], group: dict[str, Any] = group) -> Tensor:
                lr_max, beta = (group[name].to(weights) for name in ("lr_max", "last_beta"))
                has_z = (lr_max > 0) & (states["step"] > 0)
                return torch.where(has_z, change(weights, states["z"], beta), weights)

            params = set(map(id, group["params"]))
            is_there = group["train_mode"] == train_mode
            left = params & moved if is_there else params - moved
            if left:
                without_grad(full_precision.rewrite, self, left, changed, moved.discard if is_there else moved.add)
            run([partial(moved.difference_update, params), partial(group.__setitem__, "train_mode", train_mode)])

    def _refuse_half_switched(self) -> None:
        """Raises where some parameters are the averaged weights, and others those to train with."""
        if self.__dict__.get("_moved"):
            raise RuntimeError(
                "eval() or train() was interrupted, or failed, so some parameters are averaged weights and others are "
                "not; call it again"
            )

    def state_dict(self, *, window: bool = True) -> dict[str, Any]:
        """As FusedOptimizer's.

        Raises:
            RuntimeError: as there; or eval() or train() was interrupted: call it again.
        """
        self._refuse_half_switched()
        return super().state_dict(window=window)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_half_switched()
        return super().__getstate__()

    def _refuse_gradients(self) -> None:
        """Refuses gradients of the averaged weights.

        Raises:
            RuntimeError: eval() was called, and train() was not; or one of them was interrupted.
            ValueError: a group's momentum, or betas[0], is not between 0 and 1. (One on a GPU is not read.)
        """
        for group in self.param_groups:
            beta = _beta(group)
            if not (isinstance(beta, Tensor) and beta.device.type != "cpu") and not 0.0 < beta < 1.0:
                raise ValueError(f"Invalid momentum, or betas[0], of a group: {float(beta)}; it must be > 0 and < 1")
        self._refuse_half_switched()
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                "the parameters are the averaged weights, where no gradient is to be taken; call optimizer.train() "
                "before the forward pass of a training step"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which is to be trained."""
        self.defaults["train_mode"] = True
        super().add_param_group(param_group)
        _complete(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("train_mode", True)
            if "last_beta" not in group:  # the authors' code counts steps for a group alone
                for name in ("scheduled_lr", "foreach"):
                    group.pop(name, None)
                for entries in [self.state[param] for param in group["params"] if param in self.state]:
                    entries.setdefault("step", torch.tensor(float(group.get("k", 0.0))))
                group["last_beta"] = _beta(group)
            _complete(group)


def _complete(group: dict[str, Any]) -> None:
    """Makes tensors of the group's `SUMS`, which the authors' code keeps as numbers."""
    for name, start in SUMS.items():
        group[name] = torch.as_tensor(group.get(name, start), dtype=torch.float64)


@takes_settings
class SGDScheduleFree(ScheduleFree):
    """Schedule-Free SGD, with accumulation, unscaling and clipping in the same pass.

        y <- (1 - beta) z + beta x                       gradients are taken at y; x is the trained model
        z <- z - lr (d + weight_decay y)
        x <- (1 - c) x + c z                             c = w_t / (w_1 + ... + w_t),  w_t = t^r lr_max^weight_lr_power

    d is g, and beta the momentum. lr rises linearly over warmup_steps, lr_max is its maximum so far. Defazio et al.
    2024, "The Road Less Scheduled" (arXiv:2405.15682).

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.SGDScheduleFree`, and
    its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train() goes
    back.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate; no schedule is needed.
        momentum: beta above, > 0 and < 1.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes; 8-bit states.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (ScheduleFreeSgdRule,)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "warmup_steps": warmup_steps, "r": r,
            "weight_lr_power": weight_lr_power,
        }  # fmt: skip
        construct(self, params, arguments, settings)


@takes_settings
class AdamWScheduleFree(ScheduleFree):
    """Schedule-Free AdamW, with accumulation, unscaling and clipping in the same pass.

        v <- beta2 v + (1 - beta2) g^2
        d <- g / (sqrt(v / (1 - beta2^t)) + eps)
        y <- (1 - beta) z + beta x                       gradients are taken at y; x is the trained model
        z <- z - lr (d + weight_decay y)
        x <- (1 - c) x + c z                             c = w_t / (w_1 + ... + w_t),  w_t = t^r lr_max^weight_lr_power

    beta is betas[0]. With inner_momentum a corrected mean of the gradients stands for g in d. lr rises linearly over
    warmup_steps, lr_max is its maximum so far. Defazio et al. 2024, "The Road Less Scheduled" (arXiv:2405.15682), with
    the authors' bias correction.

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.AdamWScheduleFree`,
    and its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train()
    goes back.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate; no schedule is needed.
        betas: beta above, > 0, and the decay of the second moment.
        eps: added to the root of the second moment; 0 or at least 1e-16, as for `Adam`.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
        inner_momentum: the decay of a mean of the gradients; 0: no mean is kept.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes; 8-bit states.
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (ScheduleFreeAdamWInnerRule, ScheduleFreeAdamWRule)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.0025,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        inner_momentum: float = 0.0,
        **settings: Unpack[SettingArguments],
    ) -> None:
        arguments = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps, "r": r,
            "weight_lr_power": weight_lr_power, "inner_momentum": inner_momentum,
        }  # fmt: skip
        construct(self, params, arguments, settings)
