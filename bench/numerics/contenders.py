"""The formats that are compared: ours, torch's own, Kahan summation as it is written everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import accumfused as af

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Contender:
    """One way to keep weights and states, and the optimizer that does it.

    Args:
        dtype: of the parameters.
        make: AdamW over parameter groups that carry their lr, with its options (betas, eps, weight_decay).
        weight: the weight that the optimizer remembers, fp64: more than the parameter shows, where it keeps more.
        elements: that a statistic of it needs at the smallest steps; 1 << 14 where nothing is random.
        bytes_per_parameter: the weight and what belongs to it, without moments and gradient.
    """

    name: str
    dtype: torch.dtype
    make: Callable[..., torch.optim.Optimizer]
    weight: Callable[[torch.optim.Optimizer, Tensor], Tensor] = lambda optimizer, param: param.detach().double()
    elements: int = 1 << 14
    bytes_per_parameter: float = 2.0
    grad_dtype: torch.dtype = BF16


def master(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The fp32 weight behind a 16-bit parameter of ours, as fp64; the parameter itself where nothing is behind it."""
    state = optimizer.state.get(param, {})
    if "master_weight" in state:
        return state["master_weight"].detach().double()
    remainder = state.get("master_remainder")
    if remainder is None:
        return param.detach().double()
    shift = {torch.int16: 0, torch.int8: 8}[remainder.dtype]
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + (remainder.to(torch.int32) << shift)).view(FP32).double()


def named(name: str) -> Contender:
    """Ours or a peer; looked up in the process that runs it, for a contender cannot be sent to another one."""
    from bench.numerics import peers

    for peer in (peers.WEIGHTS.get(name), peers.STATES.get(name)):
        if peer is not None:
            with peers.quiet():
                return peer.contender()
    return {each.name: each for each in (*weight_formats(), *state_formats())}[name]


def ours(
    name: str, dtype: torch.dtype, bytes_per_parameter: float, elements: int = 1 << 14, **settings: Any
) -> Contender:
    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return af.AdamW(groups, rounding_seed=0, **options, **settings)

    return Contender(name, dtype, make, master, elements, bytes_per_parameter)


class KahanAdamW(torch.optim.Optimizer):
    """AdamW in fp32 whose steps, too small for a bf16 parameter, are collected in a second bf16 number."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param, dtype=FP32) for _ in range(2))
                    state["rest"] = torch.zeros_like(param)
                state["step"] += 1
                grad = param.grad.float()
                first = state["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1 ** state["step"])
                second = state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2) / (1 - beta2 ** state["step"])
                change = -lr * group["weight_decay"] * param.float() - lr * first / (second.sqrt() + group["eps"])
                wanted = state["rest"].float().add_(change).to(param.dtype)
                before = param.clone()
                param.add_(wanted)
                state["rest"].copy_(wanted - (param - before))


def _kahan_weight(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    return param.detach().double() + optimizer.state[param]["rest"].double()


def weight_formats() -> list[Contender]:
    """Ours and the well-known ones, in the order of the tables."""
    stochastic = 1 << 20  # elements
    return [
        ours("fp32", FP32, 4),
        ours("bf16 + fp32 master", BF16, 6, master_weights="fp32"),
        ours("bf16 + split16", BF16, 4, master_weights="split16"),
        ours("bf16 + split8", BF16, 3, 1 << 18, master_weights="split8"),
        ours("bf16 stochastic", BF16, 2, stochastic, master_weights=None),
        Contender("bf16 Kahan", BF16, KahanAdamW, _kahan_weight, bytes_per_parameter=4),
        Contender("torch.optim.AdamW, bf16", BF16, torch.optim.AdamW),
    ]


def state_formats() -> list[Contender]:
    """How moments are kept, beside fp32 weights."""
    return [
        ours("fp32 states", FP32, 4),
        ours("bf16 states", FP32, 4, state_dtype=BF16, state_dtype_min_numel=0),
        ours("int8 states", FP32, 4, state_dtype="int8", state_dtype_min_numel=0),
    ]
