"""Windows of micro-batches with every kind of weight: the mean that the step takes, against float64.

A micro-batch has a weight (a number, a tensor on the device, or in the loss) and a gradient for some parameters; where
its weight is 0 they are NaN, as those of a mean over no tokens are, and must leave no trace.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

# Relative, of a parameter's whole gradient: a factor, a product and a sum of fp32 for each of up to 6 micro-batches.
BOUND = 1.1e-7
ROWS, SIZE = 3, 1024


@dataclass(frozen=True)
class MicroBatch:
    """A weight, which is a number (host), a tensor (device) or multiplies the loss, and the rows with a gradient."""

    weight: float | None
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


def run(
    backend: str, micro_batches: list[MicroBatch], grads: list[dict[int, Tensor]], bucket: int | None = None,
    closes: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The mean that a step of size 1 takes from 0, whose norm it tells; where the window closes, `p.grad` is that, too.

    Args:
        bucket: gradients are released in buckets of so many bytes.
        closes: the last micro-batch closes the window.
    """
    params = [Parameter(torch.zeros(SIZE)) for _ in range(ROWS)]
    optimizer = af.SGD(params, lr=1.0, backend=backend, max_grad_norm=1e9)
    if bucket is not None:
        af.release_gradients(optimizer, bucket)
    for each, rows in zip(micro_batches, grads, strict=True):
        last = closes and each is micro_batches[-1]
        if "loss" in each.how or bucket is not None:
            loss = torch.stack([(params[row] * grad).sum() for row, grad in rows.items()] or [torch.zeros(())]).sum()
            optimizer.backward(loss, each.given, last)
            continue
        for row, grad in rows.items():
            params[row].grad = grad.clone()
        optimizer.accumulate(each.given, last=last)
    sums = [None if param.grad is None else param.grad.detach().clone() for param in params]
    optimizer.step()
    assert not bool(optimizer.step_was_skipped)
    found = [-param.detach() for param in params]
    assert_close(optimizer.grad_norm, torch.cat(found).double().norm(), "norm")
    for mean, closed in zip(found, sums if closes else (), strict=closes):
        assert closed is None or torch.equal(closed, mean)
    return found


def errors(found: list[Tensor], micro_batches: list[MicroBatch], grads: list[dict[int, Tensor]]) -> list[float]:
    """The relative error of each row's mean."""
    total = math.fsum(each.weight for each in micro_batches)
    worst = []
    for row, mean in enumerate(found):
        truth = torch.zeros(SIZE, dtype=torch.float64)
        for each, rows in zip(micro_batches, grads, strict=True):
            if row in rows and each.weight != 0:
                in_loss = "loss" in each.how
                weighted = rows[row] * each.weight if in_loss else rows[row].double() * each.weight  # autograd rounds
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
        how = dice.choice(kinds)
        found.append(MicroBatch(weight, how, () if weight == 0 and how == "host" and dice.random() < 0.5 else rows))
    return found if any(each.weight for each in found) else [*found, MicroBatch(3.0)]


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
    "small, then as large as may be": [M(1), M(2.0**40), M(1)],
    "as large as may be, after an empty one": [M(0), M(1e-20), M(1e-20 * 2.0**40)],
    "of one to twenty": [M(1 + n) for n in range(20)],
    "sums of 1": [M(0.25), M(0.25), M(0.5)],  # closing has nothing to divide by
}


WINDOWS = [(window, None) for window in MIXED.values()]
WINDOWS += [
    ([M(each.weight, how, each.rows) for each in window], bucket)
    for bucket, hows in ((None, HOWS), (1, HOWS[2:]))  # released: each parameter is a fold of its own
    for window in FIRST_EMPTY.values()
    for how in hows
]
WINDOWS += [(drawn(seed), None) for seed in range(120)]


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("part", range(4))
def test_a_window_is_the_mean_of_its_micro_batches(part: int, closes: bool, backend: str) -> None:
    """An empty one leaves no trace, and the weight of a micro-batch counts once."""
    for number, (window, bucket) in enumerate(WINDOWS[part::4]):
        torch.manual_seed(number)
        grads = gradients(window)
        worst = errors(run(backend, window, grads, bucket, closes), window, grads)
        assert max(worst) <= BOUND, (window, bucket, worst)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("weight", [1.0, 3.0, 1003.0, 0.37])
def test_a_window_of_one_micro_batch_is_its_gradients_bit_for_bit(weight: float, how: str, backend: str) -> None:
    if "loss" in how:
        weight = 2.0 ** round(math.log2(weight))  # so that autograd's product is exact
    window = [MicroBatch(weight, how)]
    grads = gradients(window)
    for row, mean in enumerate(run(backend, window, grads)):
        assert torch.equal(mean, grads[0][row])


@pytest.mark.parametrize("weight", [None, 2.0, 4.0])
@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_equal_weights_or_none_are_autograds_own_sum_bit_for_bit(
    weight: float | None, closes: bool, backend: str
) -> None:
    """The same fp32 additions in the same order."""
    hows = ("host", "host", "device" if weight else "host", "host")
    window = [MicroBatch(weight, how) for how in hows]
    grads = gradients(window)
    for row, mean in enumerate(run(backend, window, grads, closes=closes)):
        total = grads[0][row]
        for each in grads[1:]:
            total = total + each[row]
        assert torch.equal(mean, total / 4 if weight else total)


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


BEYOND = math.nextafter(2.0**40, math.inf)


@pytest.mark.parametrize(
    ("first", "weight"), [(M(1), M(BEYOND)), (M(3.0, "loss"), M(BEYOND)), (M(1e-20), M(1, "loss"))]
)
def test_a_weight_far_above_the_first_is_refused_and_the_window_goes_on(
    first: MicroBatch, weight: MicroBatch, backend: str
) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)

    def fold(micro_batch: MicroBatch, slope: float) -> None:
        if micro_batch.how == "loss":
            optimizer.backward((param * slope).sum(), micro_batch.weight)
        else:
            (param * slope).sum().backward()
            optimizer.accumulate(micro_batch.weight)

    fold(first, 3.0)
    fold(M(0), 7.0)
    with pytest.raises(
        ValueError, match=re.escape(f"is more than 2^40 times {1.0 if first.how == 'loss' else first.weight}")
    ):
        fold(weight, 8.0)
    param.grad = None
    fold(first, 5.0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -4.0), rtol=BOUND, atol=0.0)


@pytest.mark.parametrize("weight", [2**1100, 10**5000, float("inf")], ids=["2^1100", "10^5000", "inf"])
def test_a_weight_beyond_the_range_of_float64_is_refused(weight: float, backend: str) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="weight"):
        optimizer.accumulate(weight)
    assert torch.equal(param.grad, torch.ones(4))
