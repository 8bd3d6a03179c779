"""Parameters overwritten from outside: their masters follow, and only theirs; our own steps are not mistaken for it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from stored import MASTERS, Model, assert_same, build, grads_of, skip_a_step, train, trained, whole
from table import WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

each_master = pytest.mark.parametrize("weights", MASTERS)

Change = Callable[[Model, Any], Any]
WRITES: dict[str, Callable[[Model, Tensor], Any]] = {
    "copy_": lambda model, values: model.matrix.copy_(values),
    "arithmetic": lambda model, values: model.matrix.mul_(0).add_(values),
    "load": lambda model, values: model.load_state_dict({**model.state_dict(), "matrix": values, "tied": values}),
}


def without_masters() -> Any:
    return copy.deepcopy(trained("fp32", "fp32", "torch")[1].state_dict())


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
    "a checkpoint without masters": lambda model, optimizer: optimizer.load_state_dict(without_masters()),
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
    "a checkpoint": lambda model, optimizer: optimizer.load_state_dict(without_masters()),
    "loading": lambda model, optimizer: optimizer.load_full_precision_state_dict(
        model, {"vector": torch.ones(130)}, strict=False
    ),
    **{each.__name__: each for each in (another_steps, saved_within_a_window)},
}


@pytest.mark.pairwise(
    weights=MASTERS, states=["fp32", "int8"], write=[*WRITES], before=[*BEFORE], copied=[0, 1], seen_by=[*SEEN_BY]
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
        WRITES[write](model, values)
    SEEN_BY[seen_by](model, optimizer)
    for _ in range(2):
        found = optimizer.full_precision_state_dict(model)
        assert torch.equal(found["matrix"], values.float())
        for name in ("scalar", "kernel") if write != "load" else ():
            assert_same_bits(found[name], masters[name], name)
        skip_a_step(optimizer)
    twin_model, twin = copy.deepcopy((model, optimizer))  # whose master is made anew from these values
    twin.load_full_precision_state_dict(twin_model, {"matrix": found["matrix"]}, strict=False)
    for each in (optimizer, twin):
        train(each, 2, seed=9)
    assert_same(optimizer, twin)


@each_master
def test_a_checkpoint_without_masters_leaves_those_that_are_there(backend: str, weights: str) -> None:
    for steps in (0, 2):
        source, saved = trained("fp32", "fp32", backend, steps=steps)
        model, optimizer = build(weights, "int8", backend)
        optimizer.load_full_precision_state_dict(model, source.state_dict())
        before = whole(optimizer)
        assert not torch.equal(before[0], model.matrix.float())
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        torch.optim.AdamW(Model(torch.float32).parameters()).load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            assert all(map(torch.equal, whole(optimizer), before))
            assert [float(entries["step"]) for entries in optimizer.state.values()] == [steps] * 4  # it is complete
            skip_a_step(optimizer)


@each_master
def test_skipped_and_partial_steps_and_windows_are_our_own(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert not torch.equal(whole(optimizer)[1], model.vector.float())
    skip_a_step(optimizer)
    for each, own in ((optimizer, model), (twin, twin_model)):
        another_steps(own, each)
        for seed in range(2):
            grads_of(each, seed)
            each.accumulate(1.0)
        each.step()
    assert_same(optimizer, twin)


@pytest.mark.parametrize("weights", ["bf16_master", "fp16_master"])
def test_an_fp32_master_serves_again_when_its_weights_come_back(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    _, twin = copy.deepcopy((model, optimizer))
    kept = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
        optimizer.state_dict(), copy.deepcopy(optimizer)  # neither of which may take the average for the weights
        assert whole(optimizer)[1].unique().tolist() == [0.25]
        for param, values in zip(model.parameters(), kept, strict=True):
            param.copy_(values)
    for each in (optimizer, twin):
        train(each, 1, seed=5)
    assert_same(optimizer, twin)


@each_master
def test_a_parameter_with_holes_keeps_its_master_when_another_gets_its_first_state(backend: str, weights: str) -> None:
    dtype, settings = WEIGHTS[weights]
    values = torch.randn(64).to(dtype)
    results = []
    for param in (Parameter(values.clone()), Parameter(torch.zeros(128, dtype=dtype)[::2].copy_(values))):
        other = Parameter(torch.zeros(3, dtype=dtype))
        optimizer = af.SGD([param, other], lr=1e-4, rounding_seed=1, backend=backend, **settings)
        for step in range(3):
            grads_of(optimizer, step)
            other.grad = None if step == 0 else other.grad
            optimizer.step()
        results.append(whole(optimizer)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("weights", ["split16", "split8"])
def test_remainders_that_are_dropped_before_every_step_draw_one_warning(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend, lr=1e-6)

    def steps(count: int, limit: float | None = 1000.0) -> list[str]:
        with warnings.catch_warnings(record=True) as seen, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(count):
                if limit is not None:
                    model.vector.clamp_(max=limit)
                train(optimizer, 1)
        return [str(warning.message) for warning in seen]

    assert steps(4) == []  # the first had no remainder to drop
    assert steps(1, limit=None) + steps(3) == []
    message = "\n".join(steps(4))
    assert message.count("a parameter was written") == 1
    assert "before each of the last 4 steps (by Embedding(max_norm=...), clamp_()" in message
    assert "master_weights='fp32' keeps every element" in message
    assert steps(9) == []
