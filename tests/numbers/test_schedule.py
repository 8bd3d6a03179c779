"""schedule: the three numbers that follow from a window's size, against the windows and the formulas themselves."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumfused as af
from accumfused import schedule
from accumfused.schedule import gradient_accumulation_steps, scale_lr, updates_per_epoch

COUNTS = st.integers(1, 60)


@given(micro_batches=COUNTS, steps=COUNTS)
def test_updates_per_epoch_is_the_number_of_windows(micro_batches: int, steps: int) -> None:
    ends = sum(last for _, last in af.windows(range(micro_batches), steps))
    assert updates_per_epoch(micro_batches, steps) == ends


@given(per_device=COUNTS, world_size=COUNTS, steps=COUNTS)
def test_accumulation_steps_make_the_effective_batch(per_device: int, world_size: int, steps: int) -> None:
    assert gradient_accumulation_steps(per_device * world_size * steps, per_device, world_size) == steps


@given(effective_batch=st.integers(1, 500), per_device=COUNTS, world_size=COUNTS)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(
    effective_batch: int, per_device: int, world_size: int
) -> None:
    at_once = per_device * world_size
    if effective_batch % at_once == 0:
        return
    multiples = range(at_once, effective_batch + at_once + 1, at_once)
    near = [str(count) for count in multiples if abs(count - effective_batch) < at_once]
    with pytest.raises(ValueError, match=f"got {effective_batch}: take {' or '.join(near)}, or another per_device"):
        gradient_accumulation_steps(effective_batch, per_device, world_size)


@pytest.mark.parametrize(
    ("effective_batch", "nearest"), [(100, "96 or 128"), (31, "32"), (33, "32 or 64"), (1000, "992 or 1024")]
)
def test_the_refusal_shows_its_arithmetic(effective_batch: int, nearest: str) -> None:
    with pytest.raises(ValueError, match="effective_batch must be") as refusal:
        gradient_accumulation_steps(effective_batch, per_device=8, world_size=4)
    assert str(refusal.value) == (
        f"effective_batch must be a multiple of per_device * world_size = 8 * 4 = 32, got {effective_batch}: "
        f"take {nearest}, or another per_device"
    )


def test_the_linear_rule_is_that_of_the_paper() -> None:
    """Goyal et al.: 0.1 for 256 images, so 3.2 for 8192."""
    assert scale_lr(0.1, 256, 8192) == pytest.approx(3.2, rel=1e-15)
    assert scale_lr(0.1, 256, 64) == pytest.approx(0.025, rel=1e-15)


def test_the_square_root_rule_keeps_the_noise_of_an_update() -> None:
    """The noise of a mean over n samples is 1 / sqrt(n): times the learning rate it is the same for all n."""
    noise = [scale_lr(3e-4, 32, batch, rule="sqrt") / math.sqrt(batch) for batch in (1, 32, 100, 4096)]
    assert noise == pytest.approx([3e-4 / math.sqrt(32)] * 4, rel=1e-14)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_the_same_batch_keeps_the_learning_rate(rule: Any) -> None:
    assert scale_lr(0.3, 96, 96, rule) == 0.3
    assert type(scale_lr(1, 96, 96, rule)) is float


CALLS: dict[str, Callable[[Any], Any]] = {
    "base_batch": lambda value: scale_lr(0.1, value, 8),
    "effective_batch": lambda value: scale_lr(0.1, 8, value),
    "micro_batches": lambda value: updates_per_epoch(value, 4),
    "gradient_accumulation_steps": lambda value: updates_per_epoch(10, value),
    "effective_batch ": lambda value: gradient_accumulation_steps(value, 8),
    "per_device": lambda value: gradient_accumulation_steps(64, value),
    "world_size": lambda value: gradient_accumulation_steps(64, 8, value),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [0, -4, True, 8.0, "8", None, math.nan])
def test_what_is_no_count_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name.strip()} must be a whole number >= 1, got {value!r}: \w+"):
        CALLS[name](value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("whole", [np.int64, np.int32, torch.tensor], ids=["int64", "int32", "tensor"])
def test_whole_numbers_of_other_libraries_are_counts(name: str, whole: Any) -> None:
    assert CALLS[name](whole(8)) == CALLS[name](8)


@pytest.mark.parametrize("base_lr", [0, -0.1, math.inf, math.nan, True, "0.1", None])
def test_a_learning_rate_that_cannot_be_is_refused(base_lr: Any) -> None:
    with pytest.raises(ValueError, match=r"base_lr must be a finite number > 0, got .*: give the one that works"):
        scale_lr(base_lr, 8, 16)


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r'rule must be "linear" \(SGD\) or "sqrt" \(Adam.*\), got \'cubic\''):
        scale_lr(0.1, 8, 16, rule="cubic")  # type: ignore[arg-type]


def test_the_examples_in_the_docstrings() -> None:
    result = doctest.testmod(schedule)
    assert result.attempted == 4
    assert result.failed == 0
