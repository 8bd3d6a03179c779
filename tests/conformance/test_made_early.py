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


EARLY: list[Tensor] = []


def names_a_global() -> list[Tensor]:
    return list(EARLY)


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "a list in a dict": lambda value: {"some": [1, value]},
    "a dataclass": Held,
    "an optimizer": lambda value: torch.optim.SGD([value.requires_grad_()]),
    "a closure": lambda value: lambda: value,
    "a default": lambda value: lambda held=value: held,
    "a mark": lambda value: pytest.mark.parametrize("it", [pytest.param(value, id="it")])(lambda it: None),
}


@pytest.mark.parametrize("place_of", PLACES)
def test_a_tensor_is_found_in(place_of: str) -> None:
    assert reaches_tensors(PLACES[place_of](torch.ones(2)))
    assert not reaches_tensors(PLACES[place_of](torch.ones(())))


def test_a_global_is_found_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reaches_tensors(lambda: names_a_global())
    monkeypatch.setitem(globals(), "EARLY", [torch.ones(2)])
    monkeypatch.setattr(table, "EARLY", torch.ones(2), raising=False)
    assert reaches_tensors(lambda: names_a_global())
    assert reaches_tensors(lambda: table.EARLY)  # type: ignore[attr-defined]
    assert not reaches_tensors(lambda: table.CASES)
    assert not reaches_tensors([PLACES, torch, Tensor, torch.nn.Module, lambda: torch.ones(2)])
