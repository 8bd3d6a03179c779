"""The truth in float64: optimizers from their papers' formulas, or torch's own, and the gradient tail before them.

Written without looking at the package's rules: nothing here imports accumfused.
"""

from __future__ import annotations

import functools
import math
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
    maximize=False, decoupled_weight_decay=False, cautious=False, cautious_weight_decay=False,
) -> Tensor:  # fmt: skip
    """Kingma & Ba 2015, algorithm 1, with bias-corrected moments; AMSGrad keeps the maximum of the raw second one."""
    g = -g if maximize else g
    if not decoupled_weight_decay:
        g = g + weight_decay * p
    t = state["step"] = state.get("step", 0.0) + 1
    m = state["exp_avg"] = betas[0] * state.get("exp_avg", 0.0) + (1 - betas[0]) * g
    v = state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", 0.0) + (1 - betas[1]) * g**2
    if amsgrad:
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(v)), v)
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    update = m_hat / (v_hat.sqrt() + eps)
    # Loshchilov & Hutter 2019, algorithm 2, with lr in the place of the schedule multiplier.
    decay = weight_decay if decoupled_weight_decay else 0.0
    return _moved(p, g, update, lr, decay, cautious, cautious_weight_decay)


def _moved(p: Tensor, g: Tensor, update: Tensor, lr, weight_decay, cautious, cautious_weight_decay) -> Tensor:
    """Liang et al. 2024, algorithm 1, without its scale; Chen et al. 2025 ("Cautious Weight Decay"), algorithm 1."""
    if cautious:
        update = update * (update * g > 0)
    decayed = (update * p >= 0) if cautious_weight_decay else 1.0
    return p - lr * (update + weight_decay * decayed * p)


def adamw(p: Tensor, g: Tensor, state: State, *, weight_decay=1e-2, **options) -> Tensor:
    """Adam with decoupled weight decay."""
    return adam(p, g, state, weight_decay=weight_decay, **{**options, "decoupled_weight_decay": True})


def lion(
    p: Tensor, g: Tensor, state: State, *, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False, cautious=False,
    cautious_weight_decay=False,
) -> Tensor:  # fmt: skip
    """Chen et al. 2023, program 1."""
    g = -g if maximize else g
    m = state.get("exp_avg", torch.zeros_like(p))
    update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    state["exp_avg"] = betas[1] * m + (1 - betas[1]) * g
    return _moved(p, g, update, lr, weight_decay, cautious, cautious_weight_decay)


def adan(
    p: Tensor, g: Tensor, state: State, *, lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, no_prox=False,
    maximize=False,
) -> Tensor:  # fmt: skip
    """Xie et al. 2022, algorithm 1, with 1 - beta for beta, and with bias-corrected moments."""
    g = -g if maximize else g
    change = g + state.get("neg_pre_grad", -g)
    t = state["step"] = state.get("step", 0.0) + 1
    state["neg_pre_grad"] = -g
    m = state["exp_avg"] = betas[0] * state.get("exp_avg", 0.0) + (1 - betas[0]) * g
    v = state["exp_avg_diff"] = betas[1] * state.get("exp_avg_diff", 0.0) + (1 - betas[1]) * change
    n = state["exp_avg_sq"] = betas[2] * state.get("exp_avg_sq", 0.0) + (1 - betas[2]) * (g + betas[1] * change) ** 2
    m_hat, v_hat, n_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t), n / (1 - betas[2] ** t)
    update = lr / (n_hat.sqrt() + eps) * (m_hat + betas[1] * v_hat)
    return (1 - lr * weight_decay) * p - update if no_prox else (p - update) / (1 + lr * weight_decay)


