"""Gradient release: what is refused, and what may follow what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from snapshot import refused
from torch import Tensor, nn

import accumfused as af

EACH, ALL = 1, 2**30
every_bucket = pytest.mark.parametrize("bucket", [EACH, ALL], ids=["each", "all"])


def two(backend: str, bucket: int = EACH, **options: Any) -> tuple[list[nn.Parameter], af.SGD, Any]:
    params = [nn.Parameter(torch.full((4,), 8.0)) for _ in range(2)]
    optimizer = af.SGD(params, lr=0.5, backend=backend, **options)
    return params, optimizer, af.release_gradients(optimizer, bucket)


def loss_of(params: list[nn.Parameter], slope: float = 1.0) -> Tensor:
    return sum(((index + 1) * slope * param).sum() for index, param in enumerate(params))


def values(params: list[nn.Parameter]) -> list[float]:
    return [param[0].item() for param in params]


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_another_package_s_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got SGD; convert it with accumfused\.fuse"):
        af.release_gradients(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bucket", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_wrong_bucket_is_refused(bucket: Any, error: type[Exception]) -> None:
    optimizer = af.SGD([nn.Parameter(torch.zeros(1))])
    with refused(optimizer, error, "bucket_bytes must be"):
        af.release_gradients(optimizer, bucket)


def test_a_second_release_is_refused(backend: str) -> None:
    _, optimizer, release = two(backend)
    with refused(optimizer, RuntimeError, r"released already; call remove\(\)"):
        af.release_gradients(optimizer)
    release.remove()
    release.remove()
    af.release_gradients(optimizer)


def test_a_parameter_of_two_optimizers_is_refused(backend: str) -> None:
    params, _, release = two(backend)
    other = af.SGD(params[1:], lr=0.1, backend=backend)
    with refused(other, RuntimeError, "released by another optimizer"):
        af.release_gradients(other)
    third = af.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, backend=backend)
    af.release_gradients(third)
    with refused(third, RuntimeError, "released by another optimizer"):
        third.add_param_group({"params": params[:1]})
    assert len(third.param_groups) == 1
    release.remove()
    af.release_gradients(other)


@pytest.mark.parametrize("call", ["release_gradients", "remove", "with"])
@pytest.mark.parametrize("ended", [False, True])
def test_release_while_a_window_is_open_is_refused(backend: str, call: str, ended: bool) -> None:
    params, optimizer, release = two(backend)
    if call == "release_gradients":
        release.remove()
    loss_of(params).backward()
    if ended or call == "release_gradients":
        optimizer.accumulate()
    with refused(optimizer, RuntimeError, r"a window is open.*call optimizer\.step\(\) or zero_grad\(\) first"):
        if call == "release_gradients":
            af.release_gradients(optimizer)
        elif call == "remove":
            release.remove()
        else:
            with release:
                pass
    optimizer.step()
    assert values(params) == [7.5, 7.0]


# ---- weights --------------------------------------------------------------------------------------------------------


@every_bucket
@pytest.mark.parametrize("weight", [3, 0, torch.tensor(3.0)], ids=str)
@pytest.mark.parametrize("go_on", ["sum", "zero_grad"])
def test_a_weight_that_comes_after_the_gradients_is_refused(backend: str, bucket: int, weight: Any, go_on: str) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    for last in (False, True):
        with refused(optimizer, RuntimeError, r"optimizer\.backward\(loss, weight\) in place of"):
            optimizer.accumulate(weight, last=last)
    if go_on == "sum":
        optimizer.accumulate()
    else:
        optimizer.zero_grad()
        optimizer.backward(loss_of(params, 1.0), 3)
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@every_bucket
def test_weights_for_some_micro_batches_only_are_refused(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    optimizer.backward(loss_of(params), 3)
    with refused(optimizer, ValueError, "give one to every micro-batch, or to none"):
        loss_of(params, 100.0).backward()
    optimizer.backward(loss_of(params, 5.0), 1)  # the window is still right
    optimizer.step()
    assert values(params) == [8 - 0.5 * 2, 8 - 0.5 * 4]
    loss_of(params).backward()
    optimizer.accumulate()
    with refused(optimizer, ValueError, "give one to every micro-batch, or to none"):
        optimizer.backward(loss_of(params), 3)


def test_an_empty_micro_batch_needs_no_backward(backend: str) -> None:
    params, optimizer, _ = two(backend)
    optimizer.accumulate(0)
    optimizer.backward(loss_of(params), 3)
    optimizer.accumulate(0)
    optimizer.step()
    assert values(params) == [7.5, 7.0]


def test_weights_that_are_all_zero_are_refused(backend: str) -> None:
    params, optimizer, _ = two(backend)
    optimizer.backward(loss_of(params, torch.nan), 0)
    with refused(optimizer, ValueError, "all zero"):
        optimizer.backward(loss_of(params), 0, last=True)
    with refused(optimizer, ValueError, "all zero"):
        optimizer.step()
    optimizer.backward(loss_of(params), 2)
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@pytest.mark.parametrize("last", [True, torch.tensor(100.0)], ids=["closed", "a tensor at last"])
def test_a_long_window(backend: str, last: Any) -> None:
    """The weights have room for as many micro-batches as come, also if the first needed none there."""
    params, optimizer, _ = two(backend)
    for index in range(99):
        optimizer.backward(loss_of(params, index), 1)
    optimizer.backward(loss_of(params, 99), *((1, True) if last is True else (last,)))
    optimizer.step()
    total = 100 if last is True else 199
    mean = (sum(range(99)) + 99 * (total - 99)) / total
    torch.testing.assert_close(params[0].detach(), torch.full((4,), 8 - 0.5 * mean), rtol=1e-6, atol=0)


# ---- what may follow what -------------------------------------------------------------------------------------------


@every_bucket
def test_there_is_nothing_new_to_accumulate(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    optimizer.accumulate()
    with refused(optimizer, RuntimeError, "no new gradient"):
        optimizer.accumulate()


@every_bucket
def test_gradients_that_were_not_accumulated_are_refused_where_a_window_is_open(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    for _ in range(2):
        loss_of(params).backward()
        with refused(optimizer, RuntimeError, r"not accumulated; call accumulate\(\) or zero_grad\(\)"):
            optimizer.backward(loss_of(params))
        optimizer.accumulate()
    loss_of(params).backward()
    with refused(optimizer, RuntimeError, r"call accumulate\(\) after the last backward\(\)"):
        optimizer.step()
    optimizer.accumulate()
    optimizer.step()
    assert values(params) == [6.5, 5.0]


@every_bucket
def test_a_closed_window_is_not_folded_into(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    optimizer.accumulate(last=True)
    loss_of(params, 2.0).backward()  # autograd adds to what is in p.grad
    assert values([param.grad for param in params]) == [3.0, 6.0]
    with refused(optimizer, RuntimeError, "p.grad is still the previous window's accumulator"):
        optimizer.accumulate()
    with refused(optimizer, RuntimeError, "p.grad is still the previous window's accumulator"):
        optimizer.backward(loss_of(params))
    optimizer.zero_grad()
    loss_of(params).backward()
    optimizer.accumulate()
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@every_bucket
def test_a_closed_window_that_model_zero_grad_released_is_over(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params, 100.0).backward()
    optimizer.accumulate(last=True)
    for param in params:
        param.grad = None
    loss_of(params).backward()
    optimizer.accumulate()
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@every_bucket
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_drops_what_was_folded_and_what_waits(backend: str, bucket: int, set_to_none: bool) -> None:
    params, optimizer, _ = two(backend, bucket)
    for _ in range(3):  # lawful without accumulate(): no warning
        loss_of(params, 100.0).backward()
        optimizer.zero_grad(set_to_none)
        assert [param.grad for param in params] == [None, None]
    loss_of(params[:1]).backward()
    optimizer.step()
    assert values(params) == [7.5, 8.0]


@every_bucket
def test_windows_that_are_dropped_in_a_row_warn_as_ever(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    optimizer.accumulate()
    optimizer.zero_grad()
    loss_of(params).backward()
    optimizer.accumulate()
    with pytest.warns(UserWarning, match="two accumulation windows in a row"):
        optimizer.zero_grad()


@every_bucket
def test_a_step_without_accumulate_releases_and_checks_the_norm(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    assert (params[0].grad is None) == (bucket == EACH)
    optimizer.step()
    assert [param.grad for param in params] == [None, None]
    assert torch.equal(optimizer.grad_norm, torch.tensor(20.0).sqrt())
    loss_of(params, torch.inf).backward()
    optimizer.step()
    assert bool(optimizer.step_was_skipped)
    assert values(params) == [7.5, 7.0]


def test_gradients_that_are_put_into_p_grad_by_hand_are_as_ever(backend: str) -> None:
    params, optimizer, _ = two(backend)
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert values(params) == [7.5, 8.0]
    assert params[0].grad is not None
    optimizer.accumulate(2)  # nothing was folded, so the weight comes in time
    optimizer.step()
    assert values(params) == [7.0, 8.0]


@every_bucket
def test_a_stock_scaler_is_told_to_close_the_window(backend: str, bucket: int) -> None:
    params, optimizer, _ = two(backend, bucket)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    scaler.scale(loss_of(params)).backward()
    with refused(optimizer, RuntimeError, r"accumulate\(\.\.\., last=True\)"):
        scaler.step(optimizer)
    optimizer.accumulate(last=True)
    scaler.step(optimizer)
    assert values(params) == [7.5, 7.0]


def test_a_gradient_that_cannot_be_used_is_refused_in_backward(backend: str) -> None:
    weight, other = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(2))
    optimizer = af.SGD([weight, other], lr=0.1, backend=backend)
    af.release_gradients(optimizer, EACH)
    indices = torch.tensor([1, 3])
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        (nn.functional.embedding(indices, weight, sparse=True) * other).sum().backward()
    with refused(optimizer, RuntimeError, r"ended early.*call optimizer\.zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    (weight.sum() + other.sum()).backward()
    optimizer.step()
    assert other.tolist() == [pytest.approx(-0.1)] * 2
