"""The reference and the native kernels compute the same bits.

For every rule, gradient dtype, instruction set and number of threads, norm and coefficient included.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from hypothesis import given, settings
from hypothesis import strategies as st
from table import (  # fmt: skip
    ADAMW_CASE,
    CASES,
    Case,
    all_backends,
    case_named,
    every_case,
    random_grads,
    random_params,
    set_grads,
)
from torch import Tensor

from accumfused import _native, numeric
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.rules import RULES

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

INSTRUCTION_SETS = () if _native._C is None else tuple(_native._C.instruction_sets())
THREADS = (1, 2, 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = numeric.CHUNK
# Below 2^17 elements in all the kernels use one thread: together these are more, so that threads come into play.
SIZES = (0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, *[3] * 40, 3 * CHUNK + 5)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Recorder:
    """A backend that keeps every outcome of another one."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.outcomes = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def norm(self, *args: Any) -> Any:
        outcome = self._inner.norm(*args)
        self.outcomes.append(outcome.values.clone())
        return outcome


@functools.cache
def inputs(sizes: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters, and the gradients of five micro-batches; changed by nobody."""
    params = random_params([(size,) for size in sizes])
    return params, [random_grads(params, seed, dtype) for seed in range(5)]


def on_device(sizes: Sequence[int], dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Copies of the inputs, for one run to work on."""
    params, micro_batches = inputs(sizes, dtype)
    copies = [p.detach().clone().to(device).requires_grad_() for p in params]
    return copies, [[g.to(device) for g in grads] for grads in micro_batches]


def run(
    case: Case, backend: Any, dtype: torch.dtype, sizes: Sequence[int] = SIZES, device: str = "cpu"
) -> dict[str, Tensor]:
    """A clipped step from p.grad, a weighted window and its remainder: all tensors and outcomes, on the CPU."""
    params, micro_batches = on_device(sizes, dtype, device)
    recorder = Recorder(backend)
    optimizer = case.make(params, recorder, max_grad_norm=0.5)
    set_grads(params, micro_batches[0])
    optimizer.step(normalizer=1.7)
    optimizer.zero_grad()
    for weight, grads in zip((3.0, 0.7, 5.0), micro_batches[1:], strict=False):
        set_grads(params, grads)
        optimizer.accumulate(weight)
    optimizer.step()
    set_grads(params, micro_batches[4])
    optimizer.accumulate(2.0)
    optimizer.step()
    found = everything(optimizer) | {f"outcome {i}": values for i, values in enumerate(recorder.outcomes)}
    return {name: value.cpu() for name, value in found.items()}


@functools.cache
def reference_run(case_name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return run(case_named(case_name), ReferenceBackend(), dtype)


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


def compare_with_reference(case: Case, backend: Any) -> None:
    assert_agree(run(case, backend, torch.float32), reference_run(case.name, torch.float32))


COMPARISONS = [("reference", compare_with_reference, lambda case: True)]


@every_case
@each_dtype
def test_every_instruction_set_and_thread_count_gives_the_reference_bits(case: Case, dtype: torch.dtype) -> None:
    expected = reference_run(case.name, dtype)
    for name in INSTRUCTION_SETS:
        for threads in THREADS:
            torch.set_num_threads(threads)
            actual = run(case, CpuBackend(name), dtype)
            torch.set_num_threads(1)
            try:
                assert_agree(actual, expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, {threads} threads: {error}") from error


def window(
    backend: Any, dtype: torch.dtype, weights: Sequence[Any], *, closed: bool, sizes: Sequence[int] = SIZES,
    device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """One window of AdamW, the third parameter from the end coming in only with the second micro-batch."""
    params, micro_batches = on_device(sizes, dtype, device)
    optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
    found: dict[str, Tensor] = {}
    for k, weight in enumerate(weights):
        grads: list[Tensor | None] = [*micro_batches[k]]
        if k == 0:
            grads[-3] = None
        set_grads(params, grads)
        optimizer.accumulate(weight, last=closed and k == len(weights) - 1)
    if closed:
        found |= {f"p.grad {i}": p.grad.clone() for i, p in enumerate(params) if p.grad is not None}
    optimizer.step()
    found |= everything(optimizer) | {"norm": optimizer.grad_norm.clone()}
    return {name: value.cpu() for name, value in found.items()}


def uneven_steps(backend: Any, device: str = "cpu") -> dict[str, Tensor]:
    """Parameters of one group that have made different numbers of steps, and so have other bias corrections."""
    params = [p.detach().to(device).requires_grad_() for p in random_params([(40,), (CHUNK + 3,), (50,), (60,)])]
    optimizer = ADAMW_CASE.make(params, backend)
    for step in range(4):
        grads: list[Tensor | None] = [g.to(device) for g in random_grads(params, step)]
        set_grads(params, [g if step % (index + 1) == 0 else None for index, g in enumerate(grads)])
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 2, 2, 1]
    return {name: value.cpu() for name, value in everything(optimizer).items()}


def test_uneven_step_counts_agree() -> None:
    expected = uneven_steps(ReferenceBackend())
    for name in INSTRUCTION_SETS:
        assert_agree(uneven_steps(CpuBackend(name)), expected)


WINDOWS = {
    "sum": (None, None, None),
    "sum of one": (None,),
    "mean": (3.0, 0.7, 5.0),
    "mean of one": (3.0,),
    "device weights": tuple(torch.tensor(w) for w in (3.0, 0.7, 5.0)),
    "device weight of one": (torch.tensor(3.0),),
    "both kinds": (3.0, torch.tensor(0.7), 5.0),
    "empty host": (0.0, 3.0, 0.7),
    "empty device": (torch.tensor(0.0), 3.0, torch.tensor(0.0), 0.7),
    "bad device weight": (torch.tensor(-1.0), 3.0),
}


@each_dtype
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_agree(weights: Sequence[Any], closed: bool, dtype: torch.dtype) -> None:
    expected = window(ReferenceBackend(), dtype, weights, closed=closed)
    for name in INSTRUCTION_SETS:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            actual = window(CpuBackend(name), dtype, weights, closed=closed)
            torch.set_num_threads(1)
            assert_agree(actual, expected)


def test_one_large_tensor_and_its_window_agree() -> None:
    # Beyond 8 MB the first fold of a 16-bit gradient is written around the caches.
    sizes = (80 * CHUNK + 11, 3, 5, 7)
    expected = window(ReferenceBackend(), torch.bfloat16, (3.0, 0.7), closed=False, sizes=sizes)
    for name in INSTRUCTION_SETS:
        torch.set_num_threads(2)
        assert_agree(window(CpuBackend(name), torch.bfloat16, (3.0, 0.7), closed=False, sizes=sizes), expected)


def test_more_chunks_than_lanes_agree() -> None:
    sizes = (1,) * 2100  # one chunk each: the sum over chunks wraps around its 1024 lanes
    expected = run(case_named("sgd"), ReferenceBackend(), torch.float32, sizes)
    assert_agree(run(case_named("sgd"), CpuBackend(), torch.float32, sizes), expected)


@every_case
def test_a_second_python_thread_gets_the_same_bits(case: Case) -> None:
    found: list[dict[str, Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(run(case, CpuBackend(), torch.float32)))
    thread.start()
    thread.join()
    assert_agree(found[0], reference_run(case.name, torch.float32))


def subnormal_run(
    case: Case, backend: Any, dtype: torch.dtype, *, flush: bool, size: int = CHUNK + 5
) -> dict[str, Tensor]:
    """Two windows with parameters and gradients around the smallest normal numbers of fp32, and of fp16."""
    generator = torch.Generator().manual_seed(5)
    tiny = 2.0 ** torch.randint(-149, -110, (size,), generator=generator).float()
    params = [(tiny * torch.randn(len(tiny), generator=generator)).requires_grad_()]
    if dtype == torch.float16:
        tiny = 2.0 ** torch.randint(-24, -10, (size,), generator=generator).float()
    grads = [(tiny * torch.randn(len(tiny), generator=generator)).to(dtype) for _ in range(4)]
    optimizer = case.make(params, backend)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this machine cannot flush subnormals")
    for first, second in ((0, 1), (2, 3)):
        set_grads(params, [grads[first]])
        optimizer.accumulate(0.3)
        set_grads(params, [grads[second]])
        optimizer.accumulate(0.9)
        optimizer.step()
    flushes = bool(torch.tensor(2.0**-126).mul(0.5).eq(0))
    torch.set_flush_denormal(False)
    assert flushes == flush, "a step left another float mode behind"
    return everything(optimizer) | {"norm": optimizer.grad_norm.clone()}


@each_dtype
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_amsgrad", "lion_weight_decay"])
def test_the_float_mode_of_the_calling_thread_does_not_matter(name: str, dtype: torch.dtype) -> None:
    case = case_named(name)
    expected = subnormal_run(case, ReferenceBackend(), dtype, flush=False)
    for backend in all_backends():
        for flush in (False, True):
            assert_agree(subnormal_run(case, backend, dtype, flush=flush), expected)


def test_the_float_mode_of_other_threads_does_not_matter() -> None:
    size = 5 * CHUNK
    expected = subnormal_run(ADAMW_CASE, ReferenceBackend(), torch.float32, flush=False, size=size)
    torch.set_num_threads(3)
    for backend in all_backends():
        assert_agree(subnormal_run(ADAMW_CASE, backend, torch.float32, flush=True, size=size), expected)


SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e-40,
    -1e-45,
    2.0**-126,
    3e38,
    -3e38,
    1e-20,
    65504.0,
)
numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-10, 10, width=32))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 1023, 1025, CHUNK + 1]), min_size=1, max_size=4))
    return {
        "case": draw(st.sampled_from(CASES)),
        "sizes": sizes,
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**16)),
        "special": draw(st.lists(st.tuples(st.integers(0, CHUNK), numbers), max_size=4)),
        "special_params": draw(st.lists(st.tuples(st.integers(0, CHUNK), numbers), max_size=2)),
        "nonfinite": draw(st.sampled_from([None, "skip", "propagate", "raise"])),
        "max_grad_norm": draw(st.sampled_from([None, 1e-30, 0.5, 1e30])),
        "normalizer": draw(st.sampled_from([None, 3.0, 1e-30, 1e38, "nan", "0", "-2", "3"])),
        "weights": draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, 1e20, 1e-30]), max_size=3)),
        "missing": draw(st.integers(0, 7)),
    }