def ademamix(
    p: Tensor, g: Tensor, state: State, *, lr, betas=(0.9, 0.999, 0.9999), alpha=2.0, beta3_warmup=None,
    alpha_warmup=None, eps=1e-8, weight_decay=0.0, maximize=False,
) -> Tensor:  # fmt: skip
    """Pagliardini et al. 2024, algorithm 1, with the schedules of its section 3."""
    g = -g if maximize else g
    t = state["step"] = state.get("step", 0.0) + 1
    slow = betas[2]
    if beta3_warmup is not None and t < beta3_warmup:
        logs, part = (math.log(betas[0]), math.log(slow)), t / beta3_warmup
        slow = math.exp(logs[0] * logs[1] / ((1 - part) * logs[1] + part * logs[0]))
    weight = alpha if alpha_warmup is None else min(t * alpha / alpha_warmup, alpha)
    m1 = state["exp_avg_fast"] = betas[0] * state.get("exp_avg_fast", 0.0) + (1 - betas[0]) * g
    m2 = state["exp_avg_slow"] = slow * state.get("exp_avg_slow", 0.0) + (1 - slow) * g
    v = state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", 0.0) + (1 - betas[1]) * g**2
    m1_hat, v_hat = m1 / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return p - lr * ((m1_hat + weight * m2) / (v_hat.sqrt() + eps) + weight_decay * p)


def signum(p: Tensor, g: Tensor, state: State, *, lr, momentum=0.9, weight_decay=0.0, maximize=False) -> Tensor:
    """Bernstein et al. 2018, algorithm 2, with weight decay in the gradient."""
    g = (-g if maximize else g) + weight_decay * p
    m = state["momentum_buffer"] = momentum * state.get("momentum_buffer", 0.0) + (1 - momentum) * g
    return p - lr * torch.sign(m)


def of_torch(kind: type[torch.optim.Optimizer]) -> Update:
    """What torch's own class of the rule does in float64, from its own first states."""
    return functools.partial(_as_torch, kind)


def _as_torch(kind: type[torch.optim.Optimizer], p: Tensor, g: Tensor, state: State, **options) -> Tensor:
    twin = torch.nn.Parameter(p.clone())
    optimizer = kind([twin], **options)
    optimizer.state[twin].update({name: torch.as_tensor(value).clone() for name, value in state.items()})
    twin.grad = g.clone()
    optimizer.step()
    state.update(optimizer.state[twin])
    return twin.detach()


def schedule_free_group(
    sums: State, *, lr, warmup_steps=0, r=0.0, weight_lr_power=2.0, momentum=0.9, betas=None, **options
) -> dict:
    """Defazio et al. 2024, section 3.2: a group's next weight in the average. Returns its tensors' options."""
    k = sums["k"] = sums.get("k", 0.0) + 1
    lr *= min(1.0, k / warmup_steps) if warmup_steps else 1.0
    lr_max = sums["lr_max"] = max(lr, sums.get("lr_max", 0.0))
    weight = k**r * lr_max**weight_lr_power
    sums["weight_sum"] = sums.get("weight_sum", 0.0) + weight
    last_beta, beta = sums.get("last_beta", 1.0), momentum if betas is None else betas[0]
    sums["last_beta"] = beta
    options |= {"lr": lr, "share": weight / sums["weight_sum"], "beta": beta, "last_beta": last_beta}
    return options if betas is None else options | {"beta2": betas[1]}


def sgd_schedule_free(y: Tensor, g: Tensor, state: State, *, lr, share, beta, last_beta, weight_decay=0.0) -> Tensor:
    """Schedule-Free SGD: equations 3 to 5 of the paper. p is y, and x follows from y and z."""
    state["step"], z = state.get("step", 0.0) + 1, state.get("z", y)
    x = (y - (1 - last_beta) * z) / last_beta
    z = state["z"] = z - lr * (g + weight_decay * y)
    x = x + (z - x) * share
    return (1 - beta) * z + beta * x


