"""schedule: the three numbers that follow from a window's size, against the windows and the formulas themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumfused as af
from accumfused.loop.batch_size import gradient_accumulation_steps, scale_lr, updates_per_epoch

COUNTS = st.integers(1, 60)


@given(micro_batches=COUNTS, steps=COUNTS)
def test_updates_per_epoch_is_the_number_of_windows(micro_batches: int, steps: int) -> None:
    ends = sum(last for _, last in af.windows(range(micro_batches), steps))
    assert updates_per_epoch(micro_batches, steps) == ends


@given(effective_batch=st.integers(1, 500), per_device=COUNTS, world_size=COUNTS, steps=COUNTS)
def test_accumulation_steps_make_the_effective_batch_or_are_refused_with_the_nearest_that_do(
    effective_batch: int, per_device: int, world_size: int, steps: int
) -> None:
    at_once = per_device * world_size
    assert gradient_accumulation_steps(at_once * steps, per_device, world_size) == steps
    if effective_batch % at_once == 0:
        return
    multiples = range(at_once, effective_batch + at_once + 1, at_once)
    near = " or ".join(str(count) for count in multiples if abs(count - effective_batch) < at_once)
    with pytest.raises(ValueError, match="effective_batch must be") as refusal:
        gradient_accumulation_steps(effective_batch, per_device, world_size)
    assert str(refusal.value) == (
        f"effective_batch must be a multiple of per_device * world_size = {per_device} * {world_size} = {at_once}, "
        f"got {effective_batch}: take {near}, or another per_device"
    )


def test_learning_rates_scale_as_in_the_papers() -> None:
    """Goyal et al.: 0.1 for 256 images, 3.2 for 8192; the noise of a mean over n samples is 1 / sqrt(n)."""
    assert [scale_lr(0.1, 256, n) for n in (8192, 64)] == pytest.approx([3.2, 0.025], rel=1e-15)
    noise = [scale_lr(3e-4, 32, batch, rule="sqrt") / math.sqrt(batch) for batch in (1, 32, 100, 4096)]
    assert noise == pytest.approx([3e-4 / math.sqrt(32)] * 4, rel=1e-14)
    assert [scale_lr(0.3, 96, 96, rule) for rule in ("linear", "sqrt")] == [0.3, 0.3]
    assert type(scale_lr(np.float64(1), 96, 96)) is float


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
def test_counts_are_whole_numbers_of_any_library_and_others_are_refused_by_name(name: str) -> None:
    for value in (0, -4, True, 8.0, "8", None, math.nan):
        with pytest.raises(ValueError, match=rf"^{name.strip()} must be a whole number >= 1, got {value!r}: \w+"):
            CALLS[name](value)
    for whole in (np.int64, np.int32, torch.tensor):
        assert CALLS[name](whole(8)) == CALLS[name](8)


def test_a_learning_rate_and_a_rule_that_cannot_be_are_refused() -> None:
    for base_lr in (0, -0.1, math.inf, math.nan, True, "0.1", None):
        with pytest.raises(ValueError, match=r"base_lr must be a finite number > 0, got .*: give the one that works"):
            scale_lr(base_lr, 8, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'rule must be "linear" \(SGD\) or "sqrt" \(Adam.*\), got \'cubic\''):
        scale_lr(0.1, 8, 16, rule="cubic")  # type: ignore[arg-type]
