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
from accumfused.loop.batch_size import gradient_accumulation_steps, scale_lr, updates, updates_per_epoch

COUNTS = st.integers(1, 60)


@given(micro_batches=COUNTS, steps=COUNTS)
def test_updates_per_epoch_is_the_number_of_windows(micro_batches: int, steps: int) -> None:
    ends = sum(last for _, last in af.windows(range(micro_batches), steps))
    assert updates_per_epoch(micro_batches, steps) == ends


@given(
    micro_batches=st.integers(1, 20), epochs=st.integers(1, 5), start=st.integers(0, 5),
    sizes=st.integers(1, 30) | st.lists(st.integers(1, 9), min_size=1, max_size=4),
)  # fmt: skip
def test_updates_of_several_epochs_are_those_that_the_loops_make(
    micro_batches: int, epochs: int, start: int, sizes: Any
) -> None:
    steps = sizes if isinstance(sizes, int) else lambda update: sizes[update % len(sizes)]
    loader = range(micro_batches)
    across = sum(last for _, last in af.windows(loader, steps, start=start, epochs=epochs))
    assert updates(micro_batches, steps, start=start, epochs=epochs) == across
    done = start
    for _ in range(epochs):
        done += sum(last for _, last in af.windows(loader, steps, start=done))
    assert updates(micro_batches, steps, start=start, epochs=epochs, across=False) == done - start


def test_a_schedule_of_all_updates_ends_where_the_training_does() -> None:
    """An epoch of 3 micro-batches is shorter than a window of 8: 100 epochs are 38 updates."""
    loader, steps, epochs = range(3), 8, 100
    optimizer = af.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    total = af.schedule.updates(len(loader), steps, epochs=epochs)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for _, last in af.windows(loader, steps, epochs=epochs):
        if last:
            optimizer.step()
            scheduler.step()
    assert total == 38
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


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
    "micro_batches ": lambda value: updates(value, 4, epochs=2),
    "epochs": lambda value: updates(10, 4, epochs=value),
    "gradient_accumulation_steps ": lambda value: updates(10, lambda _: value),
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
