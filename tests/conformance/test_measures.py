"""Noise scale and metrics: what the kernels sum beside their work has the reference's bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from layouts import shifted
from places import INTERPRETED, ON_CPU, ON_GPU, Place
from problems import bare_plan
from table import STATES, WEIGHTS, case_named
from torch import Tensor

from accumfused.backends.reference import ReferenceBackend
from accumfused.core.protocol import Scaling
from accumfused.formats.numeric import CHUNK, LANES

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
        ("adamw", "split8", "int8", "mean", True, 1e6),
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


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_chunk_is_counted(place: Place, dtype: torch.dtype) -> None:
    """Zeros of both signs, no subnormal; inf and NaN, no number whose square overflows. Squares are the norm's."""
    special = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 1.0, 6e4, -3e38, torch.inf, -torch.inf, torch.nan]
    grads = []
    for size in (0, 1, 17, LANES + 1, 9 * LANES, 9 * LANES + 5, 2 * CHUNK + 1):
        values = torch.tensor(special)[torch.randint(len(special), (size,))].to(dtype)
        values[CHUNK:] = 3e38  # infinite in fp16 alone
        grads += [values.to(place.device), shifted(values).to(place.device)]
    built = bare_plan(place.backend, [torch.empty_like(grad) for grad in grads])
    found, counts = torch.zeros(2, built.chunks, device=place.device), torch.zeros(2, built.chunks, device=place.device)
    given: Any = [None, *grads[1:]]  # the first is empty
    place.backend.count(built, given, found[0], counts)
    place.backend.norm(built, given, found[1], Scaling(built.device))
    assert_same_bits(found[0], found[1])
    pieces = [piece.cpu() for grad in grads for piece in grad.split(CHUNK) if len(piece)]
    wanted = [[int((piece == 0).sum()), int((~piece.isfinite()).sum())] for piece in pieces]
    assert counts.T.tolist() == wanted