def solve(problem: dict[str, Any], backend: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Two updates; what there is in the end, and the errors on the way."""
    generator = torch.Generator().manual_seed(problem["seed"])
    params = [torch.randn(size, generator=generator).requires_grad_() for size in problem["sizes"]]
    for at, value in problem["special_params"]:
        for param in params:
            if at < len(param):
                param.data[at] = value
    recorder = Recorder(backend)
    settings = {key: problem[key] for key in ("max_grad_norm", "nonfinite")}
    optimizer = problem["case"].make(params, recorder, **settings)
    normalizer, errors = problem["normalizer"], []
    if isinstance(normalizer, str):
        normalizer = torch.tensor(float(normalizer))
    weights = problem["weights"] if any(problem["weights"]) else []
    for _ in range(2):
        for weight in weights or [None]:
            grads: list[Tensor | None] = [torch.randn(p.shape, generator=generator) for p in params]
            for at, value in problem["special"]:
                for grad in grads:
                    if at < len(grad):
                        grad[at] = value
            grads = [g.to(problem["dtype"]) for g in grads]
            if problem["missing"] < len(grads) > 1:
                grads[problem["missing"]] = None
            set_grads(params, grads)
            if weight is not None:
                optimizer.accumulate(weight)
        try:
            optimizer.step(normalizer=normalizer)
        except RuntimeError as error:
            errors.append(str(error))
            optimizer.zero_grad()
    outcomes = {f"outcome {i}": values for i, values in enumerate(recorder.outcomes)}
    return everything(optimizer) | outcomes | {"skipped": optimizer.skipped_steps.float()}, errors


@pytest.mark.filterwarnings("ignore:two accumulation windows in a row were dropped")
@settings(max_examples=120, deadline=None, derandomize=True)
@given(problem=problems())
def test_any_values_and_options_agree(problem: dict[str, Any]) -> None:
    expected, errors = solve(problem, ReferenceBackend())
    for name in INSTRUCTION_SETS:
        actual, its_errors = solve(problem, CpuBackend(name))
        assert its_errors == errors
        assert_agree(actual, expected)


def test_a_bad_normalizer_without_a_single_element_agrees() -> None:
    found = []
    for backend in (ReferenceBackend(), CpuBackend()):
        recorder, params = Recorder(backend), [torch.zeros(0, requires_grad=True)]
        optimizer = ADAMW_CASE.make(params, recorder, max_grad_norm=1.0)
        set_grads(params, [torch.zeros(0)])
        optimizer.step(normalizer=torch.tensor(torch.nan))
        found.append(everything(optimizer) | {"outcome": recorder.outcomes[0]})
    assert_agree(found[1], found[0])


def test_native_rules_are_the_python_rules() -> None:
    expected = [(rule.name, tuple(rule.states), rule.counts_steps, tuple(rule.hypers)) for rule in RULES]
    assert _native._C.rules() == expected


def test_the_constants_of_the_arithmetic_agree() -> None:
    assert (_native._C.CHUNK, _native._C.LANES) == (numeric.CHUNK, numeric.LANES)
