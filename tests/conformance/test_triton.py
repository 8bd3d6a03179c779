"""The Triton kernels compute the bits of the reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_backends_agree as agree
import test_layouts
import torch
from compare import assert_same_bits, everything
from hypothesis import given, settings
from table import ADAMW_CASE, Case, case_named, every_case, random_grads, random_params, set_grads  # fmt: skip
from test_backends_agree import CHUNK, WINDOWS, assert_agree, each_dtype
from torch import Tensor
from triton_interpreter import DEVICE, interpreting

import accumfused as af
from accumfused import _native, plan
from accumfused.backends.base import Scaling
from accumfused.backends.reference import ReferenceBackend
from accumfused.rules import RULES
from accumfused.settings import Settings

with interpreting():
    triton: Any = pytest.importorskip("triton")
    tl: Any = pytest.importorskip("triton.language")
    from accumfused.backends.triton import TritonBackend

assert DEVICE == "cuda" or type(tl.sum).__name__.startswith("Interpreted"), "something imported Triton before us"
if DEVICE == "cpu" and triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4", allow_module_level=True)

# Triton 3.6 makes numbers of numpy's arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

# One of the rules each.
RULE_CASES = [case_named(n) for n in ("sgd", "sgd_nesterov", "adam_weight_decay", "adamw_amsgrad", "lion_weight_decay")]
every_rule = pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.name)

# Nothing, a part of a row, and pieces that go as whole ones (2048 elements in a step, 4096 in a norm) with a rest.
SIZES = (0, 17, 4096 + 5)
EDGES = (0, 1, 15, 16, CHUNK - 1, CHUNK, CHUNK + 1)  # more chunks than the interpreter has programs


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with interpreting(), np.errstate(all="ignore"):  # numpy, which the interpreter computes with, warns of overflow
        yield


@every_case
@each_dtype
def test_every_case_gives_the_reference_bits(case: Case, dtype: torch.dtype) -> None:
    expected = agree.run(case, ReferenceBackend(), dtype, SIZES)
    assert_agree(agree.run(case, TritonBackend(), dtype, SIZES, device=DEVICE), expected)


@every_rule
def test_chunks_and_their_edges_give_the_reference_bits(case: Case) -> None:
    expected = agree.run(case, ReferenceBackend(), torch.float32, EDGES)
    assert_agree(agree.run(case, TritonBackend(), torch.float32, EDGES, device=DEVICE), expected)


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_agree(weights: Any, closed: bool) -> None:
    sizes = (2048 + 3, 15, 3)
    expected = agree.window(ReferenceBackend(), torch.bfloat16, weights, closed=closed, sizes=sizes)
    actual = agree.window(TritonBackend(), torch.bfloat16, weights, closed=closed, sizes=sizes, device=DEVICE)
    assert_agree(actual, expected)


@each_dtype
def test_windows_of_every_dtype_agree(dtype: torch.dtype) -> None:
    sizes, weights = (5, 2 * 2048, 6), WINDOWS["empty device"]
    expected = agree.window(ReferenceBackend(), dtype, weights, closed=False, sizes=sizes)
    assert_agree(agree.window(TritonBackend(), dtype, weights, closed=False, sizes=sizes, device=DEVICE), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_of_zero_leaves_out_whatever_there_is(bad: float) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        params = [on_device(2048 + 3, device), on_device(3, device)]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=1.0)
        for seed, weight in enumerate((0.0, 0.0, 3.0, 0.0, 0.7)):
            grads = random_grads(params, seed)
            if weight == 0:
                grads[0][5] = grads[0][-1] = bad
            set_grads(params, [g.to(device) for g in grads])
            optimizer.accumulate(torch.tensor(weight, device=device))
        optimizer.step()
        assert optimizer.grad_norm.isfinite()
        return everything(optimizer)

    run_both(train)


def test_more_chunks_than_lanes_agree() -> None:
    partials = torch.rand(2500, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(2500).remainder(40)
    found = []
    for backend, device in ((ReferenceBackend(), "cpu"), (TritonBackend(), DEVICE)):
        param = torch.zeros(1, device=device)
        built = replace(plan.build([{"params": [param]}], {}, [RULES[0]], Settings()), chunks=len(partials))
        scaling = Scaling(built.device, normalization=0.3, takes_norm=True, max_grad_norm=0.7)
        found.append(backend.norm(built, None, partials.to(device), scaling).values.cpu())
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_gradient_is_read_exactly(dtype: torch.dtype) -> None:
    grad = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    param = torch.zeros(len(grad), device=DEVICE, requires_grad=True)
    optimizer = Case("", af.SGD, None, None, {"lr": 1.0}).make([param], TritonBackend())  # type: ignore[arg-type]
    set_grads([param], [grad.to(DEVICE)])
    optimizer.step()
    assert_same_bits(param.cpu(), torch.zeros(len(grad)) - grad.float())


@pytest.mark.skipif(DEVICE != "cpu", reason="its tensors are made on the CPU")
@pytest.mark.filterwarnings("ignore:two accumulation windows in a row were dropped")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=agree.problems())
def test_any_values_and_options_agree(problem: dict[str, Any]) -> None:
    problem["sizes"] = [min(size, 2048 + 1) for size in problem["sizes"]]
    expected, errors = agree.solve(problem, ReferenceBackend())
    actual, its_errors = agree.solve(problem, TritonBackend())
    assert its_errors == errors
    assert_agree(actual, expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="its tensors are made on the CPU")
@each_dtype
@pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
def test_subnormals_agree_in_either_float_mode(dtype: torch.dtype, flush: bool) -> None:
    case, size = case_named("adamw_amsgrad"), 2048 + 5
    expected = agree.subnormal_run(case, ReferenceBackend(), dtype, flush=False, size=size)
    assert_agree(agree.subnormal_run(case, TritonBackend(), dtype, flush=flush, size=size), expected)


def run_both(make: Callable[[Any, str], dict[str, Tensor]]) -> None:
    """Compares what `make(backend, device)` finds with the reference's, on the CPU."""
    actual = make(TritonBackend(), DEVICE)
    assert_agree({name: value.cpu() for name, value in actual.items()}, make(ReferenceBackend(), "cpu"))


