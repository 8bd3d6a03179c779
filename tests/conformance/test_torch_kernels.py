"""The backend of torch's own kernels: the reference's numbers in every format, though not its bits.

It runs in two ways: reading values, as on a CPU, and without reading any, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_close, assert_same_bits, everything
from device import Kernels, NoReads
from layouts import UNUSUAL, edges
from problems import AXES, GRADS, LOOPS, TAILS, Problem, Tail, expected, play, problems
from reference import ReferenceBackend
from table import (  # fmt: skip
    ADAMW_CASE,
    CASES,
    EACH_RULE,
    STATES,
    WEIGHTS,
    Case,
    case_named,
    kept,
    one_of_each,
    random_grads,
    random_params,
    set_grads,
)
from torch import Tensor

from accumfused.backends import TorchBackend, torch_kernels, torch_step
from accumfused.backends.several import SeveralDevices
from accumfused.formats import codecs
from accumfused.formats.convert import full_precision
from accumfused.formats.numeric import CHUNK
from accumfused.optimizers.lion import LionRule


class ReadsNothing(TorchBackend):
    """Its verbs are refused to read a tensor's value."""

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in ("accumulate", "norm", "step"):
            return attribute

        def call(*args: Any) -> Any:
            with NoReads():
                return attribute(*args)

        return call


@pytest.fixture(params=[True, False], ids=["reads", "does not read"], autouse=True)
def torchs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    """The backend."""
    if request.param:
        return TorchBackend()

    monkeypatch.setattr(torch_kernels, "_can_read", lambda plan: False)
    monkeypatch.setattr(torch_kernels, "ieee", contextlib.nullcontext)  # which asks for the CPU's float mode
    return ReadsNothing()


