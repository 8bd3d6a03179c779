"""What once gave wrong weights without a word: now it is right, refused with the remedy, or warned of."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import mmap
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot import refused, snapshot
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

LR = 0.125  # all results here are exact in fp32
SIZE = 4096


def one(backend: str, **settings: Any) -> tuple[Parameter, af.SGD]:
    param = Parameter(torch.full((SIZE,), 8.0))
    return param, af.SGD([param], lr=LR, backend=backend, **settings)


def moved(param: Tensor) -> float:
    (distance,) = {8.0 - value for value in param.detach().unique().tolist()}
    return float(distance)


# ---- gradients in memory that is written again -----------------------------------------------------------------------


def held(backing: Tensor, value: float) -> Tensor:
    return backing.fill_(value)


def seen_anew(backing: Tensor, value: float) -> Tensor:
    return backing.fill_(value).view(SIZE)


def detached(backing: Tensor, value: float) -> Tensor:
    return backing.fill_(value).detach()


@pytest.mark.parametrize("make", [held, seen_anew, detached])
@pytest.mark.parametrize("last", [False, True])
def test_a_gradient_in_static_memory_is_copied(
    backend: str, make: Callable[[Tensor, float], Tensor], last: bool
) -> None:
    param, optimizer = one(backend)
    static = torch.zeros(SIZE)
    for _ in range(2):
        for value in (1.0, 2.0, 4.0):
            param.grad = make(static, value)
            optimizer.accumulate(last=last and value == 4.0)
        optimizer.step()
    assert moved(param) == LR * 14
    assert static.unique().tolist() == [4.0]  # which is the user's, and was not added to


def test_a_gradient_over_foreign_memory_is_copied(backend: str) -> None:
    param, optimizer = one(backend)
    memory = bytearray(4 * SIZE)
    for value in (1.0, 2.0, 4.0):
        torch.frombuffer(memory, dtype=torch.float32).fill_(value)
        param.grad = torch.frombuffer(memory, dtype=torch.float32)
        optimizer.accumulate()
    optimizer.step()
    assert moved(param) == LR * 7


def test_the_same_gradient_given_again_counts_again(backend: str) -> None:
    param, optimizer = one(backend, max_grad_norm=1e9)
    grad = torch.ones(SIZE)
    for _ in range(4):
        param.grad = grad
        optimizer.accumulate()
    optimizer.step()
    assert moved(param) == LR * 4
    assert float(optimizer.grad_norm) == 4 * SIZE**0.5  # type: ignore[arg-type]


def test_the_parameter_itself_as_its_gradient_is_left_alone(backend: str) -> None:
    param, optimizer = one(backend)
    for _ in range(3):
        param.grad = param.detach()  # the gradient of p^2 / 2
        optimizer.accumulate()
        assert moved(param) == 0
    optimizer.step()
    assert moved(param) == 8 * 3 * LR


def test_a_gradient_without_elements_needs_no_memory(backend: str) -> None:
    params = [Parameter(torch.zeros(shape)) for shape in ((3, 0), (0,), (2, 0, 5))]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    for _ in range(2):
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.accumulate()
    optimizer.step()


def test_what_nobody_else_holds_is_still_adopted(backend: str) -> None:
    param, optimizer = one(backend)
    (param * torch.ones(SIZE)).sum().backward()
    address = param.grad.data_ptr()  # type: ignore[union-attr]
    optimizer.accumulate()
    (param * torch.ones(SIZE)).sum().backward()
    optimizer.accumulate(last=True)
    assert param.grad.data_ptr() == address  # type: ignore[union-attr]


def test_memory_that_comes_back_as_the_next_gradient_is_refused(backend: str) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.accumulate(last=True)
    exposed = param.grad
    optimizer.zero_grad()
    place = param.grad = exposed
    optimizer.accumulate()
    del exposed
    accumulator = optimizer._runtime.window.accumulators[0]
    param.grad = accumulator
    del place
    with refused(optimizer, RuntimeError, r"give every micro-batch a gradient in memory of its own"):
        optimizer.accumulate()


def test_gradients_that_were_exchanged_in_an_earlier_window_do_not_overwrite_each_other(backend: str) -> None:
    params = [Parameter(torch.full((SIZE,), 8.0, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.accumulate(last=True)
    optimizer.zero_grad(set_to_none=False)
    first, second = params
    first.grad, second.grad = second.grad, first.grad
    (first + 2 * second).sum().backward()
    optimizer.accumulate()
    optimizer.step()
    assert [moved(param) for param in params] == [LR, 2 * LR]


def test_exposed_gradients_that_were_exchanged_are_not_taken_for_new_ones(backend: str) -> None:
    params = [Parameter(torch.full((SIZE,), 8.0)) for _ in range(2)]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    for number, param in enumerate(params):
        param.grad = torch.full((SIZE,), 1.0 + number)
    optimizer.accumulate(last=True)
    first, second = params
    first.grad, second.grad = second.grad, first.grad
    with refused(optimizer, RuntimeError, "still the previous window's accumulator"):
        optimizer.accumulate()
    optimizer.step()  # the user's own doing
    assert [moved(param) for param in params] == [2 * LR, LR]


# ---- weights that change within a window -----------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_change_within_a_window_draw_one_warning(backend: str, last: bool) -> None:
    param, optimizer = one(backend)

    def window(*, writes: bool) -> None:
        for number in range(2):
            param.grad = torch.ones(SIZE)
            optimizer.accumulate(last=last and number == 1)
            if writes and number == 0:
                with torch.no_grad():
                    param.add_(1)
        optimizer.step()

    window(writes=False)
    with torch.no_grad():
        param.mul_(2)  # between windows it is nobody's business
    window(writes=False)
    with pytest.warns(UserWarning, match="a parameter was written while a window was open"):
        window(writes=True)
    window(writes=True)


@pytest.mark.parametrize("last", [False, True])
def test_a_warning_that_is_an_error_leaves_the_window_as_it_was(backend: str, last: bool) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.accumulate()
    with torch.no_grad():
        param.add_(0)
    if last:
        param.grad = torch.ones(SIZE)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        af.strict()
        for _ in range(2):  # and comes again
            with refused(optimizer, af.AccumulationWarning, "a parameter was written while a window was open"):
                optimizer.accumulate(last=True) if last else optimizer.step()


def test_a_dropped_window_that_is_an_error_is_not_dropped(backend: str) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.accumulate()
    optimizer.zero_grad()
    param.grad = torch.ones(SIZE)
    optimizer.accumulate()
    param.grad = torch.ones(SIZE)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        af.strict()
        with refused(optimizer, af.AccumulationWarning, "two accumulation windows in a row were dropped"):
            optimizer.zero_grad()


# ---- windows that go wrong on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [math.nan, -1.0, math.inf, 0.0])
def test_a_bad_weight_on_a_device_is_skipped_after_a_checkpoint_too(backend: str, weight: float) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.accumulate(weight=torch.tensor(weight))
    again, resumed = one(backend)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        each.step()
        assert bool(each.step_was_skipped)
    assert moved(param) == moved(again) == 0


def test_a_window_of_empty_micro_batches_alone_is_in_the_checkpoint(backend: str) -> None:
    param, optimizer = one(backend)
    param.grad = torch.full((SIZE,), torch.nan)
    optimizer.accumulate(weight=0)
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
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = af.SGD(params, lr=LR, backend=backend)
    params[1].sum().backward()
    optimizer.accumulate(torch.tensor(1.0))
    torch.stack(params).sum().backward()
    optimizer.accumulate(0.0, last=True)
    assert params[0].grad is None


def test_momentum_that_is_switched_on_later_is_in_no_checkpoint_yet(backend: str) -> None:
    def make() -> tuple[Parameter, af.SGD]:
        param = Parameter(torch.full((SIZE,), 8.0, dtype=torch.float16))
        return param, af.SGD([param], lr=LR, backend=backend)

    (param, optimizer), (again, resumed) = make(), make()
    for each in (optimizer, resumed):
        for own in each.param_groups[0]["params"]:
            own.grad = torch.ones_like(own)
        each.step()
        each.param_groups[0]["momentum"] = 0.5
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        each.step()
    assert torch.equal(param, again)


@pytest.mark.parametrize("released", [False, True])
def test_a_bad_loss_scale_is_refused_before_anything_is_folded(backend: str, released: bool) -> None:
    param, optimizer = one(backend)
    with af.release_gradients(optimizer, 1) if released else contextlib.nullcontext():
        param.sum().backward()
        if not released:
            optimizer.accumulate(3.0)
        optimizer.grad_scale = 0.0  # type: ignore[attr-defined]
        with refused(optimizer, ValueError, "grad_scale must be finite and > 0, got 0.0"):
            optimizer.step()
        optimizer.grad_scale = 1.0  # type: ignore[attr-defined]
        optimizer.step()
    assert moved(param) == LR


def test_a_group_that_is_added_to_a_closed_window_is_released_with_it(backend: str) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.accumulate(last=True)
    added = Parameter(torch.full((SIZE,), 8.0))
    optimizer.add_param_group({"params": [added]})
    added.sum().backward()
    optimizer.step()
    assert param.grad is added.grad is None
    added.sum().backward()
    optimizer.step()
    assert moved(added) == 2 * LR


@pytest.mark.parametrize("is_alone", [False, True])
def test_parameters_that_were_frozen_when_release_began_are_released_too(backend: str, is_alone: bool) -> None:
    other = Parameter(torch.full((SIZE,), 8.0))
    param = Parameter(torch.full((SIZE,), 8.0), requires_grad=False)
    optimizer = af.SGD([other, param], lr=LR, backend=backend)
    with af.release_gradients(optimizer):
        param.requires_grad_(True)
        for _ in range(3):
            (param if is_alone else param + other).sum().backward()
            optimizer.step()
            assert param.grad is None
    assert moved(param) == 3 * LR


class ExhaustedError(Exception):
    pass


def test_a_micro_batch_that_runs_out_of_memory_and_is_given_up_does_not_count(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    param, optimizer = one(backend)

    def fold(value: float, weight: float) -> None:
        param.grad = torch.full((SIZE,), value, dtype=torch.float32)
        param.grad = param.grad[:]  # a view: it has to be copied, which takes memory
        optimizer.accumulate(weight=weight)

    for first in (True, False):
        if not first:
            fold(1.0, 1.0)
        before = snapshot(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "as_strided", _raise)
            patch.setattr(type(optimizer._runtime.window), "_launch", _raise)
            with pytest.raises(ExhaustedError):
                fold(100.0, 2.0)
        param.grad = None
        assert snapshot(optimizer) == before
    fold(3.0, 3.0)
    optimizer.step()
    assert moved(param) == LR * (1 * 1 + 3 * 3) / 4


def _raise(*_: object, **__: object) -> None:
    raise ExhaustedError


# ---- numbers far from 1 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("unit", [1e-25, math.exp(-60), 1e18, 1e25])
def test_weights_far_from_1_are_clipped_and_applied_as_others(
    backend: str, unit: float, last: bool, on_device: bool
) -> None:
    param, optimizer = one(backend, max_grad_norm=1.0)
    twin, plain = one(backend, max_grad_norm=1.0)
    for number, weight in enumerate((3.0, 1.0, 2.0)):
        grad = torch.randn(SIZE)
        param.grad, twin.grad = grad.clone(), grad.clone()
        weights = [weight * unit, weight]
        for each, own in zip((optimizer, plain), weights, strict=True):
            each.accumulate(torch.tensor(own, dtype=torch.float64) if on_device else own, last=last and number == 2)
    optimizer.step()
    plain.step()
    torch.testing.assert_close(optimizer.grad_norm, plain.grad_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=0)


@pytest.mark.parametrize("divisor", [2.0**-60, 2.0**-40])
@pytest.mark.parametrize("size", [2.0**-80, 2.0**-60, 0.0])
def test_a_norm_whose_squares_are_lost_skips_the_step_where_it_could_matter(
    backend: str, size: float, divisor: float
) -> None:
    param, optimizer = one(backend, max_grad_norm=1.0)
    param.grad = torch.full((SIZE,), size)
    optimizer.step(normalizer=divisor)
    assert bool(optimizer.step_was_skipped) is (divisor == 2.0**-60)


def test_weights_by_a_power_of_two_change_no_bit_and_survive_a_checkpoint(backend: str) -> None:
    grads = [torch.randn(SIZE) for _ in range(4)]
    results = []
    for unit in (1.0, 2.0**-90, 2.0**70):
        param, optimizer = one(backend, max_grad_norm=1.0)
        for number, grad in enumerate(grads):
            param.grad = grad.clone()
            optimizer.accumulate((3.0 + number) * unit)
            saved = copy.deepcopy(optimizer.state_dict())
            again, optimizer = one(backend, max_grad_norm=1.0)
            optimizer.load_state_dict(saved)
            param = again
        optimizer.step()
        results.append(param.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_loss_in_16_bits_does_not_round_its_weight(backend: str, dtype: torch.dtype, on_device: bool) -> None:
    param, optimizer = one(backend)
    total, truth = 0.0, 0.0
    for weight, slope in ((1003.0, 1.0), (1004.0, 2.0), (70001.0, 3.0)):
        loss = (param.mean() * slope).to(dtype)
        optimizer.backward(loss, torch.tensor(weight) if on_device else weight)
        total, truth = total + weight, truth + weight * slope / SIZE
    optimizer.step()
    torch.testing.assert_close(moved(param), LR * truth / total, rtol=1e-3, atol=2e-6)
    with af.release_gradients(optimizer):
        with refused(optimizer, RuntimeError, r"would round its weight; compute it in fp32"):
            optimizer.backward(param.mean().to(dtype), 70001.0)
        optimizer.backward(param.mean().to(dtype), 256.0)
        optimizer.step()


def test_what_overflows_propagates_as_in_torch(backend: str) -> None:
    params = [Parameter(torch.tensor([0.5, 1.0])) for _ in range(2)]
    stock, fused = (torch.optim.RMSprop([param], lr=0.3) for param in params)
    af.fuse(fused, max_grad_norm=0.5, nonfinite="propagate", backend=backend)
    for param in params:
        param.grad = torch.tensor([math.inf, 1.0])
    torch.nn.utils.clip_grad_norm_(params[:1], 0.5)
    stock.step()
    fused.step()
    torch.testing.assert_close(params[1], params[0], equal_nan=True)
    assert params[1].isnan().tolist() == [True, False]


# ---- torch's default dtype -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [
    lambda p: af.SGD([p], lr=0.1, momentum=0.9, dampening=0.1, nesterov=False, max_grad_norm=1.0),
    lambda p: af.Lion([p], lr=0.01, max_grad_norm=1.0),
    lambda p: af.AdamW([p], lr=0.01, max_grad_norm=1.0),
    lambda p: af.AdamW([p], lr=0.01, max_grad_norm=1.0, amsgrad=True, state_dtype=torch.bfloat16, rounding_seed=0),
], ids=["sgd", "lion", "adamw", "amsgrad"])  # fmt: skip
def test_the_default_dtype_changes_no_bit(backend: str, dtype: torch.dtype, make: Callable[[Any], Any]) -> None:
    results = []
    for default in (torch.float32, dtype):
        torch.manual_seed(1)
        param = Parameter(torch.randn(SIZE, dtype=torch.float32))
        grads = [torch.randn(SIZE, dtype=torch.float32) for _ in range(5)]
        optimizer = make(param)
        optimizer._settings.backend = backend
        torch.set_default_dtype(default)
        try:
            for number, grad in enumerate(grads):
                param.grad = grad.clone()
                optimizer.accumulate(3.0 + number if number < 3 else torch.tensor(1e5 + number, dtype=torch.float64))
                if number == 1:
                    saved = copy.deepcopy(optimizer.state_dict())
                    optimizer = make(param)
                    optimizer._settings.backend = backend
                    optimizer.load_state_dict(saved)
                if number in (2, 4):
                    optimizer.step(normalizer=torch.tensor(2.0))
            results += [[param.detach().clone(), *optimizer.state[param].values()]]
        finally:
            torch.set_default_dtype(torch.float32)
    for known, other in zip(*results, strict=True):
        assert known.dtype is other.dtype
        assert torch.equal(known, other)


# ---- memory that cannot be written -----------------------------------------------------------------------------------


def test_a_storage_that_has_become_too_small_is_refused(backend: str) -> None:
    param, optimizer = one(backend)
    param.grad = torch.ones(SIZE)
    optimizer.step()
    param.untyped_storage().resize_(4 * SIZE - 4)
    with pytest.raises(RuntimeError, match=rf"a storage of {4 * SIZE - 4} bytes, which is too small"):
        optimizer.step()
    param.untyped_storage().resize_(4 * SIZE)
    optimizer.step()
    optimizer.zero_grad()
    param.grad = torch.ones(SIZE)
    param.grad.untyped_storage().resize_(4 * SIZE - 4)
    with pytest.raises(RuntimeError, match=r"a gradient of shape \[4096\] lies in a storage of"):
        optimizer.accumulate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped read-only")
def test_memory_that_is_mapped_read_only_is_refused_and_a_private_mapping_works(backend: str, tmp_path: Path) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip("files are mapped into the CPU's memory")
    path = tmp_path / "weights"
    torch.save(torch.full((SIZE,), 8.0), path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the memory is not writable
            memory = torch.frombuffer(mapped, dtype=torch.uint8)[: 4 * SIZE // 4 * 4].view(torch.float32)
        optimizer = af.SGD([Parameter(memory)], lr=LR, backend=backend)
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(memory)
        with pytest.raises(RuntimeError, match=r"mapped read-only .* clone\(\) it first"):
            optimizer.step()
        del optimizer, memory
        gc.collect()
    param = Parameter(torch.load(path, mmap=True))
    optimizer = af.SGD([param], lr=LR, backend=backend)
    param.grad = torch.ones(SIZE)
    optimizer.step()
    assert moved(param) == LR


def test_a_window_of_a_parameter_with_holes_and_8_bit_states_survives_a_checkpoint(backend: str) -> None:
    def make() -> tuple[Parameter, af.AdamW]:
        param = Parameter(torch.full((2 * SIZE,), 8.0)[::2])
        return param, af.AdamW([param], lr=LR, state_dtype="int8", rounding_seed=1, backend=backend)

    param, optimizer = make()
    param.grad = torch.ones(SIZE)
    optimizer.accumulate(3.0)
    again, resumed = make()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    resumed.step()
    assert torch.equal(param, again)
    assert moved(param) != 0
