"""The step of backends/torch_kernels.py: it decodes a batch to fp32, torch updates it, and the step encodes it again.

In: a batch, and its scaled gradients in fp32. Out: written parameters, masters and states. torch updates fp32 tensors
in place. What is fp64 stays fp64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accumfused.backends.batches import Batch, Stored, Tensors
from accumfused.core.plan import Plan
from accumfused.core.rows import Grads
from accumfused.formats import codecs
from accumfused.formats.convert import load_state, load_weights, store_state, store_weights
from accumfused.formats.kinds import Format, States, Storage, Weights, counts_steps
from accumfused.formats.numeric import SMALLEST_NORMAL, whole_steps
from accumfused.rules import Rule, on_tensors

# A kernel updates in place: (weights, gradients, states, step counts, hyper-parameters, found_inf)
Kernel = Callable[[Tensors, Tensors, list[Tensors], Tensors, dict[str, Any], Tensor | None], None]

_HAVE_FUSED = ("cpu", "cuda")  # kinds of devices; on others torch may lack fused kernels
_BY_CODEC = (Weights.BFLOAT16_STOCHASTIC, Weights.BFLOAT16_SPLIT16, Weights.BFLOAT16_SPLIT8)


def _stored(plan: Plan, batch: Batch) -> Stored:
    """Collects the stored tensors of a batch whose parameters all have their state."""
    storages = [storage for row in batch.rows if (storage := plan.rows[row].storage) is not None]
    count = len(plan.rules[batch.group].states)

    def blocks(storage: Storage, index: int) -> Tensor | None:
        end = None if batch.end is None else codecs.block_count(batch.end)
        return storage.scales[index][batch.begin // codecs.BLOCK : end] if storage.scales else None

    return Stored(
        batch.cut([plan.rows[row].tensor for row in batch.rows]),
        [*batch.cut([storage.master for storage in storages])] or [None] * len(storages),
        [batch.cut([storage.values[i] for storage in storages]) for i in range(count)],
        [[blocks(storage, i) for storage in storages] for i in range(count)],
        [storage.step for storage in storages if storage.step is not None],
        [storage.seed for storage in storages if storage.seed is not None],
    )


def advance(plan: Plan, grads: Grads, skipped: Tensor | None) -> None:
    """Advances step counts, of empty tensors too; `skipped` is None if the host knows that the step happens."""
    rows = [row for row, grad in zip(plan.rows, grads, strict=True) if grad is not None]
    steps = [row.entries["step"] for row in rows if counts_steps(row.rule, row.form)]
    if steps and skipped is None:
        torch._foreach_add_(steps, 1)
    elif steps and skipped is not None:
        torch._foreach_add_(steps, [(~skipped).float()] * len(steps))


def absorbed(
    rules: list[type[Rule]], hypers: list[dict[str, Any]], coefficient: float, spends_grads: bool
) -> list[dict[str, Any]] | None:
    """Makes hyper-parameters that let torch's fused kernels take unscaled gradients; None if a group has none.

    The kernels scale gradients that they may overwrite. For SGD other hyper-parameters can carry the coefficient, which
    multiplies only the gradient's term in the buffer, or in the update. (`1 - dampening` is exact enough unless the
    coefficient is tiny; Nesterov's step takes the gradient twice.)
    """
    if any(_fused(rule) is None for rule in rules):
        return None
    if coefficient == 1.0:
        return hypers
    if not 1e-6 < coefficient < 1e6:
        return None
    if spends_grads:
        return [
            hyper | {"grad_scale": torch.tensor(1.0 / coefficient, dtype=torch.float32, device="cpu")}
            for hyper in hypers
        ]
    if any(_fused(rule) is not _sgd or rule.flags.get("nesterov") for rule in rules):
        return None
    adjusted = []
    for rule, hyper in zip(rules, hypers, strict=True):
        numbers = hyper | {"weight_decay": float(hyper["weight_decay"]) / coefficient}
        numbers |= {"coefficient": coefficient} if rule.states else {"lr": float(hyper["lr"]) * coefficient}
        adjusted.append(numbers)
    return adjusted


def update(plan: Plan, batch: Batch, grads: Tensors, hyper: dict[str, Any], skipped: Tensor | None) -> None:
    """Updates one batch; `skipped` is None, or a flag on a GPU that the host must not read."""
    rule, form = plan.rules[batch.group], batch.form
    stored = _stored(plan, batch)
    kernel = _fused(rule) if plan.device.type in _HAVE_FUSED else None
    if skipped is not None and kernel is _sgd and float(hyper["dampening"]) != 0:
        kernel = None  # the host does not know whether this is a tensor's first step
    found_inf = None if skipped is None else skipped.float()
    run = kernel or (_lion if _is_ours(rule) and rule.name == "lion" else None)
    numbers = {**hyper, **rule.flags}
    if run or skipped is None:  # else the rule's own arithmetic, which takes a GPU's numbers as they are
        numbers |= {name: float(value) for name, value in hyper.items() if not (kernel and _stays(name, value))}
    run = run or _composed(rule)
    if (form.weights, form.states) == (Weights.FLOAT32, States.FLOAT32) and (kernel or skipped is None):
        run(stored.params, grads, stored.states, stored.steps, numbers, found_inf)
        return
    weights = [load_weights(form, *pair) for pair in zip(stored.params, stored.masters, strict=True)]
    kinds = [name in rule.second_moments for name in rule.states]
    states = [
        [load_state(*pair, kind) for pair in zip(values, scales, strict=True)]
        for values, scales, kind in zip(stored.states, stored.scales, kinds, strict=True)
    ]
    if skipped is not None and kernel is None:  # only torch's fused kernels read the flag before they write
        weights, states = [w.clone() for w in weights], [[s.clone() for s in values] for values in states]
    run(weights, grads, states, stored.steps, numbers, found_inf)
    for j, row in enumerate(batch.rows):
        noise = weights[j]
        if form.needs_noise:
            key = codecs.key(stored.seeds[j], whole_steps(stored.steps[j]), row)
            noise = codecs.noise(key, weights[j].numel(), plan.rows[row].origin + batch.begin)
        _write(stored.params[j], stored.masters[j], _stored_weights(form, weights[j], noise), skipped)
        for index, kind in enumerate(kinds):
            state: tuple[Tensor, Tensor | None] = (states[index][j], None)
            if form.states is not States.FLOAT32:
                state = store_state(form, states[index][j], codecs.stream(noise, min(index, 1)), kind)
            _write(stored.states[index][j], stored.scales[index][j], state, skipped)


def _stays(name: str, value: Any) -> bool:
    """Tells whether fused kernels of torch take the value as a tensor: a gradients' divisor, a GPU's learning rate."""
    return name == "grad_scale" or (name == "lr" and isinstance(value, Tensor) and value.device.type != "cpu")


def _stored_weights(form: Format, weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encodes the parameter and its master; a copy rounds to nearest anyway."""
    if form.weights in _BY_CODEC:
        return store_weights(form, weights, codecs.stream(noise, 2) if form.needs_noise else noise)
    return weights, None if form.master is None else weights


