"""What a window adds up to, what a step makes of it, and what they say: numbers that a reader can check by hand."""

from __future__ import annotations

import inside
import pytest
import torch
from snapshot import refused
from torch import Tensor

import accumfused as af

LR = 0.5


# ---- the window ----------------------------------------------------------------------------------------------------


def one_parameter(backend: str, **options: float) -> tuple[torch.nn.Parameter, af.SGD]:
    param = torch.nn.Parameter(torch.full((4,), 8.0))
    return param, af.SGD([param], lr=LR, backend=backend, **options)


def test_a_gradient_that_somebody_else_owns_is_not_written(backend: str) -> None:
    param, optimizer = one_parameter(backend)
    bucket = torch.full((6,), 2.0)
    param.grad = bucket[1:5]
    optimizer.accumulate()
    param.grad = torch.full((4,), 3.0)
    optimizer.accumulate(last=True)
    assert param.grad.tolist() == [5.0] * 4
    assert bucket.tolist() == [2.0] * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closed_window_of_16_bit_gradients_is_fp32_and_the_next_backward_16_bit_again(
    backend: str, dtype: torch.dtype
) -> None:
    param, optimizer = one_parameter(backend)
    param.grad_dtype = dtype
    for update in range(2):
        for micro_batch in range(2):
            # 1 + 2^-7 and 256 need 16 bits: their sum is not a bfloat16, and at 2048 not a float16 either.
            (param * (1 + 2**-7 if micro_batch else 2048.0)).sum().backward()
            assert param.grad.dtype == dtype
            optimizer.accumulate(last=micro_batch == 1)
        assert param.grad.dtype == torch.float32
        assert param.grad.tolist() == [2049.0 + 2**-7] * 4
        optimizer.step()
        assert param.grad is None
        assert param.grad_dtype == dtype
        assert param.tolist() == [8.0 - LR * (update + 1) * (2049.0 + 2**-7)] * 4


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("closed", [False, True])
def test_weighted_means_are_the_mean_over_the_whole_window(backend: str, on_device: bool, closed: bool) -> None:
    param, optimizer = one_parameter(backend)
    counts, slopes = [3, 1, 4], [2.0, -6.0, 1.5]
    for i, (count, slope) in enumerate(zip(counts, slopes, strict=True)):
        (param * slope).sum().backward()
        weight = torch.tensor(count) if on_device else count
        optimizer.accumulate(weight, last=closed and i == 2)
    mean = sum(map(lambda count, slope: count * slope, counts, slopes)) / 8  # 0.75: 1/8 is exact
    if closed:
        assert param.grad.tolist() == [mean] * 4
    optimizer.step()
    assert param.tolist() == [8.0 - LR * mean] * 4
    assert float(optimizer.grad_norm) == 2 * mean


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_weight_of_0_leaves_out_the_nan_of_an_empty_micro_batch(
    backend: str, position: int, with_gradient: bool, closed: bool
) -> None:
    param, optimizer = one_parameter(backend)
    weights = [1, 3]
    weights.insert(position, 0)
    for i, weight in enumerate(weights):
        if weight:
            (param * 2.0 * weight).sum().backward()
        elif with_gradient:
            (param * torch.nan).sum().backward()
        optimizer.accumulate(weight, last=closed and i == 2)
        if i < 2:
            assert param.grad is None
    optimizer.step()
    assert param.tolist() == [8.0 - LR * (1 * 2 + 3 * 6) / 4] * 4
    assert not optimizer.step_was_skipped


def test_own_backward_weights_the_loss_and_a_weight_of_0_leaves_out_a_nan(backend: str) -> None:
    param, optimizer = one_parameter(backend)
    seen = []
    param.register_hook(lambda grad: seen.append(grad[0].item()))
    for weight, slope in ((1, 2.0), (0, torch.nan), (3, 6.0)):
        optimizer.backward((param * slope).sum(), weight)
    assert [seen[0], seen[2]] == [2.0, 18.0]  # weighted before autograd, where collectives see it
    optimizer.step()
    assert param.tolist() == [8.0 - LR * (1 * 2 + 3 * 6) / 4] * 4


@pytest.mark.parametrize("first", [None, 2])
def test_weights_for_some_micro_batches_only_are_refused(backend: str, first: int | None) -> None:
    param, optimizer = one_parameter(backend)
    other = 2 if first is None else None
    param.grad = torch.ones(4)
    optimizer.accumulate(first)
    param.grad = torch.ones(4)
    with refused(optimizer, ValueError, "give one to every micro-batch, or to none"):
        optimizer.accumulate(other)
    with refused(optimizer, ValueError, "give one to every micro-batch, or to none"):
        optimizer.accumulate(other, last=True)
    param.grad = None
    with refused(optimizer, ValueError, "give one to every micro-batch, or to none"):
        optimizer.backward(param.sum(), other)
    optimizer.step()  # the window is still right
    assert param.tolist() == [8.0 - LR] * 4


# ---- between closing a window and the step ------------------------------------------------------------------------


