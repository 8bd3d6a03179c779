"""The search for tensors that are made at import finds them wherever a module of tests may keep one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import table
import torch
from made_early import reaches_tensors
from torch import Tensor


@dataclass(frozen=True)
class Held:
    value: Any


def in_a_closure(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def parametrized(value: Any) -> Any:
    return pytest.mark.parametrize("value", [pytest.param(value, id="it")])(lambda value: None)


def defaulted(value: Any) -> Any:
    return lambda held=value: held


EARLY: list[Tensor] = []


def names_a_global() -> list[Tensor]:
    return list(EARLY)


def calls_one_that_does() -> Callable[[], list[Tensor]]:
    return lambda: names_a_global()


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda value: value,
    "a list in a dict": lambda value: {"some": [1, value]},
    "a dataclass": Held,
    "a set of parameters": lambda value: {torch.nn.Parameter(value)},
    "an optimizer": lambda value: torch.optim.SGD([value.requires_grad_()]),
    "a closure": in_a_closure,
    "a default": defaulted,
    "a mark": parametrized,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_found_in(place: str) -> None:
    assert reaches_tensors(PLACES[place](torch.ones(2)))
    assert not reaches_tensors(PLACES[place](torch.ones(())))


@pytest.mark.parametrize("function", [names_a_global, calls_one_that_does], ids=lambda function: function.__name__)
def test_a_global_is_found_where_it_is_named(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reaches_tensors(function)
    monkeypatch.setitem(globals(), "EARLY", [torch.ones(2)])
    assert reaches_tensors(function)
    assert not reaches_tensors(test_what_makes_tensors_when_it_is_called_reaches_none)


def test_a_global_of_another_module_is_found_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def names_it() -> Any:
        return table.EARLY  # type: ignore[attr-defined]

    monkeypatch.setattr(table, "EARLY", torch.ones(2), raising=False)
    assert reaches_tensors(names_it)
    assert not reaches_tensors(lambda: table.CASES)


def test_what_makes_tensors_when_it_is_called_reaches_none() -> None:
    assert not reaches_tensors([PLACES, torch, Tensor, torch.nn.Module, lambda: torch.ones(2)])