def values_of(problem: Problem, found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What parameters and states stand for, in fp32, and what else there is but outcomes."""
    second_moments = case_named(problem.case).second_moments
    for name, value in found.items():
        what, _, index = name.rpartition(" ")
        scale = found.get(f"{what}_scale {index}")
        if scale is not None:
            yield name, codecs.decode(value, scale, second_moment=what in second_moments)
        elif what == "param":
            entries = {
                key: found[f"{key} {index}"] for key in ("master", "master_remainder") if f"{key} {index}" in found
            }
            yield name, full_precision(value, entries)
        elif not what.startswith(("outcome", "master")) and not what.endswith("_scale"):
            yield name, value.float()


def assert_numbers(problem: Problem, backend: Any) -> None:
    """The reference's, within a few roundings of fp32; the same noise rounds both to fewer bits."""
    found, wanted = (dict(values_of(problem, each[0])) for each in (play(problem, backend), expected(problem)))
    assert found.keys() == wanted.keys()
    parts = {"fp32": 0, "bf16": 128, "8bit": 16}[problem.states] or (0 if problem.weights == "fp32" else 128)
    for name, value in wanted.items():
        finite = value.isfinite()
        assert torch.equal(found[name].isfinite(), finite), name
        actual, value = found[name][finite], value[finite]
        if not parts:
            assert_close(actual, value, "torch.optim", name)
        elif value.numel():
            # One code in 8 bits, or one unit of 16 of a sum in which terms cancel, where a rounding of fp32 decides.
            torch.testing.assert_close(actual, value, rtol=2.0**-6, atol=float(value.abs().max()) / parts, msg=name)
            few = (actual - value).abs().gt(1e-4 * value.abs() + 1e-6).float().mean()
            assert value.numel() <= 100 or few < 0.01, name


KERNELS = [case for case in CASES if case.rule in (*torch_step.FUSED, "lion")]
EACH_KERNEL = one_of_each(lambda case: case.rule, KERNELS)
# For all rules that run by their own arithmetic: one has most states, one has numbers of its group on the device.
COMPOSED = [case_named("adan_no_prox"), case_named("sgd_schedule_free")]
# torch's AMSGrad loses a NaN in its maximum.
FINITE = [tail for tail in TAILS.values() if tail.nonfinite != "propagate"]
NUMBERS = {name: AXES[name] for name in ("loop", "case", "lr", "tensors", "groups")} | {"grads": GRADS, "tail": FINITE}
SIZES = [edges(0, 1, 129, 1000, 2 * CHUNK + 130)]
FORMATS = {"case": AXES["case"], "weights": [*WEIGHTS], "states": [*STATES]}
FORMATS |= {"loop": [LOOPS["steps"], LOOPS["sum"]], "edges": SIZES, "grads": [torch.bfloat16, torch.float32]}


def in_either_way(every: list[Problem]) -> pytest.MarkDecorator:
    """Reading or not, in turn but not in step with any axis; with --full in both ways."""
    rows = [
        pytest.param(
            problem, reads, marks=[] if reads == number.bit_count() % 2 else pytest.mark.full, id=f"{problem}-{way}"
        )
        for number, problem in enumerate(every)
        for reads, way in ((True, "reads"), (False, "does not read"))
    ]
    return pytest.mark.parametrize(("problem", "torchs"), rows, indirect=["torchs"])


@in_either_way(problems(NUMBERS, CASES))
def test_windows_layouts_and_tails(problem: Problem, torchs: TorchBackend) -> None:
    reads_lr = problem.lr is not None  # for a rule of which torch has no kernel
    assert_numbers(problem, TorchBackend() if reads_lr else torchs)


@in_either_way(problems(FORMATS, CASES))
def test_formats(problem: Problem, torchs: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_CACHED", 4 * CHUNK)  # a fourth of it for these
    assert_numbers(problem, torchs)


@pytest.mark.pairwise(case=[*EACH_KERNEL, *COMPOSED], piece=[CHUNK, 4 * CHUNK], limit=[0.5, 1e9])
def test_tensors_in_pieces(
    case: Case, piece: int, limit: float, torchs: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "_CACHED", piece)
    monkeypatch.setattr(torch_kernels, "_LARGE", piece)
    sizes = edges(0, 1, 700, 40, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
    assert_numbers(Problem(case.name, loop=LOOPS["steps"], tail=Tail(limit), edges=sizes), torchs)


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_a_rule_without_kernels_runs_by_its_own_arithmetic(
    case: Case, torchs: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = torch_step.__dict__["_composed"](LionRule)
    monkeypatch.setattr(torch_step, "FUSED", {})
    monkeypatch.setattr(torch_step, "_lion", composed)
    assert_numbers(Problem(case.name), torchs)


@pytest.mark.pairwise(case=[*EACH_KERNEL, *COMPOSED], weights=[*WEIGHTS], states=[*STATES])
def test_steps_leave_the_gradients_alone_and_what_is_skipped_every_bit(
    case: Case, weights: str, states: str, torchs: TorchBackend
) -> None:
    dtype, options = WEIGHTS[weights]
    params = [p.detach().to(dtype).requires_grad_() for p in random_params([(0,), (1,), (129,), (1000,)])]
    known = {"max_grad_norm": 0.5, "rounding_seed": 17, "state_dtype_min_numel": 2}
    optimizer = case.make(params, torchs, state_dtype=STATES[kept(states, case)], **known, **options)
    for seed, bad in enumerate((0.0, float("inf"), float("nan"))):
        grads = random_grads(params, seed)
        grads[2][5] = bad
        set_grads(params, grads)
        before = everything(optimizer)
        optimizer.step()
        assert bool(optimizer.step_was_skipped) == (seed > 0)
        if seed > 0:
            assert_all_same_bits(everything(optimizer), before)
        for param, grad in zip(params, grads, strict=True):
            assert_same_bits(param.grad, grad)


@pytest.mark.parametrize("case", EACH_RULE, ids=lambda case: case.name)
def test_what_is_not_finite_propagates(case: Case, torchs: TorchBackend) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = case.make([param], torchs, nonfinite="propagate")
    param.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert param.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("case", EACH_KERNEL, ids=lambda case: case.name)
def test_a_device_without_fused_kernels_is_served(
    case: Case, torchs: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_step, "_HAVE_FUSED", ())
    monkeypatch.setattr(torch_kernels, "_can_read", lambda plan: False)
    with Kernels() as found:
        assert_numbers(Problem(case.name, loop=LOOPS["sum"]), torchs)
    assert [name for name in found.seen if "_fused_" in name] == []


UNREADABLE = {
    **UNUSUAL,
    "negated": lambda: inside.negated(torch.ones(3)),
    "strided": lambda: torch.ones(3, 2)[:, 0],
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("loop", ["steps", "windows"])
def test_gradients_that_kernels_cannot_read_in_place_are_served(kind: str, loop: str) -> None:
    found = []
    for backend in (TorchBackend(), ReferenceBackend()):
        (param,) = random_params([(3,)])
        optimizer = ADAMW_CASE.make([param], backend)
        for seed in range(4):
            param.grad = UNREADABLE[kind]()
            if loop == "windows":
                optimizer.accumulate()
            if loop == "steps" or seed % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(param.detach())
    assert_close(found[0], found[1], "torch.optim")


@pytest.mark.parametrize("sums", [None, torch.bfloat16])
def test_a_folds_factor_travels_in_its_launches_where_the_host_knows_it(
    sums: torch.dtype | None, torchs: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "_add_on_device", None)
    params = [param.detach().bfloat16().requires_grad_() for param in random_params([(4,), (5,), (6,)])]
    optimizer = ADAMW_CASE.make([{"params": [param]} for param in params], torchs, sum_dtype=sums)
    for seed, weight in enumerate((2.0, 2.0, 3.0)):
        grads = random_grads(params, seed, torch.bfloat16)  # referred to, so the first are copied
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.accumulate(weight, last=seed == 2)


def test_memory_that_is_gone_is_refused(torchs: TorchBackend) -> None:
    (param,) = random_params([(5,)])
    optimizer = ADAMW_CASE.make([param], torchs)
    param.grad = torch.ones(5)
    optimizer.step()
    param.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory to update"):
        optimizer.step()


def test_two_devices_give_the_numbers_of_one(devices_apart: Any, torchs: TorchBackend) -> None:
    two = SeveralDevices(dict.fromkeys(devices_apart, torchs))
    for loop in (LOOPS["steps"], LOOPS["closed mean"]):
        assert_numbers(Problem("adamw", loop=loop), two)
    optimizer = ADAMW_CASE.make(random_params([(3,), (4,)]), two)
    set_grads(optimizer.param_groups[0]["params"], [torch.ones(3), torch.ones(4)])
    optimizer.step()
    # The plan's device leads, which is the norm's.
    assert [part.device for part in inside.plan(optimizer).parts] == [*reversed(devices_apart)]
