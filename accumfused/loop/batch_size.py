"""Arithmetic of batch sizes: the learning rate, the number of updates, the number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, SupportsFloat, get_args

from accumfused.arguments import checked_whole

LrRule = Literal["linear", "sqrt"]


def scale_lr(base_lr: float, base_batch: int, effective_batch: int, rule: LrRule = "linear") -> float:
    """Scales a learning rate that works with one batch size to another batch size.

    With k = effective_batch / base_batch, "linear" is base_lr * k: one update replaces k, as long as the weights move
    little meanwhile. It suits SGD and needs a warm-up (Goyal et al. 2017, arXiv:1706.02677). "sqrt" is base_lr *
    sqrt(k): it keeps the noise of an update (Krizhevsky 2014, arXiv:1404.5997). It suits Adam and other adaptive
    methods; Malladi et al. 2022 (arXiv:2205.10287) scale the betas and eps too. Both hold up to some batch size, which
    depends on the task.

    Args:
        base_lr: the learning rate that works with `base_batch`.
        base_batch: samples (or tokens) in an update at `base_lr`.
        effective_batch: the same unit in an update now: micro-batch x gradient_accumulation_steps x processes.
        rule: "linear" or "sqrt".

    Returns:
        The learning rate for `effective_batch`.

    Raises:
        ValueError: the learning rate is not finite and > 0; a batch is not a whole number >= 1; an unknown rule.

    Examples:
        >>> scale_lr(0.1, base_batch=256, effective_batch=1024)
        0.4
        >>> scale_lr(1e-3, base_batch=256, effective_batch=1024, rule="sqrt")
        0.002
    """
    if isinstance(base_lr, bool) or not isinstance(base_lr, SupportsFloat) or not 0 < float(base_lr) < math.inf:
        raise ValueError(f"base_lr must be a finite number > 0, got {base_lr!r}: give the one that works at base_batch")
    factor = checked_whole(effective_batch, "effective_batch") / checked_whole(base_batch, "base_batch")
    if rule not in get_args(LrRule):
        raise ValueError(f'rule must be "linear" (SGD) or "sqrt" (Adam and other adaptive methods), got {rule!r}')
    return float(base_lr) * (factor if rule == "linear" else math.sqrt(factor))


def updates(
    micro_batches: int,
    gradient_accumulation_steps: int | Callable[[int], int],
    *,
    start: int = 0,
    epochs: int = 1,
    across: bool = True,
) -> int:
    """Counts the updates of a training, short windows included: a scheduler's `total_steps` or `T_max`.

    The first arguments are those of `windows(loader, gradient_accumulation_steps, start=start, epochs=epochs)`.

    Args:
        micro_batches: micro-batches in an epoch: `len(loader)`.
        gradient_accumulation_steps: micro-batches in a window, or a function that returns them for an update's index.
        start: the index of the first update, for such a function.
        epochs: how often the loader is gone through.
        across: True: a window goes on over an epoch's end, as with `windows(epochs=)`, and only the last epoch
            has a short one. False: `windows` begins anew in each epoch, whose last window may be short. (A function's
            index goes on, as where each epoch gives `start=`.)

    Raises:
        ValueError: a number is not whole, or too small.

    Examples:
        >>> updates(3, 8, epochs=100)
        38
        >>> updates(3, 8, epochs=100, across=False)
        100
    """
    count, epochs = checked_whole(micro_batches, "micro_batches"), checked_whole(epochs, "epochs")
    passes, length = (1, epochs * count) if across else (epochs, count)
    first = update = checked_whole(start, "start", 0)
    if not callable(gradient_accumulation_steps):
        return passes * -(-length // checked_whole(gradient_accumulation_steps, "gradient_accumulation_steps"))
    for _ in range(passes):
        left = length
        while left > 0:
            left -= checked_whole(gradient_accumulation_steps(update), "gradient_accumulation_steps")
            update += 1
    return update - first


def updates_per_epoch(micro_batches: int, gradient_accumulation_steps: int) -> int:
    """Counts the updates of an epoch over `windows(loader, gradient_accumulation_steps)`, a short last window included.

    A scheduler takes this number as `steps_per_epoch` where each epoch has windows of its own. `windows(epochs=)` makes
    fewer: `updates` counts the updates of several epochs, with and without windows over their ends.

    Args:
        micro_batches: micro-batches in an epoch: `len(loader)`.
        gradient_accumulation_steps: micro-batches in a window.

    Raises:
        ValueError: an argument is not a whole number >= 1.

    Examples:
        >>> updates_per_epoch(10, 4)
        3
    """
    checked_whole(gradient_accumulation_steps, "gradient_accumulation_steps")
    return updates(micro_batches, gradient_accumulation_steps)


def gradient_accumulation_steps(effective_batch: int, per_device: int, world_size: int = 1) -> int:
    """Counts the micro-batches of `per_device` samples that `world_size` processes need each for the effective batch.

    Args:
        effective_batch: samples in an update, over all processes.
        per_device: samples in a micro-batch of one process.
        world_size: processes that share a window.

    Raises:
        ValueError: `effective_batch` is no multiple of the others (the text names the nearest ones that are), or an
            argument is not a whole number >= 1.

    Examples:
        >>> gradient_accumulation_steps(256, per_device=8, world_size=4)
        8
    """
    batch = checked_whole(effective_batch, "effective_batch")
    at_once = checked_whole(per_device, "per_device") * checked_whole(world_size, "world_size")
    steps, remainder = divmod(batch, at_once)
    if remainder:
        nearest = " or ".join(str(count * at_once) for count in (steps, steps + 1) if count)
        raise ValueError(
            f"effective_batch must be a multiple of per_device * world_size = {per_device} * {world_size} = {at_once}, "
            f"got {batch}: take {nearest}, or another per_device"
        )
    return steps
