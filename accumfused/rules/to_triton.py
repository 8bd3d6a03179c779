"""Prints a rule as two Triton functions, and compiles them.

scalars(hyper, step, coefficient) -> numbers: takes the hyper-parameters (fp64, in the order of `rule.hyper_names`) and
the number of this step. It returns fp32: what update() reads, first the coefficient. update(scalars, p, grad, state0,
... state3) -> (p, state0, ... state3): takes tensors of elements; states that the rule does not have go through.
"""

from __future__ import annotations

import functools
import linecache
import math
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from accumfused.rules.rule import MAX_STATES, Rule
from accumfused.rules.to_cpp import digest
from accumfused.rules.trace import Trace

_COMMON = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}",
    "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}", "where": "tl.where({}, {}, {})", "abs": "tl.abs({})",
    # Not & | ~: Triton's interpreter refuses them between a number's condition and an element's.
    "and": "tl.where({}, {}, False)", "or": "tl.where({}, True, {})", "not": "tl.where({}, False, True)",
}  # fmt: skip
_FP32 = _COMMON | {"div": "tl.div_rn({}, {})", "sqrt": "tl.sqrt_rn({})"}
_FP64 = _COMMON | {
    "div": "{} / {}", "sqrt": "tl.sqrt({})", "power": "numeric.power({}, ({}).to(tl.int32))",
    "real_power": "numeric.real_power({}, {})", "float32": "({}).to(tl.float32).to(tl.float64)",
}  # fmt: skip


@functools.cache
def compiled(rule: type[Rule], numeric: ModuleType) -> tuple[Any, Any]:
    """Compiles `scalars` and `update` for Triton's kernels; `numeric` has power() and real_power() in Triton."""
    name = f"{rule.name}_{digest(rule)}"
    both = ("scalars", _scalars(rule)), ("update", _update(rule))
    scalars, update = (_function(f"{name}_{part}", lines, numeric) for part, lines in both)
    return scalars, update


def _scalars(rule: type[Rule]) -> list[str]:
    inputs = {name: f"hyper[{index}]" for index, name in enumerate(rule.hyper_names)} | {"step": "step.to(tl.float64)"}
    lines, results = _statements(rule.traced.scalars, inputs, _FP64, "tl.float64")
    sign = []
    if "maximize" in rule.hyper_names:  # -x would lose the sign of a zero
        sign = [f"coefficient = tl.where({inputs['maximize']} != 0, coefficient * -1.0, coefficient)"]
    rounded = ["coefficient", *(f"({result}).to(tl.float32)" for result in results)]
    return ["(hyper, step, coefficient):", *sign, *lines, f"return {_tuple(rounded)}"]


def _update(rule: type[Rule]) -> list[str]:
    scalars = ["coefficient", *(f"s_{name}" for name in rule.traced.scalars.results)]
    states = [f"state{index}" for index in range(MAX_STATES)]
    inputs = {f"s.{name}": f"s_{name}" for name in rule.traced.scalars.results}
    inputs |= {"p": "p", "g": "g"} | dict(zip(rule.states, states, strict=False))
    lines, results = _statements(rule.traced.update, inputs, _FP32, "tl.float32")
    results += states[len(rule.states) :]
    return [
        f"(scalars, p, grad, {', '.join(states)}):", f"{_tuple(scalars)} = scalars", "g = grad * coefficient", *lines,
        f"return {_tuple(results)}",
    ]  # fmt: skip


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)},)"


def _statements(
    trace: Trace, inputs: dict[str, str], expressions: dict[str, str], dtype: str
) -> tuple[list[str], list[str]]:
    """Prints a line for each operation, and the results."""
    lines, text = [], dict[int, str]()
    for place in trace.needed():
        operation = trace.operations[place]
        if operation.name == "input":
            text[place] = inputs[operation.label]
        else:
            expression = _constant(operation.constant, dtype)
            if operation.name != "constant":
                expression = expressions[operation.name].format(*(text[operand] for operand in operation.operands))
            text[place] = f"v{place}"
            lines.append(f"v{place} = {expression}")
    return lines, [text[place] for place in trace.results.values()]


def _constant(value: float, dtype: str) -> str:
    if value == 0 and math.copysign(1.0, value) < 0:  # before Triton 3.9 a literal that equals 0 is +0
        return f"{_constant(0.0, dtype)} * -1.0"
    literal = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full([], {literal}, {dtype})"


def _function(name: str, lines: list[str], numeric: ModuleType) -> Any:
    """Makes a Triton function of its text, which Triton reads through linecache, so it need not lie in a file."""
    signature, *body = lines
    text = "\n    ".join([f"def {name}{signature}", *body]) + "\n"
    file = f"<accumfused {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"tl": tl, "numeric": numeric, "__name__": __name__}
    exec(compile(text, file, "exec"), namespace)  # printed above, from a trace
    return triton.jit(namespace[name])