def adamw_schedule_free(
    y: Tensor, g: Tensor, state: State, *, beta2=0.999, eps=1e-8, inner_momentum=0.0, **options
) -> Tensor:
    """Schedule-Free AdamW, with Adam's correction of the second moment, and of the mean inside; p is y."""
    t = state.get("step", 0.0) + 1
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * g**2
    if inner_momentum:
        state["exp_avg"] = inner_momentum * state.get("exp_avg", 0.0) + (1 - inner_momentum) * g
        g = state["exp_avg"] / (1 - inner_momentum**t)
    return sgd_schedule_free(y, g / ((v / (1 - beta2**t)).sqrt() + eps), state, **options)


OF_GROUPS = {sgd_schedule_free: schedule_free_group, adamw_schedule_free: schedule_free_group}


def muon(
    p: Tensor, g: Tensor, state: State, *, lr, weight_decay=0.1, momentum=0.95, nesterov=True,
    ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5, adjust_lr_fn=None,
) -> Tensor:  # fmt: skip
    """Jordan et al. 2024: X <- a X + b (X X^T) X + c (X X^T)^2 X; Liu et al. 2025, section 2.2: 0.2 sqrt(max(A, B))."""
    m = state["momentum_buffer"] = momentum * state.get("momentum_buffer", 0.0) + (1 - momentum) * g
    d = momentum * m + (1 - momentum) * g if nesterov else m
    # Of the thin singular value decomposition only the values change.
    u, s, vh = torch.linalg.svd(d / max(d.norm().item(), eps), full_matrices=False)
    for _ in range(ns_steps):
        s = sum(c * s ** (2 * i + 1) for i, c in enumerate(ns_coefficients))
    rows, columns = p.shape
    ratio = 0.2 * max(rows, columns) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
    return p * (1 - lr * weight_decay) - lr * ratio * (u * s) @ vh


class Oracle:
    """An optimizer in float64, with the tail in front of it: normalize, take the norm, clip, skip."""

    def __init__(self, update: Update, options: dict, params: Sequence[Tensor], max_grad_norm: float | None = None):
        self.update, self.options, self.max_grad_norm = update, options, max_grad_norm
        self.params = [p.detach().double().clone() for p in params]
        self.states: list[State] = [{} for _ in params]
        self.sums: State = {}  # of the formulas in OF_GROUPS
        self.norm = torch.zeros((), dtype=torch.float64)

    def step(self, grads: Sequence[Tensor | None], normalization: float = 1.0) -> None:
        """One step; a non-finite norm skips it. A gradient of None leaves its parameter alone."""
        grads = [None if g is None else g.detach().double() / normalization for g in grads]
        self.norm = global_norm(grads)
        if not self.norm.isfinite():
            return
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.norm.item() + 1e-6))
        options = OF_GROUPS.get(self.update, _as_they_are)(self.sums, **self.options)
        for i, g in enumerate(grads):
            if g is not None:
                self.params[i] = self.update(self.params[i], g * clip, self.states[i], **options)


def _as_they_are(_: State, **options) -> dict:
    return options


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
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                options = {name: _number(group[name]) for name in self.defaults}
                options = OF_GROUPS.get(self.update, _as_they_are)(group, **options)
            for p in params:
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


def noise_scale(windows: Sequence[tuple[Tensor, Tensor]], decay: float) -> tuple[float, float]:
    """Signal and noise: exponential means of McCandlish et al. 2018, appendix A.1, written for weights.

    Args:
        windows: of each the gradients of its micro-batches, [n, elements], and their weights, [n].
    """
    signal = noise = share = 0.0
    for grads, weights in windows:
        number, total = len(weights), float(weights.sum())
        small = float((weights * grads.square().sum(1)).sum()) / total
        large = float(((weights[:, None] * grads).sum(0) / total).square().sum())
        signal = decay * signal + (1 - decay) * (number * large - small) / (number - 1)
        noise = decay * noise + (1 - decay) * (small - large) * total / (number - 1)
        share = decay * share + 1 - decay
    return signal / share, noise / share