def test_a_clip_between_close_and_step_is_seen(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    param.grad = torch.full((4,), 8.0)
    optimizer.accumulate(last=True)
    norm = torch.nn.utils.clip_grad_norm_([param], 0.5)
    assert float(norm) == 16.0
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(0.5), rtol=1e-6, atol=0)  # clip's own 1e-6
    torch.testing.assert_close(param.detach(), torch.full((4,), 8 - LR * 0.25), rtol=1e-6, atol=0)


def test_a_write_that_bumps_no_version_counter_is_seen(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    param.grad = torch.full((4,), 8.0)
    optimizer.accumulate()
    param.grad = torch.full((4,), 8.0)
    optimizer.accumulate(last=True)
    version = inside.version(param.grad)
    torch._amp_foreach_non_finite_check_and_unscale_([param.grad], torch.zeros(1), torch.tensor(2.0**-6))
    assert inside.version(param.grad) == version
    optimizer.step()
    assert float(optimizer.grad_norm) == 0.5
    assert param.tolist() == [8 - LR * 0.25] * 4


def test_gradients_replaced_after_closing_are_what_the_step_takes(backend: str) -> None:
    param, optimizer = one_parameter(backend)
    param.grad = torch.full((4,), 8.0)
    optimizer.accumulate(last=True)
    param.grad = param.grad / 4
    optimizer.step()
    assert param.tolist() == [8 - LR * 2] * 4


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_a_step_without_a_window_leaves_the_gradients_as_they_are(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    grad = param.grad = torch.full((4,), 8.0)
    optimizer.step(normalizer=2)
    assert param.grad is grad
    assert grad.tolist() == [8.0] * 4
    assert float(optimizer.grad_norm) == 8.0  # after normalization, before clipping


def test_a_closure_may_fold_whole_windows(backend: str) -> None:
    param, optimizer = one_parameter(backend)

    def closure() -> Tensor:
        optimizer.zero_grad()
        for weight, slope in ((1, 2.0), (3, 6.0)):
            loss = (param * slope).sum()
            loss.backward()
            optimizer.accumulate(weight)
        return loss.detach()

    assert float(optimizer.step(closure)) == 4 * 8.0 * 6.0
    assert param.tolist() == [8 - LR * 5.0] * 4
    assert param.grad is None


def test_every_step_has_its_own_norm(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    norms = []
    for slope in (3.0, 4.0):
        param.grad = torch.full((4,), slope)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert [float(norm) for norm in norms] == [6.0, 8.0]
    assert all(norm.shape == () and norm.dtype == torch.float32 for norm in norms)


def test_no_norm_is_taken_where_none_is_wanted(backend: str) -> None:
    param, optimizer = one_parameter(backend)
    param.grad = torch.full((4,), torch.inf)
    optimizer.step()
    assert optimizer.grad_norm is None
    assert not optimizer.step_was_skipped
    assert param.tolist() == [-torch.inf] * 4  # as in torch


# ---- warnings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zero_grad", "zero_grad on a closed window", "model.zero_grad on a closed window"])
def test_two_open_windows_dropped_in_a_row_warn_once_and_no_more(backend: str, how: str) -> None:
    param, optimizer = one_parameter(backend)

    def drop() -> None:
        param.grad = torch.ones(4)
        optimizer.accumulate(last="closed" in how)
        if how.startswith("model"):
            param.grad = None
            optimizer.step()
        else:
            optimizer.zero_grad()

    drop()
    if "closed" in how:
        drop()  # a GradScaler that skips drops closed windows, and is right: no warning, which would be an error here
    else:
        with pytest.warns(UserWarning, match=r"after optimizer\.step\(\), not between the micro-batches"):
            drop()
    drop()  # it says it once
    assert param.tolist() == [8.0] * 4


def test_windows_that_are_dropped_before_each_of_the_last_steps_warn(backend: str) -> None:
    param, optimizer = one_parameter(backend)

    def update(*, drops: bool) -> None:
        for _ in range(2):
            if drops:  # misplaced: half of each window of two is lost
                optimizer.zero_grad()
            param.grad = torch.ones(4)
            optimizer.accumulate()
        optimizer.step()

    for drops in (True, True, False, True, True):  # two in a row may be lawful
        update(drops=drops)
    with pytest.warns(UserWarning, match="dropped before each of the last steps; zero_grad"):
        update(drops=True)
    update(drops=True)  # it says it once
    assert param.tolist() == [8.0 - LR * (6 * 1 + 1 * 2)] * 4


def test_steps_that_keep_being_skipped_warn(backend: str) -> None:
    param, optimizer = one_parameter(backend, max_grad_norm=1.0)
    caught: list[str] = []
    for _ in range(96):
        param.grad = torch.full((4,), torch.nan)
        try:
            optimizer.step()
        except UserWarning as warning:  # warnings are errors in the tests
            caught.append(str(warning))
    assert int(optimizer.skipped_steps) == 96
    assert caught
    assert all("lower the learning rate or the loss scale" in text for text in caught)
    assert param.tolist() == [8.0] * 4
