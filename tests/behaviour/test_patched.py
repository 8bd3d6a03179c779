"""A program puts our classes into torch's modules, under any of their names, and goes on as before."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import accumfused as af
from accumfused.optimizers import PEERS

BEFORE = {stock: type(f"Before{stock.__name__}", (stock,), {}) for stock in PEERS}


def weights(cls: Any, change: Any = None) -> list[float]:
    """Those of two steps; the optimizer is changed between them."""
    optimizer = cls([Parameter(torch.full((2, 2), 8.0))], lr=0.5)
    for each in (None, change):
        optimizer = optimizer if each is None else each(optimizer)
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones(2, 2)
        optimizer.step()
    return param.detach().flatten().tolist()


@pytest.mark.parametrize("places", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("stock", PEERS, ids=lambda stock: stock.__name__)
def test_ours_in_the_place_of_a_class_of_torch(
    stock: Any, places: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ours = stock.__name__, PEERS[stock]
    in_package, in_module = places
    of_ours, of_torch = weights(ours), weights(stock)
    of_before = stock([Parameter(torch.full((2, 2), 8.0))], lr=0.5)
    if in_package:
        monkeypatch.setattr(torch.optim, name, ours)
    if in_module:
        monkeypatch.setattr(importlib.import_module(stock.__module__), name, ours)

    class After(ours):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    assert weights(ours) == weights(After) == of_ours
    for change in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        assert weights(ours, change) == of_ours
    assert weights(BEFORE[stock]) == weights(BEFORE[stock], copy.deepcopy) == of_torch
    assert weights(BEFORE[stock], af.fuse) == of_torch
    assert weights(lambda params, lr: af.fuse(of_before)) == of_ours
