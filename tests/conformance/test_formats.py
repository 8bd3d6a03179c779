"""Parameters and states in fewer bits: every backend stores the same bits, whatever the rule, format and gradient."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import STATES, WEIGHTS, Case, case_named, random_grads, random_params, set_grads  # fmt: skip
from torch import Tensor

from accumfused import _native, codecs, formats, numeric
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend

CHUNK = numeric.CHUNK
SIZES = (0, 1, 127, 128, 129, 1000, CHUNK + 130)
# Below 2^17 elements in all the kernels use one thread: together these are more, so that threads come into play.
LARGE = (*SIZES, CHUNK - 1, 2 * CHUNK + 5)
SMALL = (0, 3, 127, 128, 129, 1300)

RULES = ("sgd_weight_decay", "sgd_nesterov", "adamw", "adamw_amsgrad", "lion_weight_decay")
GRADS = (torch.float32, torch.float16, torch.bfloat16)

each_weights = pytest.mark.parametrize("weights", WEIGHTS)
each_states = pytest.mark.parametrize("states", STATES)
each_rule = pytest.mark.parametrize("rule", RULES)


def make(
    case: Case, backend: Any, weights: str, states: str, sizes: Any = SIZES, **settings: Any
) -> tuple[Any, list[Tensor]]:
    """An optimizer over random parameters in one format; small tensors too."""
    dtype, options = WEIGHTS[weights]
    params = [p.detach().to(dtype).requires_grad_() for p in random_params([(size,) for size in sizes])]
    known = {"max_grad_norm": 0.5, "rounding_seed": 17, "state_dtype_min_numel": 2, "state_dtype": STATES[states]}
    return case.make(params, backend, **{**known, **options, **settings}), params


def run(
    case: Case, backend: Any, weights: str, states: str, grad_dtype: torch.dtype, sizes: Any = SIZES, **settings: Any
) -> dict[str, Tensor]:
    """A clipped step from p.grad, then a weighted window: all that is stored afterwards."""
    optimizer, params = make(case, backend, weights, states, sizes, **settings)
    set_grads(params, random_grads(params, 0, grad_dtype))
    optimizer.step()
    optimizer.zero_grad()
    for seed, weight in enumerate((3.0, 0.7, 5.0), start=1):
        set_grads(params, random_grads(params, seed, grad_dtype))
        optimizer.accumulate(weight)
    optimizer.step()
    return {name: value.cpu() for name, value in everything(optimizer).items()}


@functools.cache
def reference_run(
    rule: str, weights: str, states: str, grad_dtype: torch.dtype, sizes: Any = SIZES, **settings: Any
) -> dict[str, Tensor]:
    return run(case_named(rule), ReferenceBackend(), weights, states, grad_dtype, sizes, **settings)


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


needs_native = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")


@needs_native
@each_rule
@each_weights
@each_states
def test_every_instruction_set_and_thread_count_gives_the_reference_bits(rule: str, weights: str, states: str) -> None:
    grad_dtype = GRADS[(list(WEIGHTS).index(weights) + list(STATES).index(states)) % 3]
    sizes = LARGE if rule == "adamw" and weights == "split8" else SIZES
    expected = reference_run(rule, weights, states, grad_dtype, sizes)
    for name, threads in zip(_native._C.instruction_sets(), itertools.cycle((2, 1, 3))):
        torch.set_num_threads(threads)
        actual = run(case_named(rule), CpuBackend(name), weights, states, grad_dtype, sizes)
        torch.set_num_threads(1)
        assert_agree(actual, expected)


NOT_FINITE = {
    "nan": 0x7FC0, "-nan": 0xFFC0, "nan of ones": 0x7FFF, "-nan of ones": 0xFFFF, "nan of one": 0x7F81, "inf": 0x7F80,
    "-inf": 0xFF80, "large": 0x7F7F,
}  # fmt: skip


@needs_native
@pytest.mark.parametrize("of", ["param", "grad"])
@pytest.mark.parametrize("weights", ["split16", "split8"])
@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
def test_one_number_that_is_not_finite_among_codes(weights: str, grad_dtype: torch.dtype, of: str) -> None:
    def stored(backend: Any, value: int, at: int, eps: float) -> dict[str, Tensor]:
        options = {"max_grad_norm": None, "nonfinite": "propagate", "eps": eps}
        optimizer, (param,) = make(case_named("adamw"), backend, weights, "int8", (1000,), **options)
        grads = random_grads([param], 0, torch.bfloat16)
        grads[0][130:140] = 0  # with eps=0 a NaN of finite moments
        (param.data if of == "param" else grads[0]).view(torch.int16)[at] = value - (value >> 15 << 16)
        for _ in range(3):  # the scales of a block that is not finite are read again
            set_grads([param], [grads[0].to(grad_dtype)])
            optimizer.step()
        found = {name: tensor.clone() for name, tensor in everything(optimizer).items()}
        for name in ("exp_avg", "exp_avg_sq"):  # what is NaN has codes of no meaning
            blocks = (found[f"{name}_scale 0"] == 255).repeat_interleave(codecs.BLOCK)[:1000]
            found[f"{name} 0"][blocks] = 0
        return found

    cases = itertools.product(NOT_FINITE.values(), (0, 257, 511, 614, 903))
    for (value, at), eps in zip(cases, itertools.cycle((1e-8, 0.0))):
        expected = stored(ReferenceBackend(), value, at, eps)
        for name in _native._C.instruction_sets():
            assert_agree(stored(CpuBackend(name), value, at, eps), expected)


def test_constants_are_those_of_the_kernels() -> None:
    if _native._C is None:
        pytest.skip(_native.unavailable or "")
    assert (_native._C.BLOCK, _native._C.MIN_SECOND_MOMENT, _native._C.SMALLEST_SCALE) == (
        codecs.BLOCK, codecs.MIN_SECOND_MOMENT, codecs.SMALLEST_SCALE
    )  # fmt: skip
    assert numeric.CHUNK % codecs.BLOCK == 0
    assert max(formats.Weights) == 8