def _write(
    tensor: Tensor, companion: Tensor | None, values: tuple[Tensor, Tensor | None], skipped: Tensor | None
) -> None:
    """Writes a parameter or state, and its master or scales, unless the step is skipped."""
    for target, value in zip((tensor, companion), values, strict=True):
        if target is None or value is None or target is value:
            continue
        target.copy_(value if skipped is None else torch.where(skipped, target, value.to(target.dtype)))


# ---- rules ----------------------------------------------------------------------------------------------------------


def _adam(
    weights: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, h: dict[str, Any], found_inf: Tensor | None
) -> None:
    kernel = torch._fused_adamw_ if h["decoupled_weight_decay"] else torch._fused_adam_
    exp_avgs, exp_avg_sqs, *maxima = states
    kernel(
        weights, grads, exp_avgs, exp_avg_sqs, maxima[0] if maxima else [], steps,
        lr=h["lr"], beta1=h["beta1"], beta2=h["beta2"], weight_decay=h["weight_decay"], eps=h["eps"],
        amsgrad=bool(maxima), maximize=bool(h["maximize"]), grad_scale=h.get("grad_scale"), found_inf=found_inf,
    )  # fmt: skip


def _sgd(
    weights: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, h: dict[str, Any], found_inf: Tensor | None
) -> None:
    buffers, coefficient = states[0] if states else [], h.get("coefficient", 1.0)
    dampened = [h["dampening"] if buffers and h["dampening"] and step != 1 else 0.0 for step in steps or weights]
    for dampening in dict.fromkeys(dampened):  # the first step, from zeros, takes the gradient as it is
        rows = [row for row, factor in enumerate(dampened) if factor == dampening]
        torch._fused_sgd_(
            [weights[row] for row in rows], [grads[row] for row in rows], [buffers[row] for row in rows if buffers],
            weight_decay=h["weight_decay"], momentum=h["momentum"], lr=h["lr"],
            dampening=1.0 - (1.0 - dampening) * coefficient,
            nesterov=h.get("nesterov", False), maximize=bool(h["maximize"]), is_first_step=False,
            grad_scale=h.get("grad_scale"), found_inf=found_inf,
        )  # fmt: skip


def _lion(
    weights: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, h: dict[str, Any], found_inf: Tensor | None
) -> None:
    grads = list(torch._foreach_neg(grads)) if h["maximize"] else grads
    directions = torch._foreach_lerp(states[0], grads, 1.0 - h["beta1"])
    # These three lines take the sign; torch's own sign of NaN is 0.
    torch._foreach_clamp_max_(directions, SMALLEST_NORMAL)
    torch._foreach_clamp_min_(directions, -SMALLEST_NORMAL)
    torch._foreach_mul_(directions, 1.0 / SMALLEST_NORMAL)
    torch._foreach_mul_(weights, 1.0 - h["lr"] * h["weight_decay"])
    torch._foreach_add_(weights, directions, alpha=-h["lr"])
    torch._foreach_lerp_(states[0], grads, 1.0 - h["beta2"])


def _is_ours(rule: type[Rule]) -> bool:
    """Tells whether the rule is this package's: a user's may have the same name."""
    return rule.__module__.startswith("accumfused.optimizers.")


def _fused(rule: type[Rule]) -> Kernel | None:
    return FUSED.get(rule.name) if _is_ours(rule) else None


def _composed(rule: type[Rule]) -> Kernel:
    """Makes a kernel of the rule's own arithmetic."""

    def kernel(
        weights: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors, h: dict[str, Any], _: Tensor | None
    ) -> None:
        counts = torch.stack(steps) if steps else torch.ones((), dtype=torch.float32, device=weights[0].device)
        scalars = on_tensors.scalars(rule, h, whole_steps(counts), weights[0].dtype)
        factor = -1.0 if h.get("maximize") else 1.0
        for j, (weight, grad, *row_states) in enumerate(zip(weights, grads, *states, strict=True)):
            numbers = {name: number[j] if number.dim() else number for name, number in scalars.items()}
            updated = on_tensors.update(rule, numbers, weight, grad * factor, row_states)
            for old, value in zip((weight, *row_states), updated, strict=True):
                old.copy_(value)

    return kernel


FUSED: dict[str, Kernel] = {"adam": _adam, "adam_amsgrad": _adam}
FUSED |= dict.fromkeys(("sgd", "sgd_momentum", "sgd_nesterov"), _sgd)
