"""What surrounds a step in torch: hooks, closures, copies, late groups, schedulers, averaged models, zero_grad."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import random_grads, random_params, set_grads
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_infos import (
    STOCK,
    assert_like_stock,
    assert_same,
    copies,
    every_input,
    every_optimizer,
    make,
    make_stock,
    on_each_device,
    params_of,
    train,
)

pytestmark = on_each_device
SHAPES = [(5, 3), (7,)]


# ---- hooks of step -------------------------------------------------------------------------------------------------


@every_optimizer
def test_hooks_of_all_optimizers_and_of_this_one_run_once_in_torchs_order(backend: str, info: Any) -> None:
    def calls_of(optimizer: torch.optim.Optimizer) -> list[str]:
        calls: list[str] = []
        param = params_of(optimizer)[0]
        start = param.detach().clone()

        def note(name: str) -> Callable[..., None]:
            def hook(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                assert opt is optimizer
                calls.append(f"{name}, {'before' if torch.equal(param, start) else 'after'}")

            return hook

        handles = [
            optimizer.register_step_post_hook(note("own post")),
            register_optimizer_step_post_hook(note("global post")),
            optimizer.register_step_pre_hook(note("own pre")),
            optimizer.register_step_pre_hook(note("own pre 2")),
            register_optimizer_step_pre_hook(note("global pre")),
        ]
        set_grads(params_of(optimizer), random_grads(params_of(optimizer), 0))
        optimizer.step()
        for handle in handles:
            handle.remove()
        optimizer.step()
        return calls

    params = random_params(SHAPES)
    expected = calls_of(STOCK[info.optim_cls](copies(params)))
    assert calls_of(info.optim_cls(params, backend=backend)) == expected
    assert expected == [
        "global pre, before", "own pre, before", "own pre 2, before", "own post, after", "global post, after",
    ]  # fmt: skip


@every_optimizer
def test_a_pre_hook_may_change_the_gradients_and_the_arguments(backend: str, info: Any) -> None:
    params = random_params(SHAPES)
    hooked, plain = info.optim_cls(params, lr=0.1, backend=backend), info.optim_cls(copies(params), lr=0.1)

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for param in params_of(optimizer):
            param.grad /= 2
        return args, {"closure": lambda: 7.0}

    hooked.register_step_pre_hook(halve)
    for seed in range(2):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(params_of(plain), [grad / 2 for grad in grads])
        assert hooked.step() == 7.0
        plain.step()
    assert all(map(torch.equal, params, params_of(plain)))


@every_optimizer
def test_a_pre_hook_that_returns_something_else_gives_torchs_error(backend: str, info: Any) -> None:
    optimizer = info.optim_cls(random_params(SHAPES), backend=backend)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: "nonsense")
    with pytest.raises(
        RuntimeError, match=r"must return None or a tuple of \(new_args, new_kwargs\), but got nonsense"
    ):
        optimizer.step()


# ---- closures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@every_input
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(
    backend: str, info: Any, given: Any, mode: Any
) -> None:
    params = random_params(SHAPES)
    ours, peer = make(info, given, params, backend=backend), make(info, given, copies(params), backend=backend)
    calls = []

    def loss_of(optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = torch.stack([(param * param).sum() for param in params_of(optimizer)]).sum()
        loss.backward()
        return loss

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return loss_of(ours)

    for _ in range(2):
        with mode():
            loss = ours.step(closure)
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)
        expected = loss_of(peer)
        peer.step()
        assert torch.equal(loss.detach(), expected.detach())
        assert loss.requires_grad
    assert calls == [True, True]
    assert all(map(torch.equal, params, params_of(peer)))
    assert all(param.is_leaf and param.requires_grad and param.grad_fn is None for param in params)


# ---- copies --------------------------------------------------------------------------------------------------------


def public(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@every_input
def test_a_copy_has_all_public_attributes_and_trains_alike(backend: str, info: Any, given: Any, how: Any) -> None:
    ours = make(info, given, random_params(SHAPES), backend=backend, max_grad_norm=0.5)
    train(ours)
    twin = how(ours)
    assert set(public(twin)) == set(public(ours)) == {"defaults", "state", "param_groups"}
    assert twin.defaults == {**ours.defaults, "differentiable": False}  # torch adds it to every copy
    assert repr(twin) == repr(ours)
    assert twin.max_grad_norm == 0.5
    train(ours, twin, seed=1)
    assert_same(twin, ours)
    assert all(a is not b for a, b in zip(params_of(ours), params_of(twin), strict=True))


# ---- groups added late ---------------------------------------------------------------------------------------------


@every_input
def test_a_group_added_late_gets_the_defaults_and_trains_like_torchs(backend: str, info: Any, given: Any) -> None:
    params = random_params([(5, 3), (7,), (2,)])
    ours = make(info, given, params[:1], backend=backend)
    stock = make_stock(info, given, copies(params[:1]))
    train(ours, stock)
    frozen, unfrozen = params[1].detach(), params[2]
    for optimizer in (ours, stock):
        mine = [frozen.clone(), unfrozen.detach().clone().requires_grad_()]
        optimizer.add_param_group({"params": mine, "lr": 0.02})
        optimizer.add_param_group({"params": mine[0].clone()})
    assert [set(group) for group in ours.param_groups] == [set(ours.param_groups[0])] * 3
    train(ours, stock, seed=1)
    assert_like_stock(ours, stock)
    assert torch.equal(params_of(ours)[1], frozen)
    assert params_of(ours)[1] not in ours.state
    assert not torch.equal(params_of(ours)[2], unfrozen)


# ---- what trains beside an optimizer -------------------------------------------------------------------------------


@every_optimizer
def test_averaged_models_and_their_schedule_follow_as_they_follow_torchs(backend: str, info: Any) -> None:
    results = []
    x, y = (p.detach() for p in random_params([(16, 4), (16, 2)], seed=7))
    weights = [p.detach() for p in random_params([(6, 4), (6,), (2, 6), (2,)])]
    for make_optimizer in (STOCK[info.optim_cls], lambda params, **o: info.optim_cls(params, backend=backend, **o)):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        with torch.no_grad():
            for param, values in zip(model.parameters(), weights, strict=True):
                param.copy_(values)
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        average = swa_utils.AveragedModel(model)
        ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
        warm, swa = lr_scheduler.LinearLR(optimizer, total_iters=3), swa_utils.SWALR(optimizer, 0.005, anneal_epochs=2)
        for step in range(8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            ema.update_parameters(model)
            if step > 3:
                average.update_parameters(model)
            (swa if step > 3 else warm).step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
        results.append([*model.parameters(), *average.module.parameters(), *ema.module.parameters()])
    for theirs, ours in zip(*results, strict=True):
        # A gradient through a small model adds roundings to those of the step. A step is about 0.01.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    live, averaged = results[1][0], results[1][4]
    assert (live - averaged).abs().max() > 1e-3


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@every_optimizer
def test_zero_grad_fills_with_zeros_or_releases(backend: str, info: Any, flags: dict[str, bool]) -> None:
    if not set(flags) <= set(info.supported_impls):
        flags = {}
    params = random_params(SHAPES)
    optimizer = info.optim_cls([*params, Parameter(torch.ones(2))], backend=backend, **flags)
    set_grads(params, random_grads(params, 0))
    grads = [param.grad for param in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is grad and not grad.any() for param, grad in zip(params, grads, strict=True))
    assert params_of(optimizer)[-1].grad is None
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
