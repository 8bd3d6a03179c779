"""Runs a rule's trace on tensors, one torch operation for each of its operations.

In: the inputs, by name. Out: the results, by name. Each operation equals IEEE's. `add(alpha=)`, `lerp` and `addcmul`
may contract, and torch's `sqrt` is not correctly rounded on a CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accumfused.rules.rule import Rule
from accumfused.rules.trace import Trace

_POWER_BITS = 25  # a float32 step count is exact up to 2^24
_FRACTION_BITS = 53


def square_root(value: Tensor) -> Tensor:
    """Takes the IEEE square root of an fp32 or fp64 tensor; torch's is not correctly rounded on a CPU.

    fp32 is exact through fp64, since 53 >= 2 * 24 + 2 (Figueroa 1995); fp64 goes through Python, which a CPU allows.
    """
    if value.dtype == torch.float32:
        return value.double().sqrt().float()
    if value.device.type != "cpu":
        return value.sqrt()
    roots = [math.sqrt(number) if number >= 0 else math.nan for number in value.flatten().tolist()]
    return torch.tensor(roots, dtype=torch.float64, device="cpu").view_as(value)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """Computes `base ** exponent` in fp64 by squaring, for whole exponents >= 0, below 2^25 in size."""
    exponent = exponent.to(torch.int64)
    result, factor = torch.ones_like(exponent, dtype=torch.float64), base
    for bit in range(_POWER_BITS):
        result = torch.where((exponent >> bit) & 1 == 1, result * factor, result)
        factor = factor * factor
    return result


def real_power(base: Tensor, exponent: Tensor) -> Tensor:
    """Computes `base ** exponent` in fp64: `power` for the whole part, roots for the digits after the point."""
    size = exponent.abs()
    whole = size.clamp(max=2.0 ** (_POWER_BITS - 1)).floor()
    result, rest, root = power(base, whole), size - whole, base
    for _ in range(_FRACTION_BITS):
        root, rest = square_root(root), rest + rest
        result, rest = torch.where(rest >= 1, result * root, result), torch.where(rest >= 1, rest - 1, rest)
    result = torch.where(exponent < 0, 1.0 / result, result)
    return torch.where(exponent.isnan(), exponent, result)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "abs": torch.abs, "where": torch.where,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "sqrt": square_root, "power": power, "real_power": real_power, "float32": lambda value: value.float().double(),
}  # fmt: skip


_WITHOUT_ROUNDING = {**_OPERATIONS, "sqrt": torch.sqrt, "float32": lambda value: value}  # for fp64 parameters


def evaluate(
    trace: Trace, inputs: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, *, rounds: bool = True
) -> dict[str, Tensor]:
    """Computes the results in `dtype`; a number that no later operation reads is freed.

    Args:
        rounds: False: for fp64 parameters, where nothing becomes fp32, and a root is torch's.
    """
    operations = _OPERATIONS if rounds else _WITHOUT_ROUNDING
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
            values[place] = operations[operation.name](*(values[operand] for operand in operation.operands))
            for operand in set(operation.operands):
                if last[operand] == place:
                    del values[operand]
    return {name: values[place] for name, place in trace.results.items()}


@functools.cache
def _order(trace: Trace) -> tuple[list[int], dict[int, int]]:
    """Lists the operations to run, in order, and for each of their operands the last that reads it."""
    places = trace.needed()
    last = {operand: place for place in places for operand in trace.operations[place].operands}
    return places, last | dict.fromkeys(trace.results.values(), len(trace.operations))


def scalars(
    rule: type[Rule], hypers: Mapping[str, float | Tensor], step: Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Computes the numbers that `update` reads, each of shape [] or [tensors].

    Args:
        rule: whose.
        hypers: by name; a tensor has one element.
        step: [tensors], the numbers of this step, int64.
        dtype: of the parameters in full precision: fp32 or fp64.
    """
    rounds = dtype == torch.float32
    inputs = {
        name: value.to(step.device, torch.float64).reshape(())
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float64, device=step.device)
        for name, value in hypers.items()
    }
    results = evaluate(rule.traced.scalars, inputs | {"step": step.double()}, torch.float64, step.device, rounds=rounds)
    return {name: value.to(dtype) for name, value in results.items()}


def update(
    rule: type[Rule], numbers: Mapping[str, Tensor], param: Tensor, grad: Tensor, states: list[Tensor]
) -> list[Tensor]:
    """Computes the new parameter and states, out of place.

    Args:
        rule: whose.
        numbers: one tensor's scalars, each of shape [].
        param, grad, states: of one shape, fp32 or fp64; the gradient times its coefficient.
    """
    inputs: dict[str, Any] = {f"s.{name}": value for name, value in numbers.items()}
    inputs |= {"p": param, "g": grad} | dict(zip(rule.states, states, strict=True))
    rounds = param.dtype == torch.float32
    results = evaluate(rule.traced.update, inputs, param.dtype, param.device, rounds=rounds).values()
    return [value.expand_as(param) for value in results]  # a number that no element enters has shape []


def signed(hypers: Mapping[str, Any], coefficient: Tensor) -> Tensor:
    """Negates the coefficient where the rule is to maximize."""
    return -coefficient if hypers.get("maximize") else coefficient
