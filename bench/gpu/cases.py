"""Optimizers, and how their numbers are stored: these cases are compared and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import accumfused as af

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
MAX_GRAD_NORM = 0.5

_ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.3}
_MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.7}
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (af.AdamW, _ADAM),
    "AMSGrad": (af.AdamW, {**_ADAM, "amsgrad": True}),
    "Adam": (af.Adam, _ADAM),
    "Lion": (af.Lion, _ADAM),
    "SGD": (af.SGD, {"lr": 0.1, "weight_decay": 0.3}),
    "SGD-m": (af.SGD, {**_MOMENTUM, "dampening": 0.2, "weight_decay": 0.3}),
    "SGD Nesterov": (af.SGD, {**_MOMENTUM, "nesterov": True}),
}
WEIGHTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "split16": (BF16, {"master_weights": "split16"}),
    "split8": (BF16, {"master_weights": "split8"}),
    "bf16 stochastic": (BF16, {"master_weights": None}),
    "fp16 + fp32 master": (FP16, {"master_weights": "fp32"}),
}
STATES: dict[str, Any] = {"fp32": FP32, "bf16": BF16, "8bit": "8bit"}


@dataclass(frozen=True)
class Case:
    """A rule, and how its numbers are stored."""

    rule: str = "AdamW"
    weights: str = "fp32"
    states: str = "fp32"
    grads: torch.dtype = FP32

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.weights}, {self.states} states, {DTYPES[self.grads]} gradients"

    @property
    def param_dtype(self) -> torch.dtype:
        return WEIGHTS[self.weights][0]

    def optimizer(self, params: Iterable[Tensor], backend: Any) -> af.FusedOptimizer:
        """Args: backend: a name or a backend."""
        make, options = RULES[self.rule]
        known = {"max_grad_norm": MAX_GRAD_NORM, "rounding_seed": 17, "state_dtype": STATES[self.states]}
        known |= {"state_dtype_min_numel": 2, **WEIGHTS[self.weights][1]}
        return using(backend, lambda name: make(params, **options, **known, backend=name))


def using(backend: Any, make: Callable[[str], Any]) -> Any:
    """An optimizer that steps by this backend. Args: backend: a name or a backend; make: by a backend's name."""
    if isinstance(backend, str):
        return make(backend)
    optimizer = make("auto")
    optimizer._engine.plans.backend = backend
    return optimizer


PACKED = tuple(Case("AdamW", *kept, BF16) for kept in (("split8", "8bit"), ("split16", "8bit"), ("split16", "fp32")))
PACKED += (Case("AdamW", "bf16 stochastic", "8bit", BF16),)
PURE = Case("AdamW", "bf16 stochastic", "bf16", BF16)


def everything(optimizer: af.FusedOptimizer) -> dict[str, Tensor]:
    """Parameters and states, by name."""
    found = {}
    for index, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        found[f"param {index}"] = param.detach()
        found |= {f"{name} {index}": value for name, value in optimizer.state[param].items()}
    return found
