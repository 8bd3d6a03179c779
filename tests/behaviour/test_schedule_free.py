"""Schedule-Free optimizers: train() and eval() in every format, refusals between them, and checkpoints."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_same, assert_same_bits, params_of, refused, writes_nothing
from compare import train as train_all
from device import NoReads
from models import build, grads_of, states_of, through_a_file, train, whole
from table import WEIGHTS, random_params, set_grads
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.backends import torch_kernels
from accumfused.optimizers import schedule_free

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (af.SGDScheduleFree, {"momentum": 0.5}),
    "AdamW": (af.AdamWScheduleFree, {"betas": (0.5, 0.7), "weight_decay": 0.3, "warmup_steps": 2}),
    "inner": (af.AdamWScheduleFree, {"betas": (0.5, 0.7), "inner_momentum": 0.6}),
}
# Half a unit of what a parameter keeps of its value; 2^-22 for the roundings of the switch itself.
ROUNDING = {"bf16_stochastic": 2.0**-8, "split8": 2.0**-15}
SHAPES = [(5, 3), (), (7,)]


def made(kind: str = "SGD", weights: str = "fp32", states: str = "fp32", backend: str = "auto", **options: Any) -> Any:
    """An optimizer of all layouts, one with holes too."""
    cls, own = KINDS[kind]
    _, optimizer = build(weights, states, backend, cls, **{**own, **options})
    generator = torch.Generator().manual_seed(5)
    holes = torch.randn((6, 8), generator=generator).to(WEIGHTS[weights][0])[:, ::2]
    optimizer.add_param_group({"params": [Parameter(holes)]})
    return optimizer


def averaged(optimizer: Any) -> list[Tensor]:
    """x in float64, from y and z."""
    found, z, beta = whole(optimizer), states_of(optimizer), 0.5
    return [z[f"z {index}"] + (y.double() - z[f"z {index}"]) / beta for index, y in enumerate(found)]


# ---- train() and eval() ---------------------------------------------------------------------------------------------


@pytest.mark.pairwise(weights=tuple(WEIGHTS), states=("fp32", "bf16"), kind=tuple(KINDS))
def test_eval_puts_the_average_into_the_parameters_and_train_goes_back(
    weights: str, states: str, kind: str, backend: str
) -> None:
    optimizer = made(kind, weights, states, backend)
    train(optimizer, 4)
    gradients_at, expected = whole(optimizer), averaged(optimizer)
    rounding = ROUNDING.get(weights, 2.0**-22)
    optimizer.eval()
    for x, truth, y in zip(whole(optimizer), expected, gradients_at, strict=True):
        torch.testing.assert_close(x.double(), truth, rtol=rounding, atol=2.0**-22)
        assert x.shape == () or not torch.equal(x, y)
    with writes_nothing(optimizer):
        optimizer.eval()
    optimizer.train()
    for y, truth, x in zip(whole(optimizer), gradients_at, expected, strict=True):  # x was rounded, and now y
        assert ((y - truth).abs() <= rounding * (x.abs() + truth.abs()) + 2.0**-22).all()
    with writes_nothing(optimizer):
        optimizer.train()
    train(optimizer, 1, seed=9)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_without_a_step_both_leave_the_parameters(weights: str, backend: str) -> None:
    """Also where states were made: by a skipped step, or for masters that were loaded."""
    optimizer = made("AdamW", weights, "bf16", backend)
    expected = whole(optimizer)
    optimizer.eval()
    optimizer.train()
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert bool(optimizer.step_was_skipped)
    optimizer.eval()
    for found, value in zip(whole(optimizer), expected, strict=True):
        assert_same_bits(found, value, "after a skip")
    model = torch.nn.ParameterList(params_of(optimizer))
    exact = [value + 2.0**-12 if weights in ("split16", "fp16_master") else value for value in expected]
    other = KINDS["SGD"][0](model.parameters(), master_weights=WEIGHTS[weights][1].get("master_weights", "auto"))
    other.load_full_precision_state_dict(model, {str(index): value for index, value in enumerate(exact)})
    other.eval()
    for found, value in zip(whole(other), exact, strict=True):
        assert_same_bits(found, value, "after a load")


def test_a_write_within_a_window_still_warns_after_a_switch(backend: str) -> None:
    optimizer = af.SGDScheduleFree(random_params(SHAPES), backend=backend)
    train_all(optimizer)
    set_grads(params_of(optimizer), [torch.ones(shape) for shape in SHAPES])
    optimizer.accumulate()
    with torch.no_grad():
        params_of(optimizer)[0].add_(1.0)
    with pytest.warns(af.AccumulationWarning, match="written while a window was open"):
        optimizer.eval()


# ---- refusals -------------------------------------------------------------------------------------------------------

IN_EVAL: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "closure": lambda optimizer: optimizer.step(lambda: pytest.fail("it was evaluated")),
    "accumulate": lambda optimizer: optimizer.accumulate(),
    "last": lambda optimizer: optimizer.accumulate(1.0, last=True),
    "backward": lambda optimizer: optimizer.backward(params_of(optimizer)[0].sum()),
    "group": lambda optimizer: af.ClipGroup(
        [af.SGD([Parameter(torch.ones(2))], lr=0.1), optimizer], max_grad_norm=1.0
    ).step(),
}


@pytest.mark.parametrize("call", IN_EVAL)
def test_gradients_at_the_average_are_refused(call: str, backend: str) -> None:
    optimizer = af.AdamWScheduleFree(random_params(SHAPES), backend=backend)
    train_all(optimizer)
    optimizer.eval()
    if call != "backward":
        set_grads(params_of(optimizer), [torch.ones(shape) for shape in SHAPES])
    with refused(optimizer, RuntimeError, r"call optimizer\.train\(\)"):
        IN_EVAL[call](optimizer)


def test_a_group_that_is_added_in_eval_mode_waits_for_train(backend: str) -> None:
    optimizer = af.SGDScheduleFree(random_params(SHAPES), backend=backend)
    train_all(optimizer)
    optimizer.eval()
    optimizer.add_param_group({"params": random_params([(4,)])})
    set_grads(params_of(optimizer)[-1:], [torch.ones(4)])
    with refused(optimizer, RuntimeError, "train"):
        optimizer.step()
    optimizer.train()
    train_all(optimizer)
    optimizer.eval()
    assert [group["train_mode"] for group in optimizer.param_groups] == [False, False]


# ---- the average's weights ------------------------------------------------------------------------------------------


def test_the_millionth_step_is_counted(backend: str) -> None:
    """A sum of lr^2 in fp32 would be off by percents there."""
    optimizer = af.SGDScheduleFree(random_params(SHAPES), lr=0.7, backend=backend)  # fp32 has a smaller number
    train_all(optimizer)
    (group,) = optimizer.param_groups
    group["weight_sum"].fill_(1e6 * 0.7**2)
    train_all(optimizer)
    assert group["weight_sum"] == pytest.approx((1e6 + 3) * 0.7**2, rel=1e-14)


@pytest.mark.parametrize("can_read", [True, False])
@pytest.mark.parametrize("options", [{}, {"r": 1.0}, {"warmup_steps": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_a_learning_rate_of_0_count_where_its_power_is_0(
    kind: str, options: dict[str, Any], can_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warmup from 0 by a scheduler: the authors' weight of such a step is 0^0 = 1."""
    monkeypatch.setattr(schedule_free, "_can_read", lambda plan: can_read)
    monkeypatch.setattr(torch_kernels, "_can_read", lambda plan: can_read)
    cls, own = KINDS[kind]
    options = {**own, **options, "lr": 0.0, "weight_lr_power": 0.0}
    optimizer = cls(random_params(SHAPES), backend="torch", **options)
    formula = oracle.sgd_schedule_free if kind == "SGD" else oracle.adamw_schedule_free
    truth = oracle.Oracle(formula, options, params_of(optimizer))
    for step in range(8):
        optimizer.param_groups[0]["lr"] = lr = 0.0 if step < 4 else 0.1
        truth.options = {**truth.options, "lr": lr}
        grads = [torch.full(shape, 1.0 + step) for shape in SHAPES]
        set_grads(params_of(optimizer), grads)
        truth.step(grads)
        optimizer.step()
    assert truth.sums["weight_sum"] == (36.0 if "r" in options else 8.0)
    assert optimizer.param_groups[0]["weight_sum"] == truth.sums["weight_sum"]
    for param, wanted in zip(params_of(optimizer), truth.params, strict=True):
        assert_close(param, wanted, "fp64 oracle")


