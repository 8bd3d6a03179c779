"""What stochastic rounding promises: right on average, and no rounding that knows of another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accumfused.formats import codecs

_LAGS = (1, 2, 128)  # elements; 128 is a block of 8-bit codes

Rounded = Callable[[Tensor, Tensor], Tensor]  # (fp32 values, noise) -> what is stored, fp64


def bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    return (codecs.to_bfloat16_stochastic(values, noise) << 16).view(torch.float32).double()


def float16(values: Tensor, noise: Tensor) -> Tensor:
    return codecs.to_float16_stochastic(values, noise).to(torch.int16).view(torch.float16).double()


def split8(values: Tensor, noise: Tensor) -> Tensor:
    return codecs.join_short(*codecs.split_short(values, noise)).double()


def first_moment(values: Tensor, noise: Tensor) -> Tensor:
    return _coded(values, noise, second_moment=False)


def second_moment(values: Tensor, noise: Tensor) -> Tensor:
    return _coded(values, noise, second_moment=True)


def _coded(values: Tensor, noise: Tensor, *, second_moment: bool) -> Tensor:
    scale = codecs.scale_of(values)
    codes = codecs.encode(values, scale, noise, second_moment=second_moment)
    return codecs.decode(codes, scale, second_moment=second_moment).double()


FORMATS: dict[str, tuple[Rounded, tuple[float, ...]]] = {  # values, none of which the format has
    "bf16": (bfloat16, (1.001, -0.0203, 3e-30)),
    "fp16": (float16, (1.0001, -0.0203, 1e-6)),
    "split8": (split8, (1.000001, -0.0200003, 3e-30)),
    "int8 first moment": (first_moment, (0.7, -0.011, 0.0001)),
    "int8 second moment": (second_moment, (0.7, 0.011, 0.0005)),
}


def noise_of(step: int, elements: int, row: int = 0, seed: int = 0) -> Tensor:
    """An optimizer's noise of one tensor in one step."""
    return codecs.noise(codecs.key(torch.tensor(seed), torch.tensor(step), row), elements)


def statistics(quick: bool) -> list[dict[str, Any]]:
    """Rows of what should be zero, beside its standard deviation."""
    draws = 1 << (12 if quick else 17)
    rows = [mean_error(name, value, draws) for name, (_, values) in FORMATS.items() for value in values]
    return rows + correlations(1 << (12 if quick else 22))


def mean_error(name: str, value: float, draws: int) -> dict[str, Any]:
    """The mean error of many elements and steps that all hold one value; every block also holds 1, and so its scale."""
    rounded, _ = FORMATS[name]
    elements = min(draws, 1 << 12)
    values = torch.full((elements,), value)
    values[:: codecs.BLOCK] = 1.0
    kept = values != 1.0
    found = [rounded(values, noise_of(step, elements))[kept] for step in range(1, 1 + draws // elements)]
    errors = torch.cat(found) - values[kept].double().repeat(draws // elements)
    low, high = errors.min(), errors.max()
    sigma = float((-low * high).sqrt()) / math.sqrt(len(errors))  # two outcomes, low and high, whose mean is to be 0
    return _row(f"{name}: mean error of {value:g}", len(errors), float(errors.mean()), sigma)


def correlations(draws: int) -> list[dict[str, Any]]:
    """Between the errors of roundings that should not know of each other, all of one value in the middle of two."""
    here = _errors(noise_of(5, draws))
    rows = [_correlation(f"elements {lag} apart", here[:-lag], here[lag:]) for lag in _LAGS]
    others = {
        "step and next step": noise_of(6, draws),
        "tensor and next tensor": noise_of(5, draws, row=1),
        "seed and next seed": noise_of(5, draws, seed=1),
        "first and second moment": codecs.stream(noise_of(5, draws), 1),
        "first moment and weight": codecs.stream(noise_of(5, draws), 2),
    }
    rows += [_correlation(what, here, _errors(noise)) for what, noise in others.items()]
    rows.append(
        _correlation("element of a step and next element of the next", here[1:], _errors(noise_of(6, draws))[:-1])
    )
    second, weight = (_errors(codecs.stream(noise_of(5, draws), number)) for number in (1, 2))
    return [*rows, _correlation("second moment and weight", second, weight)]


def _errors(noise: Tensor) -> Tensor:
    """In units between two bf16 neighbours: -0.5 or 0.5."""
    values = torch.full(noise.shape, 1 + 2.0**-8)
    return (bfloat16(values, noise) - values.double()) * 2**7


def _correlation(what: str, left: Tensor, right: Tensor) -> dict[str, Any]:
    sigma = float(left.std() * right.std()) / math.sqrt(len(left))
    return _row(f"correlation: {what}", len(left), float(((left - left.mean()) * (right - right.mean())).mean()), sigma)


def _row(what: str, draws: int, value: float, sigma: float) -> dict[str, Any]:
    return {"what": what, "draws": draws, "value": value, "sigma": sigma, "sigmas": value / sigma}
