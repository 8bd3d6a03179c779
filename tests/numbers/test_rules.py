"""Every rule against its formula in float64 and against torch.optim, behind every kind of gradient tail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits, everything
from oracle import Oracle, window_mean
from table import CASES, EACH_RULE, OPTIMIZERS, Case, case_named, every_case, random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af
from accumfused.optimizers import RULES

SHAPES = ((3,), (17, 5), (), (0, 4), (1040,))
STEPS = 4
SMALLEST_NORMAL = 2.0**-126
HAVE_MOMENTS = [case for case in CASES if case.states]
CORRECT_BIAS = [case for case in CASES if "exp_avg_sq" in case.states]


@dataclass(frozen=True)
class Tail:
    """What happens between backward() and the rule."""

    name: str
    max_grad_norm: float | None = None
    normalizer: float | Tensor | None = None
    grad_scale: float | None = None
    weights: tuple[float | None, ...] = ()  # of a window's micro-batches
    closed: bool = False  # by last=True, not by step()

    @property
    def normalization(self) -> float:
        return float(1.0 if self.normalizer is None else self.normalizer) * (self.grad_scale or 1.0)


TAILS = (
    Tail("plain"),
    Tail("clipped", max_grad_norm=0.7),
    Tail("below_the_limit", max_grad_norm=1e6),
    Tail("normalizer", normalizer=0.37),
    Tail("device_normalizer", normalizer=torch.tensor(3.7), max_grad_norm=2.0),
    Tail("grad_scale", grad_scale=8.0),
    Tail("all_divisors", max_grad_norm=0.7, normalizer=0.3, grad_scale=4.0),
    Tail("sum", weights=(None, None, None)),
    Tail("mean", weights=(5.0, 0.5, 2.0)),
    Tail("mean_of_one", weights=(7.0,)),
    Tail("mean_clipped", weights=(5.0, 0.5, 2.0), max_grad_norm=0.7, normalizer=0.3, grad_scale=4.0),
    Tail("closed_mean_clipped", weights=(5.0, 0.5, 2.0), max_grad_norm=0.7, normalizer=0.3, closed=True),
)


def run_tail(optimizer: af.FusedOptimizer, params: list[Tensor], tail: Tail, seed: int) -> list[Tensor | None]:
    """One update through the tail. Returns the gradients that the rule should have seen, before normalization."""
    if tail.grad_scale is not None:
        optimizer.grad_scale = torch.tensor(tail.grad_scale)
    if not tail.weights:
        grads: list[Tensor | None] = [*random_grads(params, seed)]
        if seed == 2:
            grads[1] = None  # an unused parameter: left alone, and a step behind from here on
        set_grads(params, grads)
        optimizer.step(normalizer=tail.normalizer)
        optimizer.zero_grad()
        return grads
    micro_batches = [random_grads(params, 100 * seed + k) for k in range(len(tail.weights))]
    for k, (grads, weight) in enumerate(zip(micro_batches, tail.weights, strict=True)):
        set_grads(params, grads)
        optimizer.accumulate(weight, last=tail.closed and k == len(tail.weights) - 1)
    optimizer.step(normalizer=tail.normalizer)
    return [*window_mean(micro_batches, None if tail.weights[0] is None else tail.weights)]


def assert_like_oracle(optimizer: af.FusedOptimizer, params: list[Tensor], truth: Oracle) -> None:
    for index, (param, expected, states) in enumerate(zip(params, truth.params, truth.states, strict=True)):
        assert_close(param, expected, "fp64 oracle", f"parameter {index}")
        assert set(optimizer.state[param]) == set(states)
        for name, value in states.items():
            assert_close(optimizer.state[param][name], torch.as_tensor(value), "fp64 oracle", f"{name} {index}")


@pytest.mark.pairwise(case=CASES, tail=TAILS)
def test_equals_the_formula_in_float64(case: Case, tail: Tail, backend: str) -> None:
    params = random_params(SHAPES)
    truth = Oracle(case.of.oracle, case.options, params, tail.max_grad_norm)
    optimizer = case.make(params, backend, max_grad_norm=tail.max_grad_norm)
    for seed in range(STEPS):
        truth.step(run_tail(optimizer, params, tail, seed), tail.normalization)
        if tail.max_grad_norm is not None:
            assert_close(optimizer.grad_norm, truth.norm, "norm", "grad_norm")
    assert_like_oracle(optimizer, params, truth)


@pytest.mark.pairwise(case=[case for case in CASES if case.of.torch_class is not None], max_grad_norm=(None, 0.7, 1e6))
def test_equals_torch_optim(case: Case, max_grad_norm: float | None, backend: str) -> None:
    params, theirs = random_params(SHAPES), random_params(SHAPES)
    optimizer = case.make(params, backend, max_grad_norm=max_grad_norm)
    stock = case.of.torch_class(theirs, **case.options)
    for seed in range(STEPS):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(theirs, grads)
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm)
        optimizer.step()
        stock.step()
        if max_grad_norm is not None:
            assert_close(optimizer.grad_norm, norm, "torch.optim", "grad_norm")
    for index, (param, other) in enumerate(zip(params, theirs, strict=True)):
        assert_close(param, other, "torch.optim", f"parameter {index}")
        for name, value in stock.state[other].items():
            if value is not None:  # momentum_buffer of an SGD without momentum
                assert_close(optimizer.state[param][name], value, "torch.optim", f"{name} {index}")


@pytest.mark.pairwise(case=CASES, bad=((torch.inf, (0,)), (torch.nan, (2,)), (-torch.inf, (0, 1))))
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
                assert_same_bits(found, before.get(name, torch.zeros_like(found)), name)
    assert int(optimizer.skipped_steps) == len(bad_steps)
    assert_like_oracle(optimizer, params, truth)


@pytest.mark.parametrize("case", HAVE_MOMENTS, ids=lambda case: case.name)
def test_a_new_state_below_the_smallest_normal_number_is_stored_as_zero(case: Case, backend: str) -> None:
    params = [torch.zeros(1000, requires_grad=True)]
    grads = [torch.linspace(-8.0, 8.0, 1000) * SMALLEST_NORMAL]
    truth = Oracle(case.of.oracle, case.options, params)
    optimizer = case.make(params, backend)
    set_grads(params, grads)
    optimizer.step()
    truth.step(grads)
    kept = 0
    for name, expected in truth.states[0].items():
        if name == "step":
            continue
        state = optimizer.state[params[0]][name].double()
        rounding = SMALLEST_NORMAL * 2.0**-22  # which side of the limit a number falls on may depend on it
        below = expected.abs() < SMALLEST_NORMAL - rounding
        above = expected.abs() > SMALLEST_NORMAL + rounding
        assert (state[below] == 0).all()
        torch.testing.assert_close(state[above], expected[above], rtol=1e-6, atol=rounding)
        kept += int(above.sum())
        assert below.any()
    assert kept > 100


@pytest.mark.pairwise(case=CORRECT_BIAS, step=(2, 3, 1000, 142_860, 2**24))
def test_bias_correction_at_any_step_count(case: Case, step: int, backend: str) -> None:
    """With betas for which it matters there."""
    options = {**case.options, "betas": (0.999, 0.9999999)}
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


@every_case
def test_found_inf_skips_a_finite_step_and_the_next_one_is_the_first(case: Case, backend: str) -> None:
    params = random_params(SHAPES)
    optimizer = case.make(params, backend)
    truth = Oracle(case.of.oracle, case.options, params)
    before = everything(optimizer)
    set_grads(params, random_grads(params, 0))
    optimizer.found_inf = torch.tensor(2.0)  # a sum over devices
    optimizer.step()
    for name, value in everything(optimizer).items():
        assert_same_bits(value, before.get(name, torch.zeros_like(value)), name)
    assert bool(optimizer.step_was_skipped)
    del optimizer.found_inf
    optimizer.step()
    truth.step([p.grad for p in params])
    assert_like_oracle(optimizer, params, truth)


@every_case
def test_every_group_has_its_own_options_and_schedule(case: Case, backend: str) -> None:
    params = random_params(SHAPES)
    other = {**case.options, **case.of.other_options}
    truths = [Oracle(case.of.oracle, case.options, params[:2]), Oracle(case.of.oracle, other, params[2:])]
    optimizer = case.make([{"params": params[:2]}, {"params": params[2:], **other}], backend)
    for seed in range(STEPS):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.step()
        truths[0].step(grads[:2])
        truths[1].step(grads[2:])
        optimizer.param_groups[1]["lr"] *= 0.9  # what a scheduler does
        truths[1].options = {**truths[1].options, "lr": optimizer.param_groups[1]["lr"]}
    assert_like_oracle(optimizer, params[:2], truths[0])
    assert_like_oracle(optimizer, params[2:], truths[1])


@every_case
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


def test_a_coefficient_beyond_fp32_skips_the_step(backend: str) -> None:
    params = [torch.ones(3, requires_grad=True)]
    optimizer = case_named("sgd").make(params, backend, max_grad_norm=1.0)
    set_grads(params, [torch.full((3,), 1e-30)])  # the squares underflow: a norm of 0, finite
    optimizer.step(normalizer=1e-39)
    assert_same_bits(params[0], torch.ones(3))
    assert bool(optimizer.step_was_skipped)


@pytest.mark.parametrize("masters", ["split16", None])
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
    assert optimizers - {af.FusedOptimizer} == {case.of.ours for case in CASES} == {o.ours for o in OPTIMIZERS.values()}
    assert {case.rule for case in EACH_RULE} == {rule.name for rule in RULES}