@pytest.mark.parametrize("power", [2.0, 0.0])
def test_a_step_with_a_learning_rate_of_0_does_not_begin_the_average(backend: str, power: float) -> None:
    """torch.distributed.checkpoint makes states by such a step; other weights may be loaded after it."""
    options = {"lr": 0.0, "backend": backend, "weight_lr_power": power}
    one, other = (af.SGDScheduleFree(random_params(SHAPES, seed=seed), **options) for seed in (0, 1))
    set_grads(params_of(one), [torch.zeros(shape) for shape in SHAPES])
    one.step()
    with torch.no_grad():
        for param, value in zip(params_of(one), params_of(other), strict=True):
            param.copy_(value)
    one.eval()
    for param, value in zip(params_of(one), params_of(other), strict=True):
        assert_close(param, value, "model")
    one.train()
    with torch.no_grad():
        for param, value in zip(params_of(one), params_of(other), strict=True):
            param.copy_(value)
    if not power:  # it counts, here as in the authors' code
        set_grads(params_of(other), [torch.zeros(shape) for shape in SHAPES])
        other.step()
    for optimizer in (one, other):
        optimizer.param_groups[0]["lr"] = 0.1
    train_all(one, other)
    for param, value in zip(params_of(one), params_of(other), strict=True):
        assert_same_bits(param.detach(), value.detach(), "weights")


