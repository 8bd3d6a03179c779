"""The backend of torch's own kernels: the formulas' numbers and the reference's formats, though not its bits.

Each comparison runs twice: reading values, as on a CPU, and without reading any, as on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import inside
import pytest
import torch
from compare import assert_close, assert_same_bits, everything
from oracle import Oracle, global_norm, window_mean
from problems import AXES, GRADS, TAILS, Problem, expected, play, problems
from reads import NoReads
from table import (  # fmt: skip
    ADAMW_CASE,
    CASES,
    EACH_RULE,
    STATES,
    WEIGHTS,
    Case,
    case_named,
    every_case,
    kept,
    random_grads,
    random_params,
    set_grads,
)
from torch import Tensor

import accumfused as af
from accumfused.backends import ForeachBackend, foreach, foreach_step, several
from accumfused.backends.reference import ReferenceBackend
from accumfused.backends.several import SeveralDevices
from accumfused.formats import codecs
from accumfused.formats.convert import full_precision
from accumfused.formats.kinds import scale_name
from accumfused.formats.numeric import CHUNK, memory_order


@pytest.fixture(params=[True, False], ids=["reads", "does not read"], autouse=True)
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(foreach, "_can_read", lambda plan: False)
    return bool(request.param)


def compare_with_oracle(case: Case, weights: tuple[float | None, ...], max_grad_norm: float | None) -> None:
    params = random_params([(3,), (17, 5), (), (0, 4), (1040,)])
    truth = Oracle(case.of.oracle, case.options, params, max_grad_norm)
    optimizer = case.make(params, "foreach", max_grad_norm=max_grad_norm)
    for update in range(3):
        micro_batches = [random_grads(params, 10 * update + k) for k in range(len(weights) or 1)]
        for grads, weight in zip(micro_batches, weights or (None,), strict=True):
            set_grads(params, grads)
            if weights:
                optimizer.accumulate(weight)
        optimizer.step(normalizer=0.3)
        optimizer.zero_grad()
        truth.step(window_mean(micro_batches, weights or None), 0.3)  # type: ignore[arg-type]
    for param, wanted, states in zip(params, truth.params, truth.states, strict=True):
        assert_close(param, wanted, "fp64 oracle", "parameter")
        for name, value in states.items():
            assert_close(optimizer.state[param][name], torch.as_tensor(value), "fp64 oracle", name)


@every_case
@pytest.mark.parametrize("tail", [((), None), ((), 0.7), ((5.0, 0.5, 2.0), 0.7), ((5.0, 0.5, 2.0), 1e6)], ids=str)
def test_every_rule_gives_its_formulas_numbers(case: Case, tail: Any) -> None:
    compare_with_oracle(case, *tail)


def test_a_rule_without_kernels_runs_by_its_own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    composed = foreach_step.__dict__["_composed"](af.Lion.rules[0])
    monkeypatch.setattr(foreach_step, "FUSED", {})
    monkeypatch.setattr(foreach_step, "_lion", lambda *args: calls.append(composed(*args)))
    for case in CASES:
        compare_with_oracle(case, (), 0.7)
    assert calls


NUMBERS = {name: AXES[name] for name in ("loop", "case", "lr", "tensors", "groups")} | {"grads": GRADS}
# torch's AMSGrad loses a NaN in its maximum.
NUMBERS["tail"] = [tail for tail in TAILS.values() if tail.nonfinite != "propagate"]


@pytest.mark.parametrize("problem", problems(NUMBERS | {"states": ["fp32"]}), ids=str)
def test_windows_layouts_and_tails_give_the_references_numbers(problem: Problem) -> None:
    (found, _), (wanted, _) = play(problem, ForeachBackend()), expected(problem)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.startswith("outcome"):
            finite = value.isfinite()
            assert torch.equal(found[name].isfinite(), finite), name
            assert_close(found[name][finite], value[finite], "torch.optim", name)


@pytest.mark.pairwise(case=CASES, piece=[CHUNK, 4 * CHUNK], limit=[0.5, 1e9])
def test_tensors_in_pieces(case: Case, piece: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "_CACHED", piece)
    monkeypatch.setattr(foreach, "_LARGE", piece)
    params, others = (
        random_params([(size,) for size in (0, 1, 700, 40, CHUNK, CHUNK + 1, 2 * CHUNK + 5)]) for _ in range(2)
    )
    optimizer = case.make(params, "foreach", max_grad_norm=limit)
    reference = case.make(others, ReferenceBackend(), max_grad_norm=limit)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        grads = random_grads(params, seed, dtype)
        set_grads(params, grads)
        set_grads(others, grads)
        optimizer.step()
        reference.step()
        assert_close(optimizer.grad_norm, global_norm(grads), "norm")
        for param, grad in zip(params, grads, strict=True):
            assert_same_bits(param.grad, grad, "p.grad")
        optimizer.zero_grad()
        reference.zero_grad()
    expected = everything(reference)
    for name, value in everything(optimizer).items():
        assert_close(value, expected[name], "torch.optim", name)


# ---- formats --------------------------------------------------------------------------------------------------------


def make(case: Case, backend: Any, weights: str, states: str, sizes: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
    dtype, options = WEIGHTS[weights]
    params = [p.detach().to(dtype).requires_grad_() for p in random_params([(size,) for size in sizes])]
    known = {
        "max_grad_norm": 0.5,
        "rounding_seed": 17,
        "state_dtype_min_numel": 2,
        "state_dtype": STATES[kept(states, case.options)],
    }
    return case.make(params, backend, **known, **options), params


def decoded(optimizer: af.FusedOptimizer) -> list[Tensor]:
    """What parameters and states stand for, in fp32."""
    found = []
    for param, entries in optimizer.state.items():
        found.append(full_precision(param, entries))
        for name in optimizer.rule_of(optimizer.param_groups[0]).states:
            value, scale = entries[name], entries.get(scale_name(name))
            is_second = name in optimizer.rule_of(optimizer.param_groups[0]).second_moments
            if scale is not None:
                value = codecs.decode(memory_order(value), scale.view(-1), second_moment=is_second)
            found.append(value.float())
    return found


@pytest.mark.pairwise(case=EACH_RULE, weights=[*WEIGHTS], states=[*STATES])
def test_formats_are_the_references(case: Case, weights: str, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise rounds them: all but the few that lie where a rounding of fp32 decides are equal."""
    monkeypatch.setattr(foreach, "_CACHED", 4 * CHUNK)  # a fourth of it for these
    sizes, results = (0, 1, 129, 1000, 2 * CHUNK + 130), []
    for backend in ("foreach", ReferenceBackend()):
        optimizer, params = make(case, backend, weights, states, sizes)
        for seed in range(2):
            set_grads(params, random_grads(params, seed, torch.bfloat16))
            optimizer.step()
        optimizer.zero_grad()
        results.append((decoded(optimizer), everything(optimizer)))
    (found, stored), (expected, reference) = results
    assert {name: value.dtype for name, value in stored.items()} == {n: v.dtype for n, v in reference.items()}
    for actual, wanted in zip(found, expected, strict=True):
        # One code in 8 bits; one unit of bf16, of a sum in which terms cancel.
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(actual, wanted, rtol=2.0**-6, atol=scale / (16 if states == "int8" else 128))
        if wanted.numel() > 100:
            assert (actual - wanted).abs().gt(1e-4 * wanted.abs() + 1e-6).float().mean() < 0.01


