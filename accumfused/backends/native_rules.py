"""The rules that native kernels run: the native module's own, told by their functors' digests, and compiled ones."""

from __future__ import annotations

import functools

from accumfused import compiled
from accumfused.backends import user_rules
from accumfused.core.plan import Plan
from accumfused.functors import digest
from accumfused.rule import Rule


@functools.cache
def _places() -> dict[str, int]:
    return {digest: index for index, (_, digest, *_) in enumerate(compiled.module.rules())}


def indices(plan: Plan) -> list[int]:
    """Each group's rule as an index into the native module's rules, for the CUDA kernels."""
    for rule in plan.rules:
        if reason := why_not_cuda(rule):
            raise RuntimeError(reason)
    return [0 if rule.is_foreign else _places()[digest(rule)] for rule in plan.rules]


def codes(plan: Plan, instruction_set: str) -> list[int]:
    """The address of the RuleCode of each group's rule, for the CPU's kernels."""
    return [_code(rule, instruction_set) for rule in plan.rules]


@functools.cache
def _code(rule: type[Rule], instruction_set: str) -> int:
    if rule.is_foreign:
        return 0  # its own step updates
    if digest(rule) in _places():
        return int(compiled.module.rule_codes(instruction_set)[_places()[digest(rule)]])
    code = user_rules.code(rule, instruction_set)
    if isinstance(code, str):
        raise RuntimeError(code)
    return code


def why_not_cpu(rule: type[Rule]) -> str | None:
    """The reason why the CPU's kernels cannot run the rule, or None."""
    if rule.is_foreign or digest(rule) in _places():
        return None
    code = user_rules.code(rule, compiled.module.instruction_sets()[0])
    return code if isinstance(code, str) else None


def why_not_cuda(rule: type[Rule]) -> str | None:
    """The reason why the CUDA kernels cannot run the rule, or None."""
    if rule.is_foreign or (rule.is_common and digest(rule) in _places()):
        return None
    return f"the native module has no CUDA kernel for the rule {rule.name}; Triton has"
