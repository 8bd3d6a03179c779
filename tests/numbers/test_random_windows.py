"""Windows of micro-batches with every kind of weight: the mean that the step takes, against float64.

A micro-batch has a weight (a number, a tensor on the device, or in the loss) and a gradient for some parameters; where
its weight is 0 they are NaN, as those of a mean over no tokens are, and must leave no trace.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import inside
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import accumfused as af

# Relative, of a parameter's whole gradient: a factor, a product and a sum of fp32 for each of up to 6 micro-batches.
BOUND = 1.1e-7
ROWS, SIZE = 3, 1024


@dataclass(frozen=True)
class MicroBatch:
    """A weight, which is a number (host), a tensor (device) or multiplies the loss, and the rows with a gradient."""

    weight: float
    how: str = "host"
    rows: tuple[int, ...] = (0, 1, 2)

    @property
    def given(self) -> Any:
        return torch.tensor(self.weight, dtype=torch.float64) if "device" in self.how else self.weight


def gradients(micro_batches: list[MicroBatch]) -> list[dict[int, Tensor]]:
    """Row -> the mean over each micro-batch's samples."""
    drawn = [{row: torch.randn(SIZE) for row in each.rows} for each in micro_batches]
    for each, rows in zip(micro_batches, drawn, strict=True):
        if each.weight == 0:
            rows.update({row: torch.full((SIZE,), torch.nan) for row in rows})
    return drawn


def run(backend: str, micro_batches: list[MicroBatch], grads: list[dict[int, Tensor]], bucket: int | None) -> list[Any]:
    """The mean that a step of size 1 takes from 0: None where a parameter did not move; NaN if it was skipped."""
    params = [Parameter(torch.zeros(SIZE)) for _ in range(ROWS)]
    optimizer = af.SGD(params, lr=1.0, backend=backend)
    if bucket is not None:
        af.release_gradients(optimizer, bucket)
    for each, rows in zip(micro_batches, grads, strict=True):
        if "loss" in each.how or bucket is not None:
            loss = torch.stack([(params[row] * grad).sum() for row, grad in rows.items()] or [torch.zeros(())]).sum()
            optimizer.backward(loss, each.given)
            continue
        for row, grad in rows.items():
            params[row].grad = grad.clone()
        optimizer.accumulate(each.given)
    optimizer.step()
    assert not bool(optimizer.step_was_skipped)
    return [-param.detach() for param in params]


def errors(found: list[Tensor], micro_batches: list[MicroBatch], grads: list[dict[int, Tensor]]) -> list[float]:
    """The relative error of each row's mean."""
    total = math.fsum(each.weight for each in micro_batches)
    worst = []
    for row, mean in enumerate(found):
        truth = torch.zeros(SIZE, dtype=torch.float64)
        for each, rows in zip(micro_batches, grads, strict=True):
            if row in rows and each.weight != 0:
                in_loss = "loss" in each.how
                weighted = (
                    rows[row] * each.weight if in_loss else rows[row].double() * each.weight
                )  # autograd's own rounding
                truth += weighted.double() / total
        size = float(truth.norm())
        worst.append(float((mean.double() - truth).norm()) / (size or 1.0))
    return worst


HOWS = ("host", "device", "loss", "loss, device")
TOKENS, ANY = (1, 7, 512, 1003, 4096), (0.01, 0.37, 1.0, 2.5, 9.75)


def drawn(seed: int) -> list[MicroBatch]:
    """Up to 6 micro-batches, some empty, of one kind of weights or of all."""
    dice = random.Random(seed)
    kinds = (dice.choice(HOWS),) if dice.random() < 0.6 else HOWS
    scale = dice.choice((TOKENS, ANY))
    found = []
    for _ in range(dice.randint(1, 6)):
        weight = 0.0 if dice.random() < 0.25 else float(torch.tensor(dice.choice(scale) * dice.choice((1, 1, 1.25))))
        rows = tuple(row for row in range(ROWS) if dice.random() < 0.7) or (dice.randrange(ROWS),)
        found.append(MicroBatch(weight, dice.choice(kinds), rows))
    return found if any(each.weight for each in found) else [*found, MicroBatch(3.0)]


@pytest.mark.parametrize("seeds", [range(begin, begin + 20) for begin in range(0, 120, 20)], ids=str)
def test_random_windows_are_the_mean(seeds: range, backend: str) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        micro_batches = drawn(seed)
        grads = gradients(micro_batches)
        worst = errors(run(backend, micro_batches, grads, None), micro_batches, grads)
        assert max(worst) <= BOUND, (seed, micro_batches, worst)


