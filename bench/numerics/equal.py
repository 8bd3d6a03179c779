"""Masters that are bit for bit the weights of fp32 training: 1000 ordinary steps of each rule, side by side."""

from __future__ import annotations

from typing import Any

import torch

import accumfused as af
from bench.numerics.contenders import BF16, FP16, FP32, master

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (af.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-2}),
    "Adam": (af.Adam, {"lr": 1e-3, "weight_decay": 1e-2}),
    "AdamW": (af.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "Lion": (af.Lion, {"lr": 1e-4, "weight_decay": 0.1}),
}
MASTERS: dict[str, tuple[torch.dtype, str]] = {
    "bf16 + split16": (BF16, "split16"),
    "bf16 + fp32 master": (BF16, "fp32"),
    "fp16 + fp32 master": (FP16, "fp32"),
}


def against_fp32(rule: str, elements: int = 1 << 14, count: int = 1000) -> list[dict[str, Any]]:
    """A row per format: how many masters differ from fp32's weights in a bit, and how many parameters are not the
    nearest number to theirs, after the step with most of them."""
    make, options = RULES[rule]
    return [_compare(rule, name, make, options, elements, count) for name in MASTERS]


def _compare(rule: str, name: str, make: Any, options: dict[str, Any], elements: int, count: int) -> dict[str, Any]:
    dtype, masters = MASTERS[name]
    generator = torch.Generator().manual_seed(3)
    start = (0.02 * torch.randn(elements, generator=generator)).to(dtype)
    exact, param = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    exact.grad_dtype = dtype
    optimizers = (make([exact], **options), make([param], master_weights=masters, rounding_seed=0, **options))
    differing = not_nearest = 0
    for _ in range(count):
        grad = (1e-3 * torch.randn(elements, generator=generator)).to(dtype)
        exact.grad, param.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        found = master(optimizers[1], param).to(FP32)
        differing = max(differing, int((found.view(torch.int32) != exact.detach().view(torch.int32)).sum()))
        exact_weight, seen = exact.detach(), param.detach().float()
        further = (seen - exact_weight).abs() > (exact_weight.to(dtype).float() - exact_weight).abs()
        not_nearest = max(not_nearest, int(further.sum()))
    row = {"rule": rule, "name": name, "steps": count, "elements": elements}
    return {**row, "differing": differing, "not_nearest": not_nearest}
