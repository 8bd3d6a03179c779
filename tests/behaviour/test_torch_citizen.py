"""A torch.optim.Optimizer like any other: hooks, closures, groups, schedulers and autograd find what they expect."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compare import assert_close
from peers import assert_like, assert_same, copies, params_of, train
from snapshot import writes_nothing
from table import EACH_RULE, OPTIMIZERS, Case, Optimizer, random_grads, random_params, set_grads
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import lr_scheduler as S
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import accumfused as af

SHAPES = [(5, 3), (7,), (2,)]
every_optimizer = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_rule = pytest.mark.parametrize("case", EACH_RULE, ids=lambda case: case.name)


def adamw(backend: str, **settings: Any) -> af.AdamW:
    return af.AdamW(random_params(SHAPES), lr=0.1, backend=backend, **settings)


def calls_of(optimizer: torch.optim.Optimizer, *kinds: str) -> list[str]:
    """What the hooks see of the first of two steps."""
    calls: list[str] = []
    start = parameters_to_vector(params_of(optimizer)).detach()
    register = {
        "own post": optimizer.register_step_post_hook,
        "global post": register_optimizer_step_post_hook,
        "own pre": optimizer.register_step_pre_hook,
        "global pre": register_optimizer_step_pre_hook,
    }

    def note(kind: str, opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_before = torch.equal(parameters_to_vector(params_of(opt)), start)
        calls.append(f"{kind}, {'before' if is_before else 'after'} the step of {opt is optimizer}")

    handles = [register[kind](functools.partial(note, kind)) for kind in kinds]
    train(optimizer, steps=1)
    for handle in handles:
        handle.remove()
    train(optimizer, steps=1)
    return calls


@every_optimizer
def test_hooks_run_once_in_torchs_order_alone_and_together(backend: str, row: Optimizer) -> None:
    kinds = ("own post", "global post", "own pre", "global pre")
    for given in (*((kind,) for kind in kinds), kinds):
        calls = calls_of(row.ours(random_params(SHAPES), backend=backend), *given)
        assert calls == calls_of(row.peer(random_params(SHAPES)), *given)
        assert len(calls) == len(given)


@pytest.mark.parametrize("how", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_finds_the_step_by_its_name(backend: str, how: Any) -> None:
    optimizer = adamw(backend)
    for _ in range(2):
        with how() as trace:
            train(optimizer, steps=1)
        assert [event.count for event in trace.key_averages() if event.key == "Optimizer.step#AdamW.step"] == [1]


@pytest.mark.parametrize("by_hook", [False, True], ids=["given", "from a hook"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(
    backend: str, mode: Any, by_hook: bool
) -> None:
    ours, twin, calls = adamw(backend), adamw(backend), []

    def closure(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = parameters_to_vector(params_of(optimizer)).square().sum()
        loss.backward()
        return loss

    given = [functools.partial(closure, ours)]
    if by_hook:
        ours.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": given[0]}))
    with mode():
        loss = ours.step(*[] if by_hook else given)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert torch.equal(loss, closure(twin))
    twin.step()
    assert calls == [True, True]
    assert_same(ours, twin)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_without_any_gradient_does_nothing(backend: str, frozen: bool) -> None:
    optimizer = adamw(backend, max_grad_norm=1.0, nonfinite="raise")
    for param in params_of(optimizer):
        param.requires_grad_(not frozen)
    with writes_nothing(optimizer):
        assert [optimizer.step(), optimizer.step(lambda: 3.0)] == [None, 3.0]
        optimizer.zero_grad()
    assert optimizer.state_dict()["state"] == {}
    assert not optimizer.step_was_skipped
    if not frozen:
        train(optimizer, steps=1)
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.grad_norm is None  # not that of the step before


def test_zero_grad_fills_with_zeros_or_releases(backend: str) -> None:
    *params, unused = params_of(optimizer := adamw(backend, fused=True))
    set_grads(params, random_grads(params, 0))
    grads = [param.grad for param in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is grad and not grad.any() for param, grad in zip(params, grads, strict=True))
    optimizer.zero_grad()
    assert [param.grad for param in (*params, unused)] == [None] * 3


@each_rule
def test_a_group_may_be_added_late_and_any_option_may_change(backend: str, case: Case) -> None:
    ours, peer = case.make(random_params(SHAPES), backend), case.of.peer(random_params(SHAPES), **case.options)
    train(ours, peer)
    for optimizer in (ours, peer):
        frozen, unfrozen = random_params([(3,), (4,)], seed=1)
        optimizer.add_param_group({"params": [frozen.detach(), unfrozen], "lr": 0.02})
    assert [group.keys() for group in ours.param_groups] == [ours.param_groups[0].keys()] * 2
    changes = {name: value for name, value in case.of.other_options.items() if not isinstance(value, bool)}
    for name, value in {"lr": 0.02, **changes, "maximize": True}.items():
        for optimizer in (ours, peer):
            optimizer.param_groups[1][name] = value
        train(ours, peer, steps=2, seed=2)
        assert_like(peer, ours, name)
    assert torch.equal(params_of(ours)[3], frozen)


@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_group_may_be_added_between_micro_batches(backend: str, unfrozen: bool) -> None:
    old, new = (Parameter(torch.full((4,), 8.0)) for _ in range(2))
    optimizer = af.SGD([old], lr=0.5, max_grad_norm=1e6, backend=backend)
    old.grad = torch.full((4,), 2.0)
    optimizer.step()  # the plan is made
    optimizer.accumulate(1)
    optimizer.add_param_group({"params": new.requires_grad_(not unfrozen), "lr": 0.25})
    new.requires_grad_().grad = torch.full((4,), 4.0)
    optimizer.accumulate(3)
    optimizer.step()
    assert (old.tolist(), new.tolist()) == ([8 - 1 - 0.5 * 2 / 4] * 4, [8 - 0.25 * 3] * 4)


@each_rule
def test_another_default_dtype_changes_no_bit(backend: str, case: Case) -> None:
    plain, under_double = (case.make(random_params(SHAPES), backend) for _ in range(2))
    under_double.register_step_pre_hook(lambda *args: torch.set_default_dtype(torch.float64))
    under_double.register_step_post_hook(lambda *args: torch.set_default_dtype(torch.float32))
    try:
        train(plain, under_double)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(under_double, plain)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 1 / (step + 2)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: S.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: S.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=o.defaults.get("momentum") != 0),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.2, 9, cycle_momentum=o.defaults.get("momentum") != 0),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1), S.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 3),
}


@pytest.mark.pairwise(schedule=tuple(SCHEDULERS), case=EACH_RULE, dimensions=(None, 0, 2))
def test_schedulers_lead_both_to_the_same_place(backend: str, schedule: str, case: Case, dimensions: Any) -> None:
    ours, peer = case.make(random_params(SHAPES), backend), case.of.peer(random_params(SHAPES), **case.options)
    rates = []
    for optimizer in (ours, peer):
        group = optimizer.param_groups[0]
        if dimensions is not None:
            group["lr"] = torch.tensor(0.1).reshape([1] * dimensions)
        rate, each = group["lr"], SCHEDULERS[schedule](optimizer)
        for seed in range(6):
            train(optimizer, steps=1, seed=seed)
            each.step(*[1.0][: schedule == "ReduceLROnPlateau"])
            rates.append(float(group["lr"]))
        assert dimensions is None or group["lr"] is rate  # written in place: a CUDA graph may hold it
    assert "step" not in vars(ours)  # which schedulers wrap, unless it tells them itself
    assert rates[:6] == rates[6:]
    assert len({*rates}) > 1
    assert_like(peer, ours)


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    assert {*S.__all__} - {"LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


@every_optimizer
def test_averaged_models_follow_as_they_follow_torchs(backend: str, row: Optimizer) -> None:
    averages = []
    for make in (row.peer, functools.partial(row.ours, backend=backend)):
        model = torch.nn.Linear(5, 3)
        vector_to_parameters(random_params([(18,)])[0].detach(), model.parameters())
        optimizer = make(model.parameters(), lr=0.1)
        both = [swa_utils.AveragedModel(model, multi_avg_fn=f) for f in (None, swa_utils.get_ema_multi_avg_fn(0.8))]
        for seed in range(4):
            train(optimizer, steps=1, seed=seed)
            for average in both:
                average.update_parameters(model)
        averages.append([parameters_to_vector(each.parameters()) for each in both])
        assert all((parameters_to_vector(model.parameters()) - each).abs().max() > 0.02 for each in averages[-1])
    for theirs, ours in zip(*averages, strict=True):
        assert_close(ours, theirs, "torch.optim")


@pytest.mark.parametrize("how", ["step", "open window", "closed window"])
@every_optimizer
def test_autograd_hears_of_what_a_step_writes_and_of_nothing_else(backend: str, row: Optimizer, how: str) -> None:
    params = random_params(SHAPES)
    optimizer = row.ours(params, lr=0.1, backend=backend)
    for present in ([0, 1], [0], [0, 1, 2]):
        losses = [(param * param).sum() for param in params]
        set_grads(params, [grad if i in present else None for i, grad in enumerate(random_grads(params, 0))])
        if how != "step":
            optimizer.accumulate(last=how == "closed window")
        optimizer.step()
        for i, loss in enumerate(losses):
            with pytest.raises(RuntimeError, match="modified by an inplace") if i in present else nullcontext():
                loss.backward()


def test_gradients_with_a_graph_are_not_changed_and_nothing_is_recorded(backend: str) -> None:
    param = Parameter(torch.full((3,), 8.0))
    optimizer = af.SGD([param], lr=0.5, momentum=0.5, backend=backend)
    (param * param).sum().backward()
    optimizer.accumulate()
    factor = torch.full((3,), 2.0, requires_grad=True)
    (grad,) = torch.autograd.grad((param * factor).sum(), param, create_graph=True)
    param.grad = grad
    optimizer.accumulate(last=True)
    optimizer.step()
    assert (grad.tolist(), param.tolist()) == ([2.0] * 3, [8.0 - 0.5 * (16.0 + 2.0)] * 3)
    grad.sum().backward()
    assert factor.grad.tolist() == [1.0] * 3
    for value in (param, *optimizer.state[param].values(), optimizer.grad_norm, optimizer.skipped_steps):
        assert (value.is_leaf, value.requires_grad) == (True, value is param)


def test_hooks_of_state_dict_run_in_order_around_it(backend: str) -> None:
    optimizer, calls = adamw(backend), []
    set_grads(params_of(optimizer), random_grads(params_of(optimizer), 0))
    optimizer.accumulate()  # an open window is saved by a hook of ours
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "calls": [*calls]})
    optimizer.register_state_dict_post_hook(
        lambda opt, saved: calls.append("grad_accumulator" in saved["state"].get(0, ())), prepend=True
    )
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append(opt.param_groups[0].update(lr=0.25)))
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append(opt.param_groups[0]["lr"]), prepend=True)
    saved = optimizer.state_dict()
    assert (saved["param_groups"][0]["lr"], saved["calls"]) == (0.25, [0.1, None, True])
    optimizer.step()
    assert optimizer.state_dict()["calls"][3:] == [0.25, None, False]


def test_hooks_of_load_state_dict_run_in_order_around_it(backend: str) -> None:
    """The first one pairs parameters by name, as torch's documentation does; the last ones see what was loaded."""
    source = af.AdamW([(f"w{i}", param) for i, param in enumerate(random_params(SHAPES))], lr=0.1, backend=backend)
    train(source)
    w0, _, w2 = copies(params_of(source))
    target = af.AdamW([("w2", w2), ("w0", w0)], lr=0.3, backend=backend)
    calls: list[Any] = []

    def by_name(opt: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        (group,) = saved["param_groups"]
        places = [group["param_names"].index(name) for name in opt.param_groups[0]["param_names"]]
        state = {here: saved["state"][there] for here, there in enumerate(places)}
        return {"state": state, "param_groups": [{**group, "params": [0, 1]}]}

    target.register_load_state_dict_pre_hook(lambda opt, saved: calls.append([*saved["state"]]))
    handle = target.register_load_state_dict_pre_hook(by_name, prepend=True)
    target.register_load_state_dict_post_hook(lambda opt: calls.append("last"))
    target.register_load_state_dict_post_hook(lambda opt: calls.append(sorted(opt.state[w2])), prepend=True)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert calls == [[0, 1], ["exp_avg", "exp_avg_sq", "step"], "last"]
    handle.remove()
    early, grads = copy.deepcopy(target.state_dict()), random_grads(params_of(source), 50)
    for optimizer, own in ((source, grads), (target, [grads[2], grads[0]])):
        set_grads(params_of(optimizer), own)
        optimizer.step()
    assert torch.equal(parameters_to_vector([w0, w2]), parameters_to_vector(params_of(source)[::2]))
    target.load_state_dict(early)  # of what the load before has brought nothing stays
    assert torch.equal(target.state[w2]["exp_avg"], early["state"][0]["exp_avg"])


def test_a_hook_that_writes_the_state_after_loading_is_heard(backend: str) -> None:
    # The plan of the last step must not outlive what a hook puts in the place of its tensors.
    optimizer = adamw(backend)
    train(optimizer)
    optimizer.register_load_state_dict_post_hook(lambda opt: opt.state.clear())
    optimizer.load_state_dict(optimizer.state_dict())
    fresh = af.AdamW(copies(params_of(optimizer)), lr=0.1, backend=backend)
    train(optimizer, fresh)
    assert_same(optimizer, fresh)
