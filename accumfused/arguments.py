"""Checks of a training loop's numbers: those on the host are checked, those on a device are never read."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsIndex

from torch import Tensor


def checked_positive(value: float | Tensor, name: str, *, or_zero: bool = False) -> float | Tensor:
    """Returns a finite host number > 0 (or >= 0), or a one-element tensor, whose value is not read.

    Raises:
        ValueError: any other number; a tensor that is complex or has not one element.
        TypeError: neither a number nor a tensor.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"{name} must be one real number, got a tensor of shape {list(value.shape)}, {value.dtype}"
            )
        return value.detach()
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number or a tensor of one element, got {type(value).__name__}") from error
    except OverflowError:
        raise ValueError(f"{name} is a whole number beyond the range of float64; give it in a larger unit") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
        raise ValueError(f"{name} must be finite and {'>= 0' if or_zero else '> 0'}, got {value}")
    return number


def checked_weight(weight: float | Tensor | None) -> float | Tensor | None:
    return None if weight is None else checked_positive(weight, "weight", or_zero=True)


def checked_whole(value: Any, name: str, least: int = 1) -> int:
    """Returns a whole number of at least `least`.

    Raises:
        ValueError: anything else.
    """
    text = f"{name} must be a whole number >= {least}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        remedy = "round it to an int" if isinstance(value, float) else "give an int"
        raise ValueError(f"{text}: {remedy}")
    if index(value) < least:
        raise ValueError(f"{text}: {least} is the least")
    return index(value)