M = MicroBatch
FIRST_EMPTY = {
    "an empty one first": [M(0), M(3)],
    "two empty ones first": [M(0, rows=(0,)), M(0, rows=(1,)), M(5)],
    "an empty one in the middle": [M(2), M(0), M(3)],
    "an empty one last": [M(2), M(0)],
    "an empty one first, of which a row stays without gradient": [M(0), M(3, rows=(0,))],
    "a row begins in an empty one": [M(2, rows=(0,)), M(0), M(3)],
    "a row begins late": [M(2, rows=(0,)), M(7, rows=(0, 1)), M(3)],
}
MIXED = {
    "in the gradient, then in the loss": [M(3), M(5, "loss")],
    "in the loss, then in the gradient": [M(3, "loss"), M(5)],
    "on the device, then on the host": [M(3, "device"), M(5), M(0, "device"), M(7, "loss, device")],
    "large, then small": [M(2.0**100), M(1)],
    "small, then large": [M(1), M(1e15)],
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("window", FIRST_EMPTY.values(), ids=[*FIRST_EMPTY])
def test_an_empty_micro_batch_leaves_no_trace(window: list[MicroBatch], how: str, backend: str) -> None:
    micro_batches = [M(each.weight, how, each.rows) for each in window]
    grads = gradients(micro_batches)
    assert max(errors(run(backend, micro_batches, grads, None), micro_batches, grads)) <= BOUND


@pytest.mark.parametrize("window", MIXED.values(), ids=[*MIXED])
def test_weights_of_all_kinds_and_sizes_are_those_of_one_window(window: list[MicroBatch], backend: str) -> None:
    grads = gradients(window)
    assert max(errors(run(backend, window, grads, None), window, grads)) <= BOUND


@pytest.mark.parametrize("how", ["loss", "loss, device"])
@pytest.mark.parametrize("window", FIRST_EMPTY.values(), ids=[*FIRST_EMPTY])
def test_released_gradients_make_the_same_windows(window: list[MicroBatch], how: str, backend: str) -> None:
    """Each parameter is a fold of its own, and the micro-batch's weight counts once."""
    micro_batches = [M(each.weight, how, each.rows) for each in window]
    grads = gradients(micro_batches)
    assert max(errors(run(backend, micro_batches, grads, 1), micro_batches, grads)) <= BOUND


@pytest.mark.parametrize("how", ["host", "device"])
def test_parts_of_a_gradient_that_come_one_by_one_after_an_empty_micro_batch_add_up(how: str, backend: str) -> None:
    """A reentrant checkpoint within another calls the hook of a parameter twice in a micro-batch."""
    param, slopes = Parameter(torch.zeros(SIZE)), [torch.randn(SIZE) for _ in range(2)]
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    af.release_gradients(optimizer, 1)

    def inner(x: Tensor) -> Tensor:
        return x + (param * slopes[1]).sum()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=True) + (param * slopes[0]).sum()  # type: ignore[no-any-return]

    for weight in (0.0, 3.0):
        loss = checkpoint(outer, torch.zeros((), requires_grad=True), use_reentrant=True)
        loss = loss * torch.nan if weight == 0 else loss
        optimizer.backward(loss, torch.tensor(weight) if how == "device" else weight)
    optimizer.step()
    truth = slopes[0].double() + slopes[1].double()
    assert float((-param.detach().double() - truth).norm() / truth.norm()) <= BOUND


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("weight", [1.0, 3.0, 1003.0, 0.37])
def test_a_window_of_one_micro_batch_is_its_gradients_bit_for_bit(weight: float, how: str, backend: str) -> None:
    if "loss" in how:
        weight = 2.0 ** round(math.log2(weight))  # so that autograd's product is exact
    window = [MicroBatch(weight, how)]
    grads = gradients(window)
    for row, mean in enumerate(run(backend, window, grads, None)):
        assert torch.equal(mean, grads[0][row])


@pytest.mark.parametrize("weight", [2.0, 4.0])
def test_equal_weights_are_autograds_own_sum_bit_for_bit(weight: float, backend: str) -> None:
    window = [MicroBatch(weight, how) for how in ("host", "host", "device", "host")]
    grads = gradients(window)
    for row, mean in enumerate(run(backend, window, grads, None)):
        total = grads[0][row]
        for each in grads[1:]:
            total = total + each[row]
        assert torch.equal(mean, total / 4)


# ---- what a window lives through -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_window_is_resumed_under_any_default_dtype(dtype: torch.dtype, backend: str) -> None:
    def made() -> tuple[Parameter, af.SGD]:
        param = Parameter(torch.zeros(40_000, dtype=torch.float32))
        return param, af.SGD([param], lr=1.0, backend=backend, max_grad_norm=1e6)

    first, optimizer = made()
    first.grad = torch.ones_like(first)
    optimizer.accumulate(2)
    param, resumed = made()
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        resumed.load_state_dict(optimizer.state_dict())
        param.grad = torch.full_like(param, 4.0)
        resumed.accumulate(1)
        resumed.step()
    finally:
        torch.set_default_dtype(was)
    assert torch.equal(param.detach(), torch.full((40_000,), -2.0, dtype=torch.float32))
    assert float(resumed.grad_norm) == 400.0


@pytest.mark.parametrize("failing", [0, 1])
def test_a_far_larger_weight_that_fails_leaves_the_window_as_it_was(failing: int, backend: str) -> None:
    """It brings the sums to its own unit first, in a launch of its own."""
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    for weight, slope, fails in ((1e-6, 3.0, False), (1e12, 8.0, True), (1e-6, 5.0, False)):
        param.grad = torch.full((4,), slope)
        if not fails:
            optimizer.accumulate(weight)
            continue
        with inside.accumulate_fails(optimizer, after=failing), pytest.raises(MemoryError):
            optimizer.accumulate(weight)
        param.grad = None
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -4.0), rtol=BOUND, atol=0.0)
