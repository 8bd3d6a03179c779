"""Every rule with every option, one row each: a new optimizer needs one new row, and no new test.

Large learning rates, small betas and weight decay that is not zero, so that an error of any kind shows in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import inside
import oracle
import torch
from torch import Tensor

import accumfused as af
from accumfused.rules import Rule

UNUSED = ("foreach", "fused", "capturable", "differentiable", "train_mode")  # no formula takes them


class Own(torch.optim.RMSprop):
    """A user's subclass, which keeps its own step when it is fused."""


class OwnAdagrad(torch.optim.Adagrad):
    """Another one, whose states are made with it."""


@dataclass(frozen=True)
class Optimizer:
    """What tests have to know of an optimizer of the package."""

    ours: type[af.FusedOptimizer]
    torch_class: type[torch.optim.Optimizer] | None  # the torch optimizer of the same name
    oracle: Callable[..., Tensor]  # its formula in float64
    other_options: dict[str, Any]  # of a second group, beside any case's

    def peer(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """torch's plain loop over tensors; where torch has no such optimizer, one over the formula in float64."""
        if self.torch_class is not None:
            return self.torch_class(params, foreach=False, **options)
        defaults = {**self.ours([torch.zeros(1, requires_grad=True)]).defaults, **options}
        known = {name: value for name, value in defaults.items() if name not in UNUSED}
        return oracle.Loop(self.oracle, params, known)


OPTIMIZERS = {
    "SGD": Optimizer(
        af.SGD, torch.optim.SGD, oracle.sgd, {"lr": 0.07, "momentum": 0.0, "nesterov": False, "weight_decay": 0.5}
    ),
    "Adam": Optimizer(
        af.Adam, torch.optim.Adam, oracle.adam,
        {"lr": 0.07, "betas": (0.2, 0.9), "weight_decay": 0.5, "amsgrad": False},
    ),
    "AdamW": Optimizer(
        af.AdamW, torch.optim.AdamW, oracle.adamw,
        {"lr": 0.07, "betas": (0.2, 0.9), "weight_decay": 0.5, "amsgrad": True},
    ),
    "Lion": Optimizer(af.Lion, None, oracle.lion, {"lr": 0.07, "betas": (0.2, 0.9), "weight_decay": 0.9}),
    "RMSprop": Optimizer(
        af.RMSprop, torch.optim.RMSprop, oracle.of_torch(torch.optim.RMSprop),
        {"lr": 0.07, "alpha": 0.8, "eps": 0.1, "weight_decay": 0.5, "momentum": 0.0, "centered": False},
    ),
    "Adagrad": Optimizer(
        af.Adagrad, torch.optim.Adagrad, oracle.of_torch(torch.optim.Adagrad),
        {"lr": 0.07, "lr_decay": 0.3, "weight_decay": 0.5, "initial_accumulator_value": 0.9, "eps": 1e-2},
    ),
    "Adadelta": Optimizer(
        af.Adadelta, torch.optim.Adadelta, oracle.of_torch(torch.optim.Adadelta),
        {"lr": 0.7, "rho": 0.4, "eps": 0.1, "weight_decay": 0.5},
    ),
    "Adamax": Optimizer(
        af.Adamax, torch.optim.Adamax, oracle.of_torch(torch.optim.Adamax),
        {"lr": 0.07, "betas": (0.2, 0.9), "eps": 1e-2, "weight_decay": 0.5},
    ),
    "RAdam": Optimizer(
        af.RAdam, torch.optim.RAdam, oracle.of_torch(torch.optim.RAdam),
        {"lr": 0.07, "betas": (0.2, 0.95), "weight_decay": 0.5, "decoupled_weight_decay": True},
    ),
    "Adan": Optimizer(
        af.Adan, None, oracle.adan, {"lr": 0.07, "betas": (0.2, 0.4, 0.9), "weight_decay": 0.5, "no_prox": True}
    ),
    "AdEMAMix": Optimizer(
        af.AdEMAMix, None, oracle.ademamix,
        {"lr": 0.07, "betas": (0.2, 0.9, 0.99), "weight_decay": 0.5, "alpha_warmup": 2, "beta3_warmup": None},
    ),
    "Signum": Optimizer(af.Signum, None, oracle.signum, {"lr": 0.07, "momentum": 0.2, "weight_decay": 0.9}),
    "SGDScheduleFree": Optimizer(
        af.SGDScheduleFree, None, oracle.sgd_schedule_free,
        {"lr": 0.07, "momentum": 0.3, "weight_decay": 0.5, "warmup_steps": 0, "r": 0.5, "weight_lr_power": 1.0},
    ),
    "AdamWScheduleFree": Optimizer(
        af.AdamWScheduleFree, None, oracle.adamw_schedule_free,
        {"lr": 0.07, "betas": (0.3, 0.9), "weight_decay": 0.5, "warmup_steps": 5, "r": 1.5},
    ),
}  # fmt: skip
# Options that torch's class of the name has not, beside a group without them.
CAUTIOUS = {
    f"cautious {name}": replace(
        OPTIMIZERS[name], torch_class=None,
        other_options=OPTIMIZERS[name].other_options | {"amsgrad": False, "cautious": False} | decay,
    )
    for name, decay in (("Adam", {}), ("AdamW", {"cautious_weight_decay": False}))
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One optimizer with one set of options."""

    name: str
    of: Optimizer
    options: dict[str, Any]

    @property
    def rule(self) -> str:
        """The name of its kernels' arithmetic."""
        return self._rule.name

    @property
    def states(self) -> tuple[str, ...]:
        """What it keeps for each element."""
        return self._rule.states

    @property
    def is_common(self) -> bool:
        """Whether nvcc's kernels, and so the emulation of them, have it."""
        return self._rule.is_common

    def start(self, state: str) -> float:
        """What a state begins at."""
        group = self.make([torch.zeros(1, requires_grad=True)]).param_groups[0]
        return float(inside.rule_of(self.of.ours, group).start(group, state))

    @property
    def second_moments(self) -> tuple[str, ...]:
        return self._rule.second_moments

    @property
    def needs_16_bits(self) -> bool:
        return bool(self._rule.needs_16_bits)

    @property
    def _rule(self) -> type[Rule]:
        return inside.rule_of(self.of.ours, self.make([torch.zeros(1, requires_grad=True)]).param_groups[0])

    def make(self, params: Iterable[Tensor], backend: Any = "auto", **settings: Any) -> af.FusedOptimizer:
        """The optimizer. Args: backend: a backend's name, or a backend object; settings: max_grad_norm, nonfinite."""
        name = backend if isinstance(backend, str) else "auto"
        optimizer = self.of.ours(params, **self.options, backend=name, **settings)
        if not isinstance(backend, str):
            inside.use_backend(optimizer, backend)
        return optimizer


def _case(name: str, optimizer: str, **options: Any) -> Case:
    return Case(name, (OPTIMIZERS | CAUTIOUS)[optimizer], options)


CASES = (
    _case("sgd", "SGD", lr=0.3),
    _case("sgd_weight_decay", "SGD", lr=0.3, weight_decay=0.2),
    _case("sgd_maximize", "SGD", lr=0.3, weight_decay=0.2, maximize=True),
    _case("sgd_momentum", "SGD", lr=0.3, momentum=0.6, weight_decay=0.2),
    _case("sgd_dampening", "SGD", lr=0.3, momentum=0.6, dampening=0.4, weight_decay=0.2),
    _case("sgd_nesterov", "SGD", lr=0.3, momentum=0.6, nesterov=True, weight_decay=0.2),
    _case("sgd_momentum_maximize", "SGD", lr=0.3, momentum=0.6, dampening=0.4, weight_decay=0.2, maximize=True),
    _case("adam", "Adam", lr=0.1, betas=(0.5, 0.7), eps=1e-3),
    _case("adam_weight_decay", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.3),
    _case("adam_amsgrad", "Adam", lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3, amsgrad=True),
    _case("adam_maximize", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, maximize=True),
    _case("adam_decoupled", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, decoupled_weight_decay=True),
    _case("adamw", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4),
    _case("adamw_no_decay", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.0, eps=1e-3),
    _case("adamw_amsgrad", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True),
    _case("adamw_maximize", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True, maximize=True),
    _case("lion", "Lion", lr=0.05, betas=(0.6, 0.8)),
    _case("lion_weight_decay", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5),
    _case("lion_maximize", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5, maximize=True),
    _case("rmsprop", "RMSprop", lr=0.1, alpha=0.7, eps=0.1),
    _case("rmsprop_weight_decay", "RMSprop", lr=0.1, alpha=0.7, eps=0.1, weight_decay=0.3),
    _case("rmsprop_momentum", "RMSprop", lr=0.1, alpha=0.7, eps=0.1, weight_decay=0.3, momentum=0.6),
    _case("rmsprop_centered", "RMSprop", lr=0.1, alpha=0.8, eps=0.1, weight_decay=0.3, centered=True),
    _case(
        "rmsprop_momentum_centered", "RMSprop", lr=0.1, alpha=0.8, eps=0.1, weight_decay=0.3, momentum=0.6,
        centered=True, maximize=True,
    ),
    _case("adagrad", "Adagrad", lr=0.3, eps=1e-3),
    _case("adagrad_decays", "Adagrad", lr=0.3, lr_decay=0.4, weight_decay=0.3, initial_accumulator_value=0.5, eps=1e-3),
    _case("adagrad_maximize", "Adagrad", lr=0.3, lr_decay=0.4, weight_decay=0.3, eps=1e-3, maximize=True),
    _case("adadelta", "Adadelta", lr=0.9, rho=0.6, eps=1e-2),
    _case("adadelta_weight_decay", "Adadelta", lr=0.9, rho=0.6, eps=1e-2, weight_decay=0.3),
    _case("adadelta_maximize", "Adadelta", lr=0.9, rho=0.6, eps=1e-2, weight_decay=0.3, maximize=True),
    _case("adamax", "Adamax", lr=0.1, betas=(0.5, 0.7), eps=1e-3),
    _case("adamax_weight_decay", "Adamax", lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3),
    _case("adamax_maximize", "Adamax", lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3, maximize=True),
    _case("radam", "RAdam", lr=0.1, betas=(0.5, 0.9), eps=1e-3),
    _case("radam_weight_decay", "RAdam", lr=0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3),
    _case("radam_decoupled", "RAdam", lr=0.1, betas=(0.5, 0.9), weight_decay=0.4, decoupled_weight_decay=True),
    _case("radam_maximize", "RAdam", lr=0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3, maximize=True),
    _case("adan", "Adan", lr=0.1, betas=(0.5, 0.6, 0.7), eps=1e-3, weight_decay=0.4),
    _case("adan_no_prox", "Adan", lr=0.1, betas=(0.5, 0.6, 0.7), weight_decay=0.4, no_prox=True),
    _case("adan_maximize", "Adan", lr=0.1, betas=(0.5, 0.6, 0.7), maximize=True),
    _case("ademamix", "AdEMAMix", lr=0.1, betas=(0.5, 0.7, 0.9), eps=1e-3, weight_decay=0.4),
    _case(
        "ademamix_warmup", "AdEMAMix", lr=0.1, betas=(0.5, 0.7, 0.9), alpha=3.0, alpha_warmup=3, beta3_warmup=4,
        maximize=True,
    ),
    _case("signum", "Signum", lr=0.05, momentum=0.6, weight_decay=0.3),
    _case("signum_maximize", "Signum", lr=0.05, momentum=0.6, maximize=True),
    _case("sgd_schedule_free", "SGDScheduleFree", lr=0.3, momentum=0.6, weight_decay=0.2),
    _case("sgd_schedule_free_warmup", "SGDScheduleFree", lr=0.3, momentum=0.7, warmup_steps=4, r=1.0),
    _case("adamw_schedule_free", "AdamWScheduleFree", lr=0.1, betas=(0.6, 0.7), eps=1e-3, weight_decay=0.4),
    _case(
        "adamw_schedule_free_warmup", "AdamWScheduleFree", lr=0.1, betas=(0.6, 0.7), weight_decay=0.4, warmup_steps=3,
        r=0.7, weight_lr_power=1.5,
    ),
    _case(
        "adamw_schedule_free_inner", "AdamWScheduleFree", lr=0.1, betas=(0.6, 0.7), eps=0.1, weight_decay=0.4,
        warmup_steps=2, inner_momentum=0.5,
    ),
    _case("adam_cautious", "cautious Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, cautious=True),
    _case("adamw_cautious", "cautious AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, cautious=True, maximize=True),
    _case(
        "adamw_cautious_decay", "cautious AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4,
        cautious_weight_decay=True,
    ),
    _case(
        "adamw_both_cautious", "cautious AdamW", lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.4, cautious=True,
        cautious_weight_decay=True,
    ),
    _case("lion_cautious", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5, cautious=True),
    _case("lion_cautious_decay", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5, cautious_weight_decay=True),
)  # fmt: skip


def one_of_each(key: Callable[[Case], Any], cases: Iterable[Case] = CASES) -> tuple[Case, ...]:
    """The ones with most options."""
    return tuple({key(case): case for case in sorted(cases, key=lambda case: len(case.options))}.values())


EACH_RULE = one_of_each(lambda case: case.rule)
EACH_OPTIMIZER = one_of_each(lambda case: case.of.ours)  # for tests to which its arithmetic means little
EACH_VARIANT = one_of_each(lambda case: (case.of.ours, case.rule))
OF_TORCH = [case for case in CASES if case.of.torch_class is not None]

WEIGHTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16_stochastic": (torch.bfloat16, {"master_weights": None}),
    "split16": (torch.bfloat16, {"master_weights": "split16"}),
    "split8": (torch.bfloat16, {"master_weights": "split8"}),
    "fp16_master": (torch.float16, {"master_weights": "fp32"}),
}
STATES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def kept(states: str, case: Case, *groups: Mapping[str, Any]) -> str:
    """The format of the states of a case, with groups of its own: 16 bits where 8 are refused."""
    needs_16_bits = case.needs_16_bits or any(group.get("amsgrad") for group in groups)
    return "bf16" if states == "8bit" and needs_16_bits else states


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


ADAMW_CASE = case_named("adamw")  # where a test needs one optimizer and any will do


def random_params(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    return [values.requires_grad_() for values in _random(shapes, seed)]


def random_grads(params: Iterable[Tensor], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values.to(dtype) for values in _random([p.shape for p in params], 1000 + seed)]


def _random(shapes: Iterable[tuple[int, ...]], seed: int) -> list[Tensor]:
    """The same numbers on every device: drawn on the CPU, and moved to torch's default device."""
    generator, device = torch.Generator().manual_seed(seed), torch.get_default_device()
    return [torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]


def set_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Puts copies of the gradients where autograd would (in 16 bits too)."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = None if grad is None else grad.clone()
