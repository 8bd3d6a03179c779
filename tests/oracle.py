"""The truth in float64: optimizers from their papers' formulas, and the gradient tail in front of them.

Written without looking at the package's rules: nothing here imports accumfused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
Update = Callable[..., Tensor]  # (param, grad, state, **options) -> new param; changes state


def sgd(
    p: Tensor, g: Tensor, state: State, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
    maximize=False,
) -> Tensor:  # fmt: skip
    """Gradient descent with (Nesterov's) momentum in torch's form; the first buffer is the undamped gradient."""
    direction = (-g if maximize else g) + weight_decay * p
    if momentum == 0:
        return p - lr * direction
    if "momentum_buffer" in state:
        buffer = momentum * state["momentum_buffer"] + (1 - dampening) * direction
    else:
        buffer = direction
    state["momentum_buffer"] = buffer
    state["step"] = state.get("step", 0.0) + 1
    return p - lr * (direction + momentum * buffer if nesterov else buffer)


def adam(
    p: Tensor, g: Tensor, state: State, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
    maximize=False, decoupled_weight_decay=False,
) -> Tensor:  # fmt: skip
    """Kingma & Ba 2015, algorithm 1, with bias-corrected moments; AMSGrad keeps the maximum of the raw second one."""
    g = -g if maximize else g
    if decoupled_weight_decay:  # Loshchilov & Hutter 2019, algorithm 2, with lr in the place of the schedule multiplier
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    t = state["step"] = state.get("step", 0.0) + 1
    m = state["exp_avg"] = betas[0] * state.get("exp_avg", 0.0) + (1 - betas[0]) * g
    v = state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", 0.0) + (1 - betas[1]) * g**2
    if amsgrad:
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(v)), v)
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return p - lr * m_hat / (v_hat.sqrt() + eps)


def adamw(p: Tensor, g: Tensor, state: State, *, weight_decay=1e-2, **options) -> Tensor:
    """Adam with decoupled weight decay."""
    return adam(p, g, state, weight_decay=weight_decay, decoupled_weight_decay=True, **options)


def lion(p: Tensor, g: Tensor, state: State, *, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False) -> Tensor:
    """Chen et al. 2023, program 1."""
    g = -g if maximize else g
    m = state.get("exp_avg", torch.zeros_like(p))
    update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    state["exp_avg"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * (update + weight_decay * p)


class Oracle:
    """An optimizer in float64, with the tail in front of it: normalize, take the norm, clip, skip."""

    def __init__(self, update: Update, options: dict, params: Sequence[Tensor], max_grad_norm: float | None = None):
        self.update, self.options, self.max_grad_norm = update, options, max_grad_norm
        self.params = [p.detach().double().clone() for p in params]
        self.states: list[State] = [{} for _ in params]
        self.norm = torch.zeros((), dtype=torch.float64)

    def step(self, grads: Sequence[Tensor | None], normalization: float = 1.0) -> None:
        """One step; a non-finite norm skips it. A gradient of None leaves its parameter alone."""
        grads = [None if g is None else g.detach().double() / normalization for g in grads]
        self.norm = global_norm(grads)
        if not self.norm.isfinite():
            return
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.norm.item() + 1e-6))
        for i, g in enumerate(grads):
            if g is not None:
                self.params[i] = self.update(self.params[i], g * clip, self.states[i], **self.options)


class Loop(torch.optim.Optimizer):
    """A formula as an optimizer of torch's: groups, schedulers, hooks and checkpoints are torch's own."""

    def __init__(self, update: Update, params, defaults: dict):
        self.update = update
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {name: _number(group[name]) for name in self.defaults}
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.update(p.double(), p.grad.double(), self.state[p], **options))
        return loss


def _number(option):
    """What a tensor of one element holds, also within a tuple."""
    if isinstance(option, tuple):
        return tuple(map(_number, option))
    return option.item() if isinstance(option, Tensor) else option


def global_norm(grads: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in grads if g is not None]).sum().sqrt()


def window_mean(micro_batches: Sequence[Sequence[Tensor]], weights: Sequence[float] | None) -> list[Tensor]:
    """Per parameter the weighted mean of the micro-batches' gradients, or without weights their sum."""
    factors = [1.0] * len(micro_batches) if weights is None else [w / sum(weights) for w in weights]
    return [
        sum((f * g.double() for f, g in zip(factors, grads, strict=True)), torch.zeros((), dtype=torch.float64))
        for grads in zip(*micro_batches, strict=True)
    ]
