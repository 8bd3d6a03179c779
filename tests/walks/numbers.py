"""Numbers with a bound on their error: what a call must give in float64, and how far fp32 arithmetic may lie from it.

Nothing accumulates: after each step the model takes over the bits that it has checked, so every bound is that of one
step, or of one window's sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor

# Half a unit in the last place, relative; stochastic rounding may be off by twice that.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
ROUNDINGS = 24  # of one element in one step: some ten of the rule, the rest for its scalars and for the coefficient
SUMMED = 64  # of a norm: rows in sequence, halvings, a square root
TINY = 1e-37  # what is subnormal may be stored as 0
SMALLEST = {torch.float16: 2.0**-24}  # the smallest subnormal of a dtype whose numbers here may reach it
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")


@dataclass
class Bounded:
    value: Tensor  # fp64
    error: Tensor

    @classmethod
    def exact(cls, tensor: Tensor) -> Bounded:
        value = tensor.detach().to(torch.float64, copy=True)
        return cls(value, torch.zeros_like(value))

    def __add__(self, other: Bounded) -> Bounded:
        return Bounded(self.value + other.value, self.error + other.error)

    def times(self, factor: float) -> Bounded:
        return Bounded(self.value * factor, self.error * abs(factor))

    def rounded(self, unit: float) -> Bounded:
        least = SMALLEST[torch.float16] if unit >= UNIT[torch.float16] else TINY
        return Bounded(self.value, self.error + unit * self.value.abs() + least)

    def differs(self, actual: Tensor) -> str | None:
        """How, if it is out of bounds; what is not finite must not be on either side."""
        actual = actual.detach().double()
        if actual.shape != self.value.shape:
            return f"shape {list(actual.shape)}, expected {list(self.value.shape)}"
        finite = self.value.isfinite()
        error = self.error.nan_to_num(torch.inf)  # beside an infinite gradient nothing is known
        wrong = torch.where(finite, ~((actual - self.value).abs() <= error), actual.isfinite())
        if not wrong.any():
            return None
        got, want, error = (t[wrong].flatten()[0].item() for t in (actual, self.value, self.error))
        return f"{int(wrong.sum())} of {wrong.numel()} wrong, first {got!r}, expected {want!r} +- {error:.1e}"


def norm_of(grads: list[Bounded]) -> tuple[float, float]:
    """The global norm and its error."""
    squares = sum(float(g.value.square().sum()) for g in grads)
    errors = sum(float(g.error.square().sum()) for g in grads)
    norm = squares**0.5
    return norm, errors**0.5 + SUMMED * UNIT[torch.float32] * norm


Update = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]  # (param, grad, state) -> new param; changes state


def predicted(
    update: Update, param: Tensor, grad: Bounded, state: dict[str, Any], decay: float
) -> tuple[Bounded, dict[str, Bounded]]:
    """One step from exact inputs and a gradient with an error: by evaluating the rule at the ends of all intervals.

    Args:
        decay: the weight decay, which may hide the gradient's size behind a cancellation.
    """
    unit = ROUNDINGS * UNIT[torch.float32]
    size = grad.value.abs() + decay * param.abs()
    spread = grad.error + unit * size
    moments = [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape]
    moments = [name for name in moments if name != "step"]
    slack = {name: unit * (state[name].abs() + _size(name, size)) for name in moments}
    base_state = dict(state)
    base = update(param, grad.value, base_state)
    names = [n for n, v in base_state.items() if isinstance(v, Tensor) and v.shape == param.shape and n != "step"]
    widest = torch.zeros_like(base)
    widths = {name: torch.zeros_like(base_state[name]) for name in names}
    for signs in itertools.product((-1.0, 1.0), repeat=1 + len(moments)):
        moved = dict(state)
        for name, sign in zip(moments, signs[1:], strict=True):
            shifted = state[name] + sign * slack[name]
            moved[name] = shifted.clamp(min=0.0) if name in SECOND_MOMENTS else shifted
        new = update(param, grad.value + signs[0] * spread, moved)
        widest = torch.maximum(widest, (new - base).abs())
        widths = {name: torch.maximum(widths[name], (moved[name] - base_state[name]).abs()) for name in names}
    error = 2 * widest + unit * (param.abs() + base.abs() + (base - param).abs()) + TINY
    states = {}
    for name in names:
        value = base_state[name]
        states[name] = Bounded(value, 2 * widths[name] + unit * (value.abs() + _size(name, size)) + TINY)
    state.update(base_state)
    return Bounded(base, error), states


def _size(name: str, size: Tensor) -> Tensor:
    return size.square() if name in SECOND_MOMENTS else size


def of_torch(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> Update:
    """A step of an optimizer of torch's, in float64."""

    def update(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        twin = torch.nn.Parameter(param.clone())
        optimizer = cls([twin], **options)
        if state:
            optimizer.state[twin] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        twin.grad = grad.clone()
        optimizer.step()
        state.update(optimizer.state[twin])
        return twin.detach()

    return update


def of_oracle(formula: Callable[..., Tensor], options: dict[str, Any]) -> Update:
    return lambda param, grad, state: formula(param, grad, state, **options)


FORMULAS = {"sgd": oracle.sgd, "adamw": oracle.adamw, "adam": oracle.adam, "lion": oracle.lion}