@pytest.mark.pairwise(case=EACH_RULE, weights=[*WEIGHTS], states=[*STATES])
def test_a_skipped_step_writes_nothing_in_any_format(case: Case, weights: str, states: str) -> None:
    optimizer, params = make(case, "foreach", weights, states, (0, 1, 129, 1000))
    for seed, bad in enumerate((None, float("inf"), float("nan"))):
        grads = random_grads(params, seed)
        if bad is not None:
            grads[2][5] = bad
        set_grads(params, grads)
        before = everything(optimizer)
        optimizer.step()
        assert bool(optimizer.step_was_skipped) == (bad is not None)
        for name, value in everything(optimizer).items():
            if bad is not None:
                assert_same_bits(value, before[name], name)
        if bad is None:
            assert any(not torch.equal(everything(optimizer)[name], value) for name, value in before.items())


# ---- values that are not finite, and what is not read ---------------------------------------------------------------


def test_a_weight_of_zero_leaves_out_what_is_not_finite() -> None:
    for weights in ((0.0, 2.0), (2.0, 0.0)):
        param = torch.zeros(3, requires_grad=True)
        optimizer = af.SGD([param], lr=1.0, max_grad_norm=1e9, backend="foreach")
        for weight in weights:
            param.grad = torch.full((3,), float("nan") if weight == 0 else 3.0)
            optimizer.accumulate(torch.tensor(weight))
        optimizer.step()
        assert param.tolist() == [-3.0] * 3