def on_device(size: int, device: str, seed: int = 0) -> Tensor:
    return random_params([(size,)], seed)[0].detach().to(device).requires_grad_()


@every_rule
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_gradient_skips_the_step_and_is_counted(case: Case, bad: float) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = on_device(2048 + 2, device)
        optimizer = case.make([param], backend, max_grad_norm=1.0)
        for step in range(3):
            (grad,) = random_grads([param], step)
            if step == 1:
                before, grad[2048] = everything(optimizer), bad
            set_grads([param], [grad.to(device)])
            optimizer.step()
            if step == 1:
                assert_agree(everything(optimizer), before)
                assert int(optimizer.skipped_steps) == 1
        assert int(optimizer.skipped_steps) == 1
        return everything(optimizer)

    run_both(train)


@every_rule
def test_nonfinite_values_propagate_as_in_the_reference(case: Case) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = on_device(3000, device)
        optimizer = case.make([param], backend, max_grad_norm=None, nonfinite="propagate")
        for step in range(2):
            (grad,) = random_grads([param], step)
            grad[5], grad[6], grad[2999] = torch.nan, torch.inf, -torch.inf
            set_grads([param], [grad.to(device)])
            optimizer.step()
        return everything(optimizer)

    run_both(train)


@every_rule
@pytest.mark.parametrize(
    ("place", "place_grad"),
    [(test_layouts.misaligned, test_layouts.same), (test_layouts.same, test_layouts.misaligned)],
    ids=["parameter", "gradient"],
)
def test_misaligned_tensors_agree(case: Case, place: Any, place_grad: Any) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = place(on_device(2048 + 7, device).detach()).detach().requires_grad_()
        optimizer = case.make([param], backend, max_grad_norm=1.0)
        for step in range(2):
            param.grad = place_grad(random_grads([param], step)[0].to(device))
            optimizer.accumulate(2.0)
            param.grad = place_grad(random_grads([param], step + 2)[0].to(device))
            optimizer.accumulate(3.0)
            optimizer.step()
        return everything(optimizer)

    run_both(train)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_learning_rate_on_the_device_is_read_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor) -> float:
        raise AssertionError("read on the host")

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param, lr = on_device(100, device), torch.tensor(0.1, dtype=dtype, device=device)
        optimizer = ADAMW_CASE.make([param], backend)
        optimizer.param_groups[0]["lr"] = lr
        for step in range(3):
            set_grads([param], [random_grads([param], step)[0].to(device)])
            with monkeypatch.context() as patch:
                if backend.name == "triton":
                    patch.setattr(Tensor, "__float__", refuse)
                    patch.setattr(Tensor, "item", refuse)
                optimizer.step()
            lr.mul_(0.5)
        return everything(optimizer)

    run_both(train)