@pytest.mark.parametrize("kind", ["SGD", "inner"])
def test_a_group_averages_its_own_steps_with_the_betas_that_they_had(kind: str, backend: str) -> None:
    """A parameter that joins late has its place in the group's average, and its own correction of the moments.

    eval() and train() use the beta of the last step, whatever the group says since.
    """
    cls, options = KINDS[kind]
    formula = oracle.sgd_schedule_free if kind == "SGD" else oracle.adamw_schedule_free
    options = {**options, "lr": 0.1, "r": 1.0}
    groups = [random_params(SHAPES, seed=seed) for seed in range(2)]
    optimizer = cls([{"params": group} for group in groups], backend=backend, **options)
    truths = [oracle.Oracle(formula, options, group) for group in groups]
    for step in range(6):
        for index, (group, truth) in enumerate(zip(groups, truths, strict=True)):
            given = [torch.full(p.shape, 1.0 + step - row) for row, p in enumerate(group)]
            rest = {0} if step < 2 else {1} if step < 4 else set()
            if index == 1 and step in (0, 3):
                rest = {*range(len(group))}
            grads = [None if row in rest else grad for row, grad in enumerate(given)]
            set_grads(group, grads)
            if len(rest) < len(group):
                truth.step(grads)
        optimizer.step()
        beta = 0.9 - 0.1 * step
        options |= {"lr": 0.3 * beta} | ({"momentum": beta} if kind == "SGD" else {"betas": (beta, 0.7)})
        for group, truth in zip(optimizer.param_groups, truths, strict=True):
            group.update(options)
            truth.options = {**options}
        optimizer.eval()
        for group, truth in zip(groups, truths, strict=True):
            beta = truth.sums.get("last_beta", 1.0)  # of a group without a step both are the same
            for param, y, state in zip(group, truth.params, truth.states, strict=True):
                assert_close(param, (y - (1 - beta) * state.get("z", y)) / beta, "fp64 oracle")
        optimizer.train()
    assert [float(group["k"]) for group in optimizer.param_groups] == [6.0, 4.0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_gpu_counts_is_what_the_host_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a step is skipped, of which the host knows nothing: it reads no value."""
    optimizers = [made(kind, backend="torch") for _ in range(2)]
    for step in range(5):
        for optimizer, can_read in zip(optimizers, (True, False), strict=True):
            monkeypatch.setattr(schedule_free, "_can_read", lambda plan, can_read=can_read: can_read)
            monkeypatch.setattr(torch_kernels, "_can_read", lambda plan, can_read=can_read: can_read)
            grads_of(optimizer, step)
            if step == 2:
                params_of(optimizer)[0].grad.fill_(torch.nan)
            with contextlib.nullcontext() if can_read or not step else NoReads():
                optimizer.step()
            assert bool(optimizer.step_was_skipped) == (step == 2)
    assert_same(*optimizers)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.pairwise(weights=tuple(WEIGHTS), kind=tuple(KINDS), by=("file", "copy"), is_open=(False, True))
def test_whoever_resumes_in_eval_mode_goes_on_bit_for_bit(
    weights: str, kind: str, by: str, is_open: bool, backend: str
) -> None:
    """In train mode: test_checkpoints.py."""
    optimizer = made(kind, weights, "bf16", backend)
    train(optimizer, 3)
    if is_open:
        grads_of(optimizer, 7)
        optimizer.accumulate()
    optimizer.eval()
    if by == "copy":
        resumed = copy.deepcopy(optimizer)
    else:
        resumed = made(kind, weights, "bf16", backend)
        for param, value in zip(params_of(resumed), params_of(optimizer), strict=True):
            param.data.copy_(value)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [group["train_mode"] for group in resumed.param_groups] == [False] * 2
    for each in (optimizer, resumed):
        each.train()
        each.step()
        train(each, 2, seed=5)
        each.eval()
    assert_same(resumed, optimizer)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_the_authors_code_load(kind: str, mode: str, backend: str) -> None:
    """They count for a group alone, in numbers of the host."""
    cls, options = KINDS[kind]
    options = {**options, "lr": 0.5, "backend": backend}
    ours, twin = (cls(random_params(SHAPES), **options) for _ in range(2))
    train_all(ours)
    getattr(ours, mode)()
    theirs = copy.deepcopy(ours.state_dict())
    (group,) = theirs["param_groups"]
    group |= {name: float(group[name]) for name in ("k", "weight_sum", "lr_max")}
    group |= {"scheduled_lr": 0.5, "foreach": True}
    del group["last_beta"]
    for entries in theirs["state"].values():
        del entries["step"]
    if mode == "train":
        del group["train_mode"]
    for param, value in zip(params_of(twin), params_of(ours), strict=True):
        param.data.copy_(value)
    twin.load_state_dict(theirs)
    assert twin.param_groups[0].keys() == ours.param_groups[0].keys()
    for each in (ours, twin):
        each.train()
    train_all(ours, twin, seed=1)
    assert_same(twin, ours)


def test_a_checkpoint_of_theirs_without_a_weight_loads(backend: str) -> None:
    """All learning rates were 0 so far."""
    ours = af.SGDScheduleFree(random_params(SHAPES), backend=backend)
    theirs = ours.state_dict()
    (group,) = theirs["param_groups"]
    group |= {"k": 1, "weight_sum": 0.0, "lr_max": 0.0}
    del group["last_beta"]
    theirs["state"] = {index: {"z": param.detach().clone()} for index, param in enumerate(params_of(ours))}
    ours.load_state_dict(theirs)
    train_all(ours)
    assert ours.param_groups[0]["weight_sum"] == 3.0


@pytest.mark.parametrize("make", [af.SGDScheduleFree, af.AdamWScheduleFree])
def test_a_beta_of_0_in_a_group_is_refused_before_a_step(backend: str, make: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = make([param], lr=0.1, backend=backend)
    group = optimizer.param_groups[0]
    group.update({"momentum": 0.0} if "momentum" in group else {"betas": (0.0, 0.9)})
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match="it must be > 0 and < 1"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
