"""Every rule against its formula in float64 and against torch.optim, behind every kind of gradient tail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits, everything
from oracle import Oracle, window_mean
from table import (
    CASES,
    EACH_RULE,
    EACH_VARIANT,
    OPTIMIZERS,
    Case,
    random_grads,
    random_params,
    set_grads,
)
from torch import Tensor

import accumfused as af
from accumfused.optimizers import RULES

SHAPES = ((3,), (17, 5), (), (0, 4), (1040,))
STEPS = 4
SMALLEST_NORMAL = 2.0**-126
HAVE_MOMENTS = [case for case in CASES if case.states and "initial_accumulator_value" not in case.options]
CORRECT_BIAS = [case for case in EACH_VARIANT if "exp_avg_sq" in case.states]


def assert_like_oracle(optimizer: af.FusedOptimizer, params: list[Tensor], truth: Oracle) -> None:
    for index, (param, expected, states) in enumerate(zip(params, truth.params, truth.states, strict=True)):
        assert_close(param, expected, "fp64 oracle", f"parameter {index}")
        assert set(optimizer.state[param]) == set(states)
        for name, value in states.items():
            assert_close(optimizer.state[param][name], torch.as_tensor(value), "fp64 oracle", f"{name} {index}")
    for name, value in truth.sums.items():
        assert_close(optimizer.param_groups[0][name], torch.as_tensor(value), "fp64 oracle", name)


@pytest.mark.pairwise(
    case=CASES, max_grad_norm=(None, 0.7, 1e6), normalizer=(None, 0.37, "3.7"), grad_scale=(None, 8.0),
    weights=((), (None, None, None), (5.0, 0.5, 2.0), (7.0,)), closed=(False, True),
)  # fmt: skip
def test_equals_the_formula_in_float64(
    case: Case, max_grad_norm: float | None, normalizer: float | str | None, grad_scale: float | None,
    weights: tuple[float | None, ...], closed: bool, backend: str,
) -> None:  # fmt: skip
    """Behind every kind of tail: steps from p.grad, sums and means of windows, divisors of the host and the device."""
    params = random_params(SHAPES)
    truth = Oracle(case.of.oracle, case.options, params, max_grad_norm)
    optimizer = case.make(params, backend, max_grad_norm=max_grad_norm)
    if grad_scale is not None:
        optimizer.grad_scale = torch.tensor(grad_scale)
    for seed in range(STEPS):
        micro_batches: list[list[Any]] = [random_grads(params, 100 * seed + k) for k in range(len(weights) or 1)]
        for grads in micro_batches[1:]:  # with the first one's signs: of a mean that cancels fp32 keeps few digits
            grads[:] = map(torch.copysign, grads, micro_batches[0])
        for k, (grads, weight) in enumerate(zip(micro_batches, weights or (None,), strict=True)):
            if seed == 2:
                grads[1] = None  # an unused parameter: left alone, and a step behind from here on
            set_grads(params, grads)
            if weights:
                optimizer.accumulate(weight, last=closed and k == len(weights) - 1)
        divisor = torch.tensor(float(normalizer)) if isinstance(normalizer, str) else normalizer
        optimizer.step(normalizer=divisor)
        optimizer.zero_grad()
        used = [[g for g in grads if g is not None] for grads in micro_batches]
        means: list[Tensor | None] = [*window_mean(used, weights if weights and weights[0] else None)]  # type: ignore[arg-type]
        if seed == 2:
            means.insert(1, None)
        truth.step(means, float(normalizer or 1.0) * (grad_scale or 1.0))
        if max_grad_norm is not None:
            assert_close(optimizer.grad_norm, truth.norm, "norm", "grad_norm")
    assert_like_oracle(optimizer, params, truth)


@pytest.mark.pairwise(case=EACH_VARIANT, bad=((torch.inf, (0,)), (torch.nan, (2,)), (-torch.inf, (0, 1))))
def test_a_skipped_step_changes_nothing(case: Case, bad: tuple[float, tuple[int, ...]], backend: str) -> None:
    """Steps with one bad element change no bit; the others go on as if those had never been."""
    value, bad_steps = bad
    params = random_params(SHAPES)
    truth = Oracle(case.of.oracle, case.options, params, max_grad_norm=0.7)
    optimizer = case.make(params, backend, max_grad_norm=0.7)
    for seed in range(STEPS):
        grads = random_grads(params, seed)
        if seed in bad_steps:
            grads[4][777] = value
        set_grads(params, grads)
        before = everything(optimizer)
        optimizer.step()
        truth.step(grads)
        assert bool(optimizer.step_was_skipped) == (seed in bad_steps)
        if seed in bad_steps:
            for name, found in everything(optimizer).items():
                first = torch.full_like(found, case.start(name.split()[0]))
                assert_same_bits(found, before.get(name, first), name)
    assert int(optimizer.skipped_steps) == len(bad_steps)
    assert_like_oracle(optimizer, params, truth)


@pytest.mark.parametrize("case", HAVE_MOMENTS, ids=lambda case: case.name)
def test_a_new_state_below_the_smallest_normal_number_is_stored_as_zero(case: Case, backend: str) -> None:
    params = [torch.zeros(2000, requires_grad=True)]
    sizes = torch.tensor([SMALLEST_NORMAL, SMALLEST_NORMAL**0.5])  # for gradients and for their squares
    grads = [(torch.linspace(-8.0, 8.0, 1000) * sizes[:, None]).flatten()]
    truth = Oracle(case.of.oracle, case.options, params)
    optimizer = case.make(params, backend)
    set_grads(params, grads)
    optimizer.step()
    truth.step(grads)
    kept = lost = 0
    for name in case.states:
        expected = truth.states[0][name]
        state = optimizer.state[params[0]][name].double()
        rounding = SMALLEST_NORMAL * 2.0**-22  # which side of the limit a number falls on may depend on it
        below = expected.abs() < SMALLEST_NORMAL - rounding
        above = expected.abs() > SMALLEST_NORMAL + rounding
        assert (state[below] == 0).all()
        torch.testing.assert_close(state[above], expected[above], rtol=1e-6, atol=rounding)
        kept, lost = kept + int(above.sum()), lost + int(below.sum())
    assert kept > 100
    assert lost > 100


@pytest.mark.pairwise(case=CORRECT_BIAS, step=(2, 3, 1000, 142_860, 2**24))
def test_bias_correction_at_any_step_count(case: Case, step: int, backend: str) -> None:
    """With betas for which it matters there."""
    options = {**case.options, "betas": (0.999, 0.9999999, 0.99999)[: len(case.options["betas"])]}
    params = random_params(SHAPES)
    truth = Oracle(case.of.oracle, options, params)
    optimizer = replace(case, options=options).make(params, backend)
    for seed in range(2):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.step()
        truth.step(grads)
        if seed == 0:
            for param, state in zip(params, truth.states, strict=True):
                optimizer.state[param]["step"].fill_(step - 1)
                state["step"] = step - 1.0
    assert_like_oracle(optimizer, params, truth)


@pytest.mark.parametrize("case", EACH_VARIANT, ids=lambda case: case.name)
def test_propagate_writes_what_a_nan_makes_of_it(case: Case, backend: str) -> None:
    params = random_params([(5,), (5,)])
    optimizer = case.make(params, backend, nonfinite="propagate")
    truth = Oracle(case.of.oracle, case.options, params)
    grads = random_grads(params, 0)
    truth.step(grads)
    grads[0][3] = torch.nan
    set_grads(params, grads)
    optimizer.step()
    assert params[0][3].isnan()
    assert_close(params[1], truth.params[1], "fp64 oracle")
    for name, value in truth.states[1].items():
        assert_close(optimizer.state[params[1]][name], torch.as_tensor(value), "fp64 oracle", name)
    optimizer = case.make(params, backend, nonfinite="propagate", max_grad_norm=1.0)
    optimizer.step()
    assert all(param.isnan().all() for param in params), "clipping by a NaN norm reaches every parameter, as in torch"


@pytest.mark.parametrize("masters", [None, "split16"])
def test_momentum_that_begins_later_takes_its_first_gradient_whole(backend: str, masters: Any) -> None:
    """Also where steps were counted before, for the noise that rounds."""
    param = torch.ones(3, dtype=torch.bfloat16).requires_grad_()
    optimizer = af.SGD([param], 0.25, dampening=0.5, master_weights=masters, backend=backend)
    for momentum in (0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        param.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0] * 3


def test_every_optimizer_of_the_package_and_every_rule_is_in_the_table() -> None:
    public = [getattr(af, name) for name in af.__all__]
    optimizers = {value for value in public if isinstance(value, type) and issubclass(value, af.FusedOptimizer)}
    optimizers -= {af.FusedOptimizer, af.Muon}  # Muon takes matrices only: test_muon_numbers.py
    assert optimizers == {case.of.ours for case in CASES} == {o.ours for o in OPTIMIZERS.values()}
    assert {case.rule for case in EACH_RULE} == {rule.name for rule in RULES} - {"muon", "muon_orthogonal"}
