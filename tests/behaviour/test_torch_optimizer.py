"""A torch.optim.Optimizer like any other: hooks, closures, groups, schedulers and autograd find what they expect."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close, assert_like, params_of, train, writes_nothing
from table import EACH_OPTIMIZER, EACH_RULE, OPTIMIZERS, Case, Optimizer, random_grads, random_params, set_grads
from torch.autograd import DeviceType
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector
from torch.optim import lr_scheduler as S
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import accumfused as af

SHAPES = [(5, 3), (7,), (2,)]
every_optimizer = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_rule = pytest.mark.parametrize("case", EACH_RULE, ids=lambda case: case.name)


REGISTER: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "own post": lambda optimizer: optimizer.register_step_post_hook,
    "global post": lambda optimizer: register_optimizer_step_post_hook,
    "own pre": lambda optimizer: optimizer.register_step_pre_hook,
    "global pre": lambda optimizer: register_optimizer_step_pre_hook,
}


def adamw(backend: str, **settings: Any) -> af.AdamW:
    return af.AdamW(random_params(SHAPES), lr=0.1, backend=backend, **settings)


@every_optimizer
def test_hooks_run_once_in_torchs_order_alone_and_together(backend: str, row: Optimizer) -> None:
    def calls_of(optimizer: torch.optim.Optimizer, *kinds: str) -> list[str]:
        """What the hooks see of the first of two steps."""
        calls, start = list[str](), parameters_to_vector(params_of(optimizer)).detach()

        def note(kind: str, opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            is_before = torch.equal(parameters_to_vector(params_of(opt)), start)
            calls.append(f"{kind}, {'before' if is_before else 'after'} the step of {opt is optimizer}")

        handles = [REGISTER[kind](optimizer)(functools.partial(note, kind)) for kind in kinds]
        train(optimizer, steps=1)
        for handle in handles:
            handle.remove()
        train(optimizer, steps=1)
        return calls

    for kinds in (*((kind,) for kind in REGISTER), tuple(REGISTER)):
        calls = calls_of(row.ours(random_params(SHAPES), backend=backend), *kinds)
        assert calls == calls_of(row.peer(random_params(SHAPES)), *kinds)
        assert len(calls) == len(kinds)


@pytest.mark.parametrize("how", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_finds_the_step_by_its_name(backend: str, how: Any) -> None:
    optimizer = adamw(backend)
    for _ in range(2):
        with how() as trace:
            train(optimizer, steps=1)
        named = [event for event in trace.key_averages() if event.key == "Optimizer.step#AdamW.step"]
        assert [event.count for event in named if event.device_type == DeviceType.CPU] == [1]


@pytest.mark.parametrize("by_hook", [False, True], ids=["given", "from a hook"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(
    backend: str, mode: Any, by_hook: bool
) -> None:
    param, calls = Parameter(torch.ones(4)), list[bool]()
    optimizer = af.SGD([param], lr=0.5, backend=backend)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        assert calls == [True]
        loss = (param * 2).sum()
        loss.backward()
        return loss

    if by_hook:
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": closure}))
    with mode():
        loss = optimizer.step(*[] if by_hook else [closure])
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert (loss.detach().item(), param.tolist(), calls) == (8.0, [0.0] * 4, [True])


def test_states_that_a_checkpoint_replaces_are_freed_at_once(backend: str) -> None:
    optimizer = adamw(backend)
    train(optimizer, steps=1)
    old = [weakref.ref(value) for entries in optimizer.state.values() for value in entries.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(value() is None for value in old)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_without_any_gradient_does_nothing_and_has_no_norm(backend: str, frozen: bool) -> None:
    optimizer = adamw(backend, max_grad_norm=1.0)
    params = params_of(optimizer)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    set_grads(params, random_grads(params, 0))
    params[0].grad.fill_(torch.nan)
    optimizer.step()
    assert bool(optimizer.step_was_skipped)
    optimizer.zero_grad()
    for param in params:
        param.requires_grad_(not frozen)
    with writes_nothing(optimizer):
        assert [optimizer.step(), optimizer.step(lambda: 3.0)] == [None, 3.0]
    assert optimizer.grad_norm.isnan()  # nor is it that of the step before
    assert (bool(optimizer.step_was_skipped), int(optimizer.skipped_steps)) == (False, 1)


@each_rule
def test_a_group_may_be_added_late_and_any_option_may_change(backend: str, case: Case) -> None:
    if case.of.torch_class is torch.optim.Adagrad and torch.__version__ < (2, 13):
        pytest.skip("torch's own makes no state for a parameter that is added late")
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


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return "betas" in optimizer.defaults or bool(optimizer.defaults.get("momentum"))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: S.StepLR(o, 2, 0.3),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=has_momentum(o)),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.2, 9, cycle_momentum=has_momentum(o)),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1), S.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 3),
}


@pytest.mark.pairwise(schedule=[*SCHEDULERS], case=EACH_OPTIMIZER, dimensions=(None, 0, 2))
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


def is_written(loss: torch.Tensor) -> bool:
    """Whether backward refuses, because what it needs was written after the forward pass."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return "modified by an inplace" in str(error)
    return False


@pytest.mark.parametrize("how", ["step", "open window", "closed window"])
def test_autograd_hears_of_what_a_step_writes_and_of_nothing_else(backend: str, how: str) -> None:
    params = params_of(optimizer := adamw(backend))
    for present in ([0, 1], [0], [0, 1, 2]):
        losses = [(param * param).sum() for param in params]
        set_grads(params, [grad if i in present else None for i, grad in enumerate(random_grads(params, 0))])
        if how != "step":
            optimizer.accumulate(last=how == "closed window")
        optimizer.step()
        assert [i for i, loss in enumerate(losses) if is_written(loss)] == present


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


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_a_pickle_of_torchs_optimizer_is_taken_where_its_name_is_ours(name: str) -> None:
    """With default settings: torch's state has none."""
    stock = getattr(torch.optim, name)([Parameter(torch.ones(3))], lr=0.1)
    param = stock.param_groups[0]["params"][0]
    param.grad = torch.ones(3)
    stock.step()
    ours = getattr(af, name).__new__(getattr(af, name))
    ours.__setstate__(copy.deepcopy(stock.__getstate__()))
    twin = ours.param_groups[0]["params"][0]
    twin.grad = param.grad = torch.full((3,), 2.0)
    stock.step()
    ours.step()
    assert_close(twin, param, "torch.optim")


def test_a_class_may_take_the_place_of_torchs() -> None:
    """For code that is not one's own: `torch.optim.AdamW = accumfused.AdamW`."""
    names = ("SGD", "Adam", "AdamW", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.optim, name, getattr(af, name))
        for name in names:
            optimizer = getattr(torch.optim, name)([Parameter(torch.ones(2, 2))])
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
            optimizer.step()
            assert type(optimizer) is getattr(af, name)
        groups = [{"params": [Parameter(torch.ones(2, 2))]}, {"params": [Parameter(torch.ones(2))], "use_muon": False}]
        af.Muon(groups[:1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_counting_skipped_steps_and_has_a_count_of_its_own(backend: str, copied: Any) -> None:
    def bad_step(optimizer: Any) -> None:
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.full_like(param, torch.inf)
        optimizer.step()

    optimizer = af.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, max_grad_norm=1.0, backend=backend)
    for _ in range(3):
        bad_step(optimizer)
    twin = copied(optimizer)
    assert int(twin.skipped_steps) == 3
    bad_step(twin)
    assert (int(twin.skipped_steps), int(optimizer.skipped_steps)) == (4, 3)
