"""Numbers with a bound on their error: what a call must give in float64, and how far fp32 arithmetic may lie from it.

Nothing accumulates: after each step the model takes over the bits that it has checked, so every bound is that of one
step, or of one window's sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
UNIT = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}  # half of one in the last place, relative
ROUNDINGS = 24  # of one element in one step: some ten of the rule, the rest for its scalars and for the coefficient
SUMMED = 64  # of a norm: rows in sequence, halvings, a square root
TINY = 1e-37  # what is subnormal may be stored as 0
SMALLEST = {FP16: 2.0**-24}  # the smallest subnormal of a dtype whose numbers here may reach it
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")

State = dict[str, Any]
Update = Callable[[Tensor, Tensor, State], Tensor]  # (param, grad, state) -> new param; changes the state


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
        least = SMALLEST[FP16] if unit >= UNIT[FP16] else TINY
        return Bounded(self.value, self.error + unit * self.value.abs() + least)

    def check(self, actual: Tensor, what: str) -> None:
        """What is not finite must not be on either side."""
        actual = actual.detach().double()
        assert actual.shape == self.value.shape, f"{what}: shape {list(actual.shape)}"
        error = self.error.nan_to_num(torch.inf)  # beside an infinite gradient nothing is known
        wrong = torch.where(self.value.isfinite(), ~((actual - self.value).abs() <= error), actual.isfinite())
        if wrong.any():
            got, want, error = (t[wrong].flatten()[0].item() for t in (actual, self.value, error))
            raise AssertionError(f"{what}: {int(wrong.sum())} wrong, first {got!r}, expected {want!r} +- {error:.1e}")


def norm_of(grads: Iterable[Bounded]) -> tuple[float, float]:
    """The global norm and its error."""
    grads = list(grads)
    norm = sum(float(g.value.square().sum()) for g in grads) ** 0.5
    return norm, sum(float(g.error.square().sum()) for g in grads) ** 0.5 + SUMMED * UNIT[FP32] * norm


def tensors(state: State) -> dict[str, Tensor]:
    """The entries that have an element for each of the parameter's."""
    return {name: value for name, value in state.items() if name != "step" and isinstance(value, Tensor)}


def predicted(update: Update, param: Tensor, grad: Bounded, state: State, decay: float) -> tuple[Bounded, State]:
    """One step from exact inputs and a gradient with an error, by evaluating the rule at the ends of its interval.

    The state becomes the new one. Weight decay may hide the gradient's size behind a cancellation, as a moment may.
    """
    unit, known, new = ROUNDINGS * UNIT[FP32], tensors(state), dict(state)
    moments = sum((m.abs() for name, m in known.items() if name not in SECOND_MOMENTS), torch.zeros_like(param))
    spread = grad.error + unit * (grad.value.abs() + decay * param.abs() + moments)
    base = update(param, grad.value, new)
    widest, widths = torch.zeros_like(base), {name: torch.zeros_like(base) for name in tensors(new)}
    for end in (grad.value - spread, grad.value + spread):
        moved = dict(state)
        widest = torch.maximum(widest, (update(param, end, moved) - base).abs())
        widths = {name: torch.maximum(width, (moved[name] - new[name]).abs()) for name, width in widths.items()}
    error = 2 * widest + unit * (param.abs() + base.abs() + (base - param).abs() + moments) + TINY
    sizes = {name: new[name].abs() + known.get(name, torch.zeros_like(base)).abs() for name in widths}
    state.update(new)
    return Bounded(base, error), {n: Bounded(new[n], 2 * widths[n] + unit * size + TINY) for n, size in sizes.items()}
