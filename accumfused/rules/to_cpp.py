"""Prints rules as C++ functors: csrc/rules.h says what a functor is. Imports no torch: setup.py runs it."""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accumfused.rules.rule import Rule
from accumfused.rules.trace import CONDITIONS, Trace

_EXPRESSIONS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "lt": "{} < {}", "le": "{} <= {}",
    "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}", "and": "{} && {}", "or": "{} || {}",
    "not": "!{}", "where": "{} ? {} : {}", "abs": "absolute({})", "sqrt": "square_root({})",
    "power": "power({}, int64_t({}))", "real_power": "real_power({}, {})", "float32": "double(float({}))",
}  # fmt: skip


def write(folder: Path) -> None:
    """Writes functors.h for the rules of all optimizers, if the text has changed."""
    files = sorted((Path(__file__).parents[1] / "optimizers").glob("*.py"))
    text, path = header(rule for file in files for rule in rules_in(file)), folder / "functors.h"
    if not path.exists() or path.read_text() != text:
        part = folder / f"functors.{os.getpid()}"  # another process may be reading the old one
        part.write_text(text)
        part.replace(path)


def header(rules: Iterable[type[Rule]]) -> str:
    """Prints the functors of rules, and lists of them: AF_RULES, which begins with AF_CUDA_RULES, those for nvcc."""
    rules = sorted(rules, key=lambda rule: not rule.is_common)
    cuda, rest = (
        " ".join(f"X({functor_name(r)})" for r in rules if r.is_common is is_common) for is_common in (True, False)
    )
    lists = f"#define AF_CUDA_RULES(X) {cuda}", f"#define AF_RULES(X) AF_CUDA_RULES(X) {rest}"
    return "\n".join([*(functor(rule, is_common=rule.is_common) for rule in rules), *lists, ""])


def functor_name(rule: type[Rule]) -> str:
    return "".join(word.capitalize() for word in rule.name.split("_")) + "Functor"


@functools.cache
def digest(rule: type[Rule]) -> str:
    """Tells a rule from another one of the same name, and from what it was when the native module was built."""
    return hashlib.sha256(_functor(rule, "", True).encode()).hexdigest()[:16]


def functor(rule: type[Rule], *, is_common: bool) -> str:
    return _functor(rule, digest(rule), is_common)


def _functor(rule: type[Rule], digest: str, is_common: bool) -> str:
    # A rule's names get a trailing underscore: some are keywords of C++, or names of this functor.
    name, scalars = functor_name(rule), list(rule.traced.scalars.results)
    states = [f"{state}_" for state in rule.states]
    inputs = {hyper: f"hyper[{index}]" for index, hyper in enumerate(rule.hyper_names)} | {"step": "double(step)"}
    maximizes = f"{inputs['maximize']} != 0 ? -coef : coef" if "maximize" in inputs else "coef"
    elements = {f"s.{scalar}": scalar for scalar in scalars} | {"p": "p", "g": "g"}
    elements |= dict(zip(rule.states, states, strict=True))
    computed, numbers = _statements(rule.traced.scalars, inputs, "double")
    updated, results = _statements(rule.traced.update, elements, "float")
    lines = [
        f"struct {name} {{",
        f'  static constexpr const char* kName = "{rule.name}";',
        f'  static constexpr const char* kDigest = "{digest}";',
        f"  static constexpr bool kIsCommon = {str(is_common).lower()};",
        f"  static constexpr int kStates = {len(rule.states)};",
        f"  static constexpr int kFirstSecondMoment = {len(rule.states) - len(rule.second_moments)};",
        f"  static constexpr const char* kStateNames[] = {{{_quoted(rule.states)}}};",
        f"  static constexpr bool kCountsSteps = {str(rule.counts_steps).lower()};",
        f"  static constexpr int kHypers = {len(rule.hyper_names)};",
        f"  static constexpr const char* kHyperNames[] = {{{_quoted(rule.hyper_names)}}};",
        f"  float {', '.join(['coefficient', *scalars])};",
        "",
        f"  AF_METHOD {name}(const double* hyper, [[maybe_unused]] int64_t step, float coef)",
        f"      : coefficient({maximizes}) {{",
        *computed,
        *(f"    {scalar} = float({number});" for scalar, number in zip(scalars, numbers, strict=True)),
        "  }",
        "",
        f"  AF_METHOD void operator()(float& p, float grad{''.join(f', float& {state}' for state in states)}) const {{",
        "    [[maybe_unused]] const float g = grad * coefficient;",
        *updated,
        # A result may be the input that another one overwrites.
        *(f"    const float r{index} = {result};" for index, result in enumerate(results)),
        *(f"    {result} = r{index};" for index, result in enumerate(["p", *states])),
        "  }",
        "};",
        "",
    ]
    return "\n".join(lines)


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "nullptr"


def _statements(trace: Trace, inputs: dict[str, str], number: str) -> tuple[list[str], list[str]]:
    """Prints a line for each operation, and the results; inputs and constants stand in the lines that read them."""
    lines, text = [], dict[int, str]()
    for place in trace.needed():
        operation = trace.operations[place]
        if operation.name == "input":
            text[place] = inputs[operation.label]
        elif operation.name == "constant":
            text[place] = f"{number}({_literal(operation.constant)})"
        else:
            text[place] = f"v{place}"
            expression = _EXPRESSIONS[operation.name].format(*(text[operand] for operand in operation.operands))
            lines.append(f"    const {'bool' if operation.name in CONDITIONS else number} v{place} = {expression};")
    return lines, [text[place] for place in trace.results.values()]


def _literal(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '__builtin_nan("")' if math.isnan(value) else f"{'-' if value < 0 else ''}__builtin_inf()"


def rules_in(file: Path) -> list[type[Rule]]:
    """Reads the rules of a file in optimizers/, without its optimizer classes, which need torch."""
    tree = ast.parse(file.read_text(), str(file))
    tree.body = [node for node in tree.body if _is_of_rules(node)]
    namespace: dict[str, Any] = {"__name__": file.stem}
    exec(compile(tree, str(file), "exec"), namespace)  # this project's own file
    classes = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, Rule)]
    return [rule for rule in classes if rule.__module__ == file.stem and rule.name]


def _is_of_rules(node: ast.stmt) -> bool:
    """Tells whether the statement is a rule's class, or imports no more than Python and the rules' own modules."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("__future__", "collections.abc", "typing", "accumfused.rules")
    if isinstance(node, ast.ClassDef):
        return any(isinstance(base, ast.Name) and base.id.endswith("Rule") for base in node.bases)
    return isinstance(node, ast.Import) and all(name.name == "math" for name in node.names)
