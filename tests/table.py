"""Every rule with every option, one row each: a new optimizer needs one new row, and no new test.

Large learning rates, small betas and weight decay that is not zero, so that an error of any kind shows in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import inside
import oracle
import pytest
import torch
from torch import Tensor

import accumfused as af
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.rule import Rule


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
        defaults = self.ours([torch.zeros(1, requires_grad=True)]).defaults
        return oracle.Loop(self.oracle, params, {**defaults, **options})


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
    def _rule(self) -> type[Rule]:
        return self.of.ours.rule_of(self.make([torch.zeros(1, requires_grad=True)]).param_groups[0])

    def make(self, params: Iterable[Tensor], backend: Any = "auto", **settings: Any) -> af.FusedOptimizer:
        """The optimizer. Args: backend: a backend's name, or a backend object; settings: max_grad_norm, nonfinite."""
        name = backend if isinstance(backend, str) else "auto"
        optimizer = self.of.ours(params, **self.options, backend=name, **settings)
        if not isinstance(backend, str):
            inside.use_backend(optimizer, backend)
        return optimizer


def _case(name: str, optimizer: str, **options: Any) -> Case:
    return Case(name, OPTIMIZERS[optimizer], options)


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
    _case("adam_amsgrad", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, amsgrad=True),
    _case("adam_maximize", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, maximize=True),
    _case("adam_decoupled", "Adam", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, decoupled_weight_decay=True),
    _case("adamw", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4),
    _case("adamw_no_decay", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.0, eps=1e-3),
    _case("adamw_amsgrad", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True),
    _case("adamw_maximize", "AdamW", lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True, maximize=True),
    _case("lion", "Lion", lr=0.05, betas=(0.6, 0.8)),
    _case("lion_weight_decay", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5),
    _case("lion_maximize", "Lion", lr=0.05, betas=(0.6, 0.8), weight_decay=0.5, maximize=True),
)

# One of each kernel's arithmetic, the one with most options.
EACH_RULE = tuple({case.rule: case for case in sorted(CASES, key=lambda case: len(case.options))}.values())

WEIGHTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16_stochastic": (torch.bfloat16, {"master_weights": None}),
    "fp16_stochastic": (torch.float16, {"master_weights": None}),
    "split16": (torch.bfloat16, {"master_weights": "split16"}),
    "split8": (torch.bfloat16, {"master_weights": "split8"}),
    "bf16_master": (torch.bfloat16, {"master_weights": "fp32"}),
    "fp16_master": (torch.float16, {"master_weights": "fp32"}),
}
STATES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def kept(states: str, *groups: Mapping[str, Any]) -> str:
    """The format of the states of these groups: 16 bits where 8 are refused."""
    return "bf16" if states == "int8" and any(group.get("amsgrad") for group in groups) else states


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


def all_backends() -> list[Any]:
    """The reference, and the native kernels of every instruction set that this machine runs."""
    native = inside.native()
    return [ReferenceBackend(), *map(CpuBackend, [] if native is None else native.instruction_sets())]
