"""What once gave wrong weights without a word: now it is right, refused with the remedy, or warned of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
from snapshot import refused, writes_nothing
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused import backends

LR = 0.125  # all results here are exact in fp32
SIZE = 4096
with_and_without_addresses = pytest.mark.parametrize("backend", ["cpu", "torch"], indirect=True)


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
    "foreign": lambda memory, param: torch.from_numpy(memory.numpy()),
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
def test_one_gradient_of_two_parameters_is_copied_and_what_nobody_else_holds_adopted(backend: str) -> None:
    params = [weight(), weight()]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    for _ in range(2):
        params[0].grad = params[1].grad = torch.ones(SIZE)
        optimizer.accumulate()
    optimizer.step()
    assert [moved(param) for param in params] == [2 * LR] * 2
    sum(param * torch.ones(SIZE) for param in params).sum().backward()
    addresses = [param.grad.data_ptr() for param in params]
    optimizer.accumulate()
    sum(param * torch.ones(SIZE) for param in params).sum().backward()
    optimizer.accumulate(last=True)
    assert [param.grad.data_ptr() for param in params] == addresses


@with_and_without_addresses
def test_the_windows_own_memory_is_refused_as_the_next_gradient(backend: str) -> None:
    param, optimizer = one(backend)
    fold(optimizer, 1.0)
    param.grad = optimizer.state_dict()["state"][0]["grad_accumulator"]
    with refused(optimizer, RuntimeError, r"zero_grad\(\), and give every micro-batch a gradient in memory of its own"):
        optimizer.accumulate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exposed_gradients_that_were_exchanged(backend: str, dtype: torch.dtype) -> None:
    first, second = params = [weight(dtype), weight(dtype)]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    first.grad, second.grad = torch.ones_like(first), torch.full_like(second, 2.0)
    optimizer.accumulate(last=True)
    if dtype is torch.bfloat16:  # each lies where the other one's sum will
        optimizer.zero_grad(set_to_none=False)
    first.grad, second.grad = second.grad, first.grad
    if dtype is torch.bfloat16:
        (2 * first + second).sum().backward()
        optimizer.accumulate()
    else:
        with refused(optimizer, RuntimeError, "still the previous window's accumulator"):
            optimizer.accumulate()
    optimizer.step()  # the user's own doing
    assert [moved(param) for param in params] == [2 * LR, LR]


# ---- warnings, which as errors leave everything as it was ------------------------------------------------------------


def refused_strictly(optimizer: Any, call: Callable[[], None], text: str) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        af.strict()
        for _ in range(2):  # it comes again
            with refused(optimizer, af.AccumulationWarning, text):
                call()


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_change_within_a_window_draw_one_warning(backend: str, last: bool) -> None:
    param, optimizer = one(backend)
    close = (lambda: optimizer.accumulate(last=True)) if last else optimizer.step
    text = "a parameter was written while a window was open"
    for written in (0, 0, 1, 1):
        fold(optimizer, 1.0)
        with torch.no_grad():
            param.add_(1) if written else None
        param.grad = torch.ones(SIZE) if last else None
        if written and text:
            refused_strictly(optimizer, close, text)
            with pytest.warns(UserWarning, match=text):
                close()
            text = ""
        else:
            close()
        optimizer.step()
        with torch.no_grad():
            param.mul_(2)  # between windows it is nobody's business


def test_a_dropped_window_that_is_an_error_is_not_dropped(backend: str) -> None:
    param, optimizer = one(backend)
    for _ in range(2):
        optimizer.zero_grad()
        fold(optimizer, 1.0)
    param.grad = torch.ones(SIZE)
    refused_strictly(optimizer, optimizer.zero_grad, "two accumulation windows in a row were dropped")


# ---- windows that go wrong on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["channels_last", "transposed in place"])  # the latter: other strides alone
@pytest.mark.parametrize("within", [False, True])
def test_a_layout_that_changes_is_followed(backend: str, change: str, within: bool) -> None:
    param = Parameter(torch.randn(4, 4, 3, 5))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    for window in range(4):
        grads = torch.randn(2, 4, 4, 3, 5)
        for number, grad in enumerate(grads):
            if window == 1 and number == within:
                data = param.data
                param.data = data.transpose(0, 1) if change[0] == "t" else data.to(memory_format=torch.channels_last)
            param.grad = torch.empty_like(param).copy_(grad) if window % 2 else grad.clone()  # of either layout
            optimizer.accumulate()
        expected = param.detach() - 0.5 * grads.sum(0)
        optimizer.step()
        assert torch.equal(param, expected)


def test_a_window_of_empty_micro_batches_alone_is_in_the_checkpoint(backend: str) -> None:
    param, optimizer = one(backend)
    fold(optimizer, nan, 0)
    again, resumed = one(backend)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, each in ((param, optimizer), (again, resumed)):
        with refused(each, ValueError, "the weights of this window are all zero"):
            each.step()
        own.grad = torch.ones(SIZE)
        with refused(each, ValueError, "weights for some micro-batches of a window only"):
            each.accumulate()
        each.accumulate(weight=3)
        each.step()
        assert moved(own) == LR


def test_the_number_0_leaves_a_micro_batch_out_of_a_window_of_device_weights(backend: str) -> None:
    params = [weight(), weight()]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    params[1].sum().backward()
    optimizer.accumulate(torch.tensor(1.0))
    fold(optimizer, nan, 0.0, last=True)
    assert params[0].grad is None
    assert params[1].grad.unique().tolist() == [1.0]


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


def test_a_group_that_is_added_to_a_closed_window_is_released_with_it(backend: str) -> None:
    param, optimizer = one(backend)
    fold(optimizer, 1.0, last=True)
    added = weight()
    optimizer.add_param_group({"params": [added]})
    for was_closed in (True, False):
        added.sum().backward()
        optimizer.step()
        assert param.grad is None
        assert (added.grad is None) is was_closed
    assert moved(added) == 2 * LR


@pytest.mark.parametrize("is_alone", [False, True])
def test_parameters_that_were_frozen_when_release_began_are_released_too(backend: str, is_alone: bool) -> None:
    other, param = weight(), weight().requires_grad_(False)
    optimizer: Any = af.SGD([other, param], lr=LR, backend=backend)
    with af.release_gradients(optimizer):
        param.requires_grad_(True)
        for scale in (1.0, 0.0, 1.0):
            (param if is_alone else param + other).sum().backward()
            optimizer.grad_scale = scale
            if not scale:
                with refused(optimizer, ValueError, "grad_scale must be finite and > 0, got 0.0"):  # nothing is folded
                    optimizer.step()
                optimizer.grad_scale = 1.0
            optimizer.step()
            assert param.grad is None
    assert moved(param) == 3 * LR


def test_a_micro_batch_that_runs_out_of_memory_and_is_given_up_does_not_count(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    param, optimizer = one(backend)
    kernels = type(backends.select(backend, [param.device]))
    for first in (True, False):
        if not first:
            fold(optimizer, 1.0, 1.0)
        with writes_nothing(optimizer), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "as_strided", exhausted)  # of memory to copy the first one into
            patch.setattr(kernels, "accumulate", exhausted)
            param.grad = torch.full((SIZE,), 100.0)[:]  # a view, so it has to be copied
            with pytest.raises(MemoryError):
                optimizer.accumulate(2.0)
            param.grad = None
    fold(optimizer, 3.0, 3.0)
    optimizer.step()
    assert moved(param) == LR * (1 * 1 + 3 * 3) / 4


def test_a_window_of_a_parameter_with_holes_and_8_bit_states_survives_a_checkpoint(backend: str) -> None:
    params = [Parameter(torch.full((2 * SIZE,), 8.0)[::2]) for _ in range(2)]
    settings = {"state_dtype": "int8", "rounding_seed": 1, "backend": backend}
    first, second = (af.AdamW([param], lr=LR, **settings) for param in params)  # type: ignore[arg-type]
    fold(first, 1.0, 3.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.step()
    second.step()
    assert torch.equal(*params)
    assert moved(params[0]) != 0
