"""Runs a rule's trace on tensors, one torch operation for each of its operations.

In: the inputs, by name. Out: the results, by name. The operations equal IEEE's one by one, see formats/numeric.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accumfused.arithmetic import Trace
from accumfused.formats.numeric import power, real_power, square_root
from accumfused.rule import Rule

_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "abs": torch.abs, "where": torch.where,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "sqrt": square_root, "power": power, "real_power": real_power, "float32": lambda value: value.float().double(),
}  # fmt: skip


def evaluate(trace: Trace, inputs: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Computes the results in `dtype`; a number that nobody reads any more is freed."""
    places, last = _order(trace)
    values: dict[int, Tensor] = {}
    for place in places:
        operation = trace.operations[place]
        if operation.name == "input":
            values[place] = inputs[operation.label]
        elif operation.name == "constant":
            # In two steps, because torch refuses fp64 numbers beyond fp32's range.
            values[place] = torch.full((), operation.constant, dtype=torch.float64, device=device).to(dtype)
        else:
            values[place] = _OPERATIONS[operation.name](*(values[operand] for operand in operation.operands))
            for operand in set(operation.operands):
                if last[operand] == place:
                    del values[operand]
    return {name: values[place] for name, place in trace.results.items()}


@functools.cache
def _order(trace: Trace) -> tuple[list[int], dict[int, int]]:
    """The operations to run, in order, and for each of their operands the last that reads it."""
    places = trace.needed()
    last = {operand: place for place in places for operand in trace.operations[place].operands}
    return places, last | dict.fromkeys(trace.results.values(), len(trace.operations))


def scalars(
    rule: type[Rule], hypers: Mapping[str, float], step: Tensor, kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The numbers that `update` reads, and the new tensor states, fp32, each of shape [] or [tensors].

    Args:
        rule: whose.
        hypers: by name.
        step: [tensors], the numbers of this step, int64.
        kept: the tensor states, [tensors], by name.
    """
    inputs = {name: torch.full((), value, dtype=torch.float64, device=step.device) for name, value in hypers.items()}
    inputs |= {"step": step.double()} | {name: value.double() for name, value in kept.items()}
    made = evaluate(rule.traced.scalars, inputs, torch.float64, step.device)
    return {name: value.float() for name, value in made.items()}


def update(
    rule: type[Rule], numbers: Mapping[str, Tensor], param: Tensor, grad: Tensor, states: list[Tensor]
) -> list[Tensor]:
    """The new parameter and states, out of place, fp32.

    Args:
        rule: whose.
        numbers: one tensor's scalars, each of shape [].
        param, grad, states: of one shape, fp32; the gradient times its coefficient.
    """
    inputs: dict[str, Any] = {f"s.{name}": value for name, value in numbers.items()}
    inputs |= {"p": param, "g": grad} | dict(zip(rule.states, states, strict=True))
    made = evaluate(rule.traced.update, inputs, torch.float32, param.device).values()
    return [value.expand_as(param) for value in made]  # a number that no element enters has shape []


def signed(hypers: Mapping[str, Any], coefficient: Tensor) -> Tensor:
    """The coefficient, negated where the rule is to maximize."""
    return -coefficient if hypers.get("maximize") else coefficient