@every_case
def test_what_is_not_finite_propagates(case: Case) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = case.make([param], "foreach", nonfinite="propagate")
    param.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert param.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["sgd_dampening", "sgd_nesterov", "adamw_amsgrad", "lion_weight_decay"])
def test_nothing_is_read_where_that_would_wait(name: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if reads:
        pytest.skip("a CPU's values are read")

    monkeypatch.setattr(foreach, "ieee", contextlib.nullcontext)  # which asks for the CPU's float mode
    params = random_params([(5,), (0,), (CHUNK + 3,)])
    optimizer = case_named(name).make(params, "foreach", max_grad_norm=1.0)
    for seed in range(2):
        set_grads(params, random_grads(params, seed))
        if seed == 0:  # makes the states
            optimizer.step()
            continue
        with NoReads():
            optimizer.accumulate(torch.tensor(2.0))
            set_grads(params, random_grads(params, seed))
            optimizer.accumulate(torch.tensor(0.0))
            optimizer.step()


def test_the_plan_is_kept_while_nothing_moves() -> None:
    params = random_params([(5,), (CHUNK + 3,)])
    optimizer = ADAMW_CASE.make(params, "foreach", max_grad_norm=1.0)
    plans = []
    for seed in range(4):
        set_grads(params, random_grads(params, seed))
        optimizer.step()
        plans.append(inside.plan(optimizer))
    assert plans[0] is plans[1] is plans[2] is plans[3]


def test_memory_that_is_gone_is_refused() -> None:
    param = torch.randn(7, requires_grad=True)
    optimizer = ADAMW_CASE.make([param], "foreach")
    for _ in range(2):
        param.grad = torch.ones(7)
        optimizer.step()
    param.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory to update"):
        optimizer.step()


def test_two_devices_give_the_numbers_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the CPU, told apart by hand."""
    monkeypatch.setattr(several, "_rows", lambda part: [(i % 2 == 1) == bool(part.device.index) for i in range(4)])
    monkeypatch.setattr(several, "_to", lambda tensor, device: tensor.clone() if device.index else tensor)
    two = SeveralDevices({torch.device("cpu", 1): ForeachBackend(), torch.device("cpu"): ForeachBackend()})
    results = []
    for backend in (two, ReferenceBackend()):
        params = random_params([(5,), (CHUNK + 3,), (70,), (9,)])
        optimizer = ADAMW_CASE.make(params, backend, max_grad_norm=0.5)
        for seed in range(6):
            set_grads(params, random_grads(params, seed))
            if seed > 2:
                optimizer.accumulate(1.0 + seed)
            if seed in (0, 1, 2, 5):
                optimizer.step()
                optimizer.zero_grad()
        results.append(everything(optimizer) | {"norm": optimizer.grad_norm})
    for name, value in results[1].items():
        assert_close(results[0][name], value, "torch.optim", name)


def test_a_parameter_may_move_to_the_next_group() -> None:
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = af.SGD([{"params": [first, second], "lr": 1.0}, {"params": [], "lr": 10.0}], backend="foreach")
    for wanted in (-1.0, -11.0):
        set_grads([first, second], [torch.ones(2)] * 2)
        optimizer.step()
        assert second.tolist() == [wanted] * 2
        optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [first], [second]
