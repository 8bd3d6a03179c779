"""Noise scale and metrics: what the kernels sum beside their work has the reference's bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from places import INTERPRETED, ON_CPU, ON_GPU, Place
from reference import ReferenceBackend
from table import STATES, WEIGHTS, case_named
from torch import Tensor

from accumfused.formats.numeric import CHUNK

SIZES = (CHUNK + 2100, 5, 0, 1500)
WINDOWS: dict[str, Sequence[Any]] = {"sum": (None,) * 3, "mean": (3.0, 0.7, 5.0), "device": ("3", "0", "0.7", "5")}
everywhere = pytest.mark.parametrize("place", [*ON_CPU, "two devices", *INTERPRETED, *ON_GPU], indirect=True)


def measured(
    backend: Any, device: str, case: str, weights: str, states: str, window: str, *, closed: bool, clip: float
) -> list[Tensor]:
    """What is measured in three updates: of the second the first parameter has no gradient, the third is skipped."""
    dtype, options = WEIGHTS[weights]
    params = [torch.randn(n).to(device, dtype).requires_grad_() for n in SIZES]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer: Any = case_named(case).make(
        groups, backend, max_grad_norm=clip, rounding_seed=17, state_dtype=STATES[states], state_dtype_min_numel=2,
        metrics=True, noise_scale=0.5, **options,
    )  # fmt: skip
    found = []
    for update in range(3):
        for micro, weight in enumerate(WINDOWS[window]):
            for index, param in enumerate(params):
                values = torch.randn(param.shape)
                values[::7] = 0.0
                if update == 2 and micro == 1:
                    values[:1] = torch.inf
                has_none = index == 0 and (update == 1 or micro == 0)  # its first gradient comes late
                param.grad = None if has_none else values.to(device, dtype)
            given = torch.tensor(float(weight), device=device) if isinstance(weight, str) else weight
            optimizer.accumulate(given, last=closed and micro == len(WINDOWS[window]) - 1)
        optimizer.step()
        noise = optimizer.noise_scale()
        found += [optimizer.metrics().values, torch.stack([noise.signal, noise.noise, noise.windows])]
    return [values.cpu() for values in found]


@everywhere
@pytest.mark.parametrize(
    ("case", "weights", "states", "window", "closed", "clip"),
    [
        ("adamw", "fp32", "fp32", "sum", False, 0.5),
        ("adamw", "split8", "8bit", "mean", True, 1e6),
        ("lion", "bf16_stochastic", "fp32", "device", False, 0.5),
        ("sgd_momentum", "split16", "bf16", "mean", False, 0.5),
    ],
)
def test_measures_have_the_references_bits(
    place: Place, case: str, weights: str, states: str, window: str, closed: bool, clip: float
) -> None:
    found = []
    for backend, device in ((ReferenceBackend(), "cpu"), (place.backend, place.device)):
        torch.manual_seed(0)
        found.append(measured(backend, device, case, weights, states, window, closed=closed, clip=clip))
    for number, (ours, expected) in enumerate(zip(found[1], found[0], strict=True)):
        assert_same_bits(ours.view(torch.int64), expected.view(torch.int64), f"measure {number}")
    assert bool(found[0][0].isfinite().all())
    assert bool((found[0][1] != 0).all())