@every_rule
def test_parameters_without_a_gradient_are_left_alone(case: Case) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        params = [on_device(size, device, seed) for seed, size in enumerate((2050, 7, 0, 33, 4, 5, 6))]
        optimizer = case.make(params, backend, max_grad_norm=1.0)
        for step in range(3):
            grads: list[Tensor | None] = [g.to(device) for g in random_grads(params, step)]
            grads[step] = None
            before = params[step].detach().clone()
            set_grads(params, grads)
            optimizer.step()
            assert_same_bits(params[step].cpu(), before.cpu())
        return everything(optimizer)

    run_both(train)


@pytest.mark.parametrize(
    ("optimizer_class", "own"),
    [(af.AdamW, ({}, {"amsgrad": True}, {"lr": 0.5})), (af.SGD, ({"momentum": 0.5}, {}, {"lr": 0.7, "momentum": 0.9}))],
)
def test_groups_with_different_rules_and_numbers_agree(optimizer_class: Any, own: Any) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        params = [on_device(size, device, seed) for seed, size in enumerate((40, 41, 42, 43, 44, 45))]
        groups = [{"params": params[2 * i : 2 * i + 2], **settings} for i, settings in enumerate(own)]
        optimizer = optimizer_class(groups, lr=0.1, weight_decay=0.2, max_grad_norm=1.0)
        optimizer._runtime.backend = backend
        for step in range(3):
            set_grads(params, [g.to(device) for g in random_grads(params, step)])
            optimizer.step()
        return everything(optimizer)

    run_both(train)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_coefficient_of_zero_has_a_sign(maximize: bool) -> None:
    options = {"lr": 0.3, "maximize": maximize}

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = torch.tensor([0.0, 0.0, -0.0, -0.0], device=device, requires_grad=True)
        optimizer = Case("", af.SGD, None, None, options).make([param], backend, max_grad_norm=1e-50)  # type: ignore[arg-type]
        set_grads([param], [torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)])
        optimizer.step()
        return everything(optimizer)

    run_both(train)


def test_tiny_norms_and_parameters_without_native_tables_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "unavailable", "tested without")

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        params = [on_device(size, device, seed) for seed, size in enumerate((40, 2048))]
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=1e-22)
        norms = []
        for step in range(3):
            set_grads(params, [(g * 1e-22).to(device) for g in random_grads(params, step)])
            optimizer.step()
            norms.append(optimizer.grad_norm)
        assert 0 < norms[0] < 2.0**-60  # of a subnormal sum of squares
        return everything(optimizer) | {"norms": torch.stack(norms)}

    run_both(train)


def test_the_package_does_not_import_triton() -> None:
    code = "import sys, accumfused; sys.exit('triton' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
