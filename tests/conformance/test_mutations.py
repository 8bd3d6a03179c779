"""The tests bite: every numeric comparison fails for a step that does nothing and for a coefficient 1e-3 off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_accumulation_numbers
import test_backends_agree
import test_layouts
import test_native
import test_rules
from table import CASES, Case

from accumfused import _native
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend


class DoesNothing:
    """A backend whose step writes nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, plan: Any, grads: Any, hypers: Any, outcome: Any) -> None:
        pass


class WrongCoefficient(DoesNothing):
    """A backend whose coefficient is one in a thousand too large."""

    def step(self, plan: Any, grads: Any, hypers: Any, outcome: Any) -> None:
        outcome.values[0] *= 1.001
        self._inner.step(plan, grads, hypers, outcome)


COMPARISONS: list[Any] = [
    pytest.param(compare, applies, id=f"{module.__name__.removeprefix('test_')}: {name}")
    for module in (test_rules, test_accumulation_numbers, test_layouts, test_native, test_backends_agree)
    for name, compare, applies in module.COMPARISONS
    if not (module is test_backends_agree and _native._C is None)
]


def inner_backend() -> Any:
    """Of the mutants: the fastest one, since the mutation stands in front of it."""
    return ReferenceBackend() if _native._C is None else CpuBackend()


@pytest.mark.parametrize("mutant", [DoesNothing, WrongCoefficient])
@pytest.mark.parametrize(("compare", "applies"), COMPARISONS)
def test_every_comparison_fails_for(
    compare: Callable[[Case, Any], None], applies: Callable[[Case], bool], mutant: Callable[[Any], Any]
) -> None:
    passed = [case.name for case in CASES if applies(case) and not fails(compare, case, mutant(inner_backend()))]
    assert passed == [], f"the comparison cannot tell {mutant.__name__} from the optimizer"


def fails(compare: Callable[[Case, Any], None], case: Case, backend: Any) -> bool:
    try:
        compare(case, backend)
    except (AssertionError, KeyError):  # KeyError: a state that was never made
        return True
    return False


@pytest.mark.parametrize(("compare", "applies"), COMPARISONS)
def test_every_comparison_passes_behind_the_same_wrapper(
    compare: Callable[[Case, Any], None], applies: Callable[[Case], bool]
) -> None:
    class Unchanged(DoesNothing):
        def step(self, *args: Any) -> None:
            self._inner.step(*args)

    for case in CASES[::4]:
        if applies(case):
            compare(case, Unchanged(inner_backend()))
