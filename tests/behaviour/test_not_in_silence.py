"""What once gave wrong weights without a word: now it is right, refused with the remedy, or warned of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import inside
import pytest
import torch
from compare import refused
from loop import Loop
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

LR = 0.125  # all results here are exact in fp32
SIZE = 4096
with_and_without_addresses = pytest.mark.parametrize("backend", ["cpu", "reference"], indirect=True)


def weight(dtype: torch.dtype = torch.float32) -> Any:
    return Parameter(torch.full((SIZE,), 8.0, dtype=dtype))


def one(backend: str, **settings: Any) -> tuple[Any, Any]:
    param = weight()
    return param, af.SGD([param], lr=LR, backend=backend, **settings)


def fold(optimizer: Any, value: float, weight: Any = None, *, last: bool = False) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, value)
    optimizer.accumulate(weight, last=last)


def moved(param: Tensor) -> float:
    (distance,) = {8.0 - value for value in param.detach().unique().tolist()}
    return float(distance)


# ---- gradients in memory that is written again -----------------------------------------------------------------------

STATIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "held": lambda memory, param: memory,
    "seen anew": lambda memory, param: memory.view(SIZE),
    "detached": lambda memory, param: memory.detach(),
    "foreign": lambda memory, param: torch.from_dlpack(memory),
    "the parameter": lambda memory, param: param.detach(),  # the gradient of p^2 / 2
}


@with_and_without_addresses
@pytest.mark.pairwise(kind=tuple(STATIC), last=(False, True))
def test_a_gradient_in_memory_of_others_is_copied(backend: str, kind: str, last: bool) -> None:
    param, optimizer = one(backend, max_grad_norm=1e9)
    memory, total = torch.zeros(SIZE), 0.0
    for _ in range(2):
        expected = 0.0
        for value in (1.0, 2.0, 2.0, 4.0):
            param.grad = STATIC[kind](memory.fill_(value), param)
            expected += float(param.grad[0])
            optimizer.accumulate(last=last and value == 4.0)
            assert moved(param) == LR * total
        optimizer.step()
        assert float(optimizer.grad_norm) == expected * SIZE**0.5
        total += expected
    assert moved(param) == LR * total
    assert memory.unique().tolist() == [4.0]  # which is the user's, and was not added to


@with_and_without_addresses
@pytest.mark.parametrize("late", [False, True])
def test_one_gradient_of_two_parameters_is_copied(backend: str, late: bool) -> None:
    """Also where it is the first of one alone, whose sum gets the weight where it lies."""
    params = [weight(), weight()]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    params[1].grad = torch.ones(SIZE)
    optimizer.accumulate(1.0) if late else optimizer.zero_grad()
    for _ in range(1 if late else 2):
        params[0].grad = params[1].grad = torch.ones(SIZE)
        optimizer.accumulate(3.0 if late else None)
    optimizer.step()
    assert [moved(param) for param in params] == ([0.75 * LR, LR] if late else [2 * LR] * 2)


def test_a_step_takes_exposed_gradients_that_were_exchanged(backend: str) -> None:
    assert Loop(backend, "backward close exchange step").values() == [7.0, 7.5]  # the user's own doing


def test_gradients_that_lie_where_the_sums_of_others_will_are_added_to_the_right_ones(backend: str) -> None:
    first, second = params = [weight(torch.bfloat16), weight(torch.bfloat16)]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.accumulate(last=True)
    optimizer.zero_grad(set_to_none=False)
    first.grad, second.grad = second.grad, first.grad
    (2 * first + second).sum().backward()
    optimizer.accumulate()
    optimizer.step()
    assert [moved(param) for param in params] == [2 * LR, LR]


# ---- warnings, which as errors leave everything as it was ------------------------------------------------------------


def refused_strictly(it: Loop, verb: str, text: str) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        af.strict()
        for _ in range(2):  # it comes again
            with refused(it.optimizer, af.AccumulationWarning, text):
                it.run(verb)


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_change_within_a_window_draw_one_warning(backend: str, last: bool) -> None:
    it, text = Loop(backend), "a parameter was written while a window was open"
    for written, warns in ((False, False), (False, False), (True, True), (True, False)):
        it.run("backward accumulate")
        with torch.no_grad():
            it.params[0].add_(1) if written else None
        it.run("backward" if last else "")
        if warns:
            refused_strictly(it, "close" if last else "step", text)
        with pytest.warns(UserWarning, match=text) if warns else nullcontext():
            it.run("close" if last else "step")
        it.run("step")
        with torch.no_grad():
            it.params[0].mul_(2)  # between windows it is nobody's business


def test_a_dropped_window_that_is_an_error_is_not_dropped(backend: str) -> None:
    it = Loop(backend, "backward accumulate zero_grad backward accumulate backward")
    text = r"two accumulation windows in a row were dropped.*after optimizer\.step\(\), not between the micro-batches"
    refused_strictly(it, "zero_grad", text)


# ---- windows that go wrong on the way --------------------------------------------------------------------------------


def test_a_group_that_is_added_to_a_closed_window_is_released_with_it(backend: str) -> None:
    it, added = Loop(backend, "backward close"), weight()
    it.optimizer.add_param_group({"params": [added]})
    for was_closed in (True, False):
        added.sum().backward()
        it.run("step")
        assert (it.params[0].grad, added.grad is None) == (None, was_closed)
    assert moved(added) == 2 * 0.5


def test_momentum_that_is_switched_on_later_is_in_no_checkpoint_yet(backend: str) -> None:
    params = [weight(torch.float16), weight(torch.float16)]
    first, second = (af.SGD([param], lr=LR, backend=backend) for param in params)
    for param, optimizer in zip(params, (first, second), strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.5
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.step()
    second.step()
    assert torch.equal(*params)


@pytest.mark.parametrize(("first", "launches"), [(True, 0), (False, 0), (False, 1)])
def test_a_micro_batch_that_runs_out_of_memory_and_is_given_up_does_not_count(
    backend: str, first: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first gradient of one parameter is copied before that of another cannot be added."""

    def exhausted(*_: object) -> None:
        raise RuntimeError("out of memory")

    late, (param, optimizer) = weight(), one(backend)
    if not first:
        fold(optimizer, 1.0, 1.0)
    optimizer.add_param_group({"params": [late]})
    param.grad, late.grad = torch.full((2, SIZE), 100.0)  # views, so they have to be copied
    fails = inside.fails(optimizer, "accumulate", launches)
    with refused(optimizer, RuntimeError, "out of memory"), fails, monkeypatch.context() as patch:
        if not launches:
            patch.setattr(torch.Tensor, "as_strided", exhausted)  # of memory to copy the first one into
        optimizer.accumulate(2.0)
    param.grad = late.grad = None
    fold(optimizer, 3.0, 3.0)
    optimizer.step()
    assert moved(param) == LR * (3.0 if first else (1 * 1 + 3 * 3) / 4)
    assert moved(late) == 0.0
