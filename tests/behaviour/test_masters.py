"""Parameters overwritten from outside: fp32 masters follow, remainders stay, weights that come back lose nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same, assert_same_bits
from models import MASTERS, Model, grads_of, skip_a_step, train, trained, whole
from torch import Tensor

each_master = pytest.mark.parametrize("weights", MASTERS)

Change = Callable[[Model, Any], Any]


def without_masters(optimizer: Any) -> Any:
    return optimizer.load_state_dict(copy.deepcopy(trained("fp32", "fp32", "reference")[1].state_dict()))


def within_a_load(model: Model, optimizer: Any, values: Tensor) -> None:
    hook = optimizer.register_load_state_dict_post_hook(lambda _: model.matrix.copy_(values))
    without_masters(optimizer)
    hook.remove()


WRITES: dict[str, Callable[[Model, Any, Tensor], Any]] = {
    "copy_": lambda model, _, values: model.matrix.copy_(values),
    "arithmetic": lambda model, _, values: model.matrix.mul_(0).add_(values),
    "load": lambda model, _, values: model.load_state_dict({**model.state_dict(), "matrix": values, "tied": values}),
    "a hook of the optimizer's": within_a_load,
}


def another_steps(model: Model, optimizer: Any) -> None:
    model.vector.grad = torch.zeros_like(model.vector)
    optimizer.step()
    optimizer.zero_grad()


def empty_checkpoint(model: Model, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def resumed(model: Model, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 1)  # what was loaded is done with


def laid_out_anew(model: Model, optimizer: Any) -> None:
    """The state is converted with the next gradient; another parameter steps before that."""
    model.matrix.data = model.matrix.detach().t().contiguous().t()
    another_steps(model, optimizer)


BEFORE: dict[str, Change] = {
    "steps": lambda model, optimizer: None,
    "no state": lambda model, optimizer: optimizer.state.pop(model.matrix),
    "a checkpoint without masters": lambda model, optimizer: without_masters(optimizer),
    "fp32 weights": lambda model, optimizer: optimizer.load_full_precision_state_dict(
        model, optimizer.full_precision_state_dict(model)
    ),
    **{each.__name__: each for each in (another_steps, empty_checkpoint, resumed, laid_out_anew)},
}


def saved_within_a_window(model: Model, optimizer: Any) -> None:
    grads_of(optimizer, 0)
    optimizer.accumulate(0.3)
    optimizer.state_dict()
    optimizer.zero_grad()


SEEN_BY: dict[str, Change] = {
    "reading": lambda model, optimizer: whole(optimizer),
    "a skipped step": lambda model, optimizer: skip_a_step(optimizer),
    "copying": lambda model, optimizer: copy.deepcopy(optimizer),
    "a checkpoint": lambda model, optimizer: without_masters(optimizer),
    "loading": lambda model, optimizer: optimizer.load_full_precision_state_dict(
        model, {"vector": torch.ones(130)}, strict=False
    ),
    **{each.__name__: each for each in (another_steps, saved_within_a_window)},
}


@pytest.mark.pairwise(
    weights=MASTERS, states=["fp32", "8bit"], write=[*WRITES], before=[*BEFORE], copied=[0, 1], seen_by=[*SEEN_BY]
)
def test_what_was_overwritten_is_stepped_from_what_it_is_and_other_masters_stay(
    backend: str, weights: str, states: str, write: str, before: str, copied: int, seen_by: str
) -> None:
    model, optimizer = trained(weights, states, backend)
    BEFORE[before](model, optimizer)
    if copied:
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    masters = optimizer.full_precision_state_dict(model)
    values = (8 + torch.rand(37, 11)).to(model.matrix.dtype)  # no element is by chance what it was
    with torch.no_grad():
        WRITES[write](model, optimizer, values)
    SEEN_BY[seen_by](model, optimizer)
    for _ in range(2):
        found = optimizer.full_precision_state_dict(model)
        # An fp32 master is the parameter where that was written; a remainder adds up to half a unit of bfloat16.
        error = (found["matrix"] - values.float()).abs()
        assert bool((error <= (values.float() * 2.0**-8 if "split" in weights else 0.0)).all())
        for name in ("scalar", "kernel") if write != "load" else ():
            assert_same_bits(found[name], masters[name], name)
        skip_a_step(optimizer)
    twin_model, twin = copy.deepcopy((model, optimizer))  # whose master is made anew from these values
    twin.load_full_precision_state_dict(twin_model, {"matrix": found["matrix"]}, strict=False)
    for each in (optimizer, twin):
        train(each, 2, seed=9)
    assert_same(optimizer, twin)


@each_master
def test_weights_that_are_swapped_for_an_evaluation_come_back_with_their_masters(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    kept, twin = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
        optimizer.state_dict(), copy.deepcopy(optimizer)  # neither of which may take the average for the weights
        if "split" not in weights:
            assert whole(optimizer)[1].unique().tolist() == [0.25]
        model.load_state_dict(kept.state_dict())
    for each in (optimizer, twin):
        train(each, 1, seed=5)
    assert_same(optimizer, twin)
