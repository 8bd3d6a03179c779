"""Optimizers that are clipped together: errors, writes, copies and checkpoints between their steps."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from compare import assert_close
from harness import need_native
from snapshot import refused
from table import set_grads
from test_clip_together import Both
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af


def pair(backend: str, limit: float = 1.0, **settings: Any) -> tuple[list[Tensor], list[Any], Any]:
    params = [torch.zeros(4).requires_grad_() for _ in range(2)]
    optimizers = [af.SGD([param], lr=1.0, backend=backend, **settings) for param in params]
    return params, optimizers, af.clip_together(optimizers, limit)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_error_in_one_leaves_no_norm_and_no_state_behind(backend: str, momentum: float) -> None:
    params, (first, second), _ = pair(backend, momentum=momentum)
    set_grads(params, [torch.full((4,), 10.0)] * 2)
    second.accumulate()
    params[1].grad = torch.full((4,), 10.0)
    with refused(first, RuntimeError, "a gradient that was not accumulated"):
        first.step()
    second.accumulate()
    first.step()
    norm = math.sqrt(4 * 10.0**2 + 4 * 20.0**2)
    assert_close(params[0], torch.full((4,), -10.0 / norm), "norm")


def test_views_of_one_buffer_may_be_clipped_in_place(backend: str) -> None:
    """As DDP's buckets are: one version counter for the gradients of both."""
    both = Both(backend)
    flat = torch.cat([grad.flatten() for grad in both.gradients(0)])
    both.set(both.gradients(0))
    offset = 0
    for param in (p for params in both.ours for p in params):
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    for optimizer in both.optimizers:
        optimizer.step()
    both.check(both.stock_step())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_that_propagates_does_not_make_another_write_nan(backend: str, order: tuple[int, int]) -> None:
    params = [torch.zeros(4).requires_grad_() for _ in range(2)]
    optimizers = [
        af.SGD([p], lr=1.0, nonfinite=mode, backend=backend)
        for p, mode in zip(params, ("propagate", None), strict=True)
    ]
    af.clip_together(optimizers, 1.0)
    set_grads(params, [torch.full((4,), math.nan), torch.ones(4)])
    for index in order:
        optimizers[index].step()
    assert params[1].tolist() == [0.0] * 4
    assert optimizers[1].step_was_skipped


def test_a_sum_that_overflows_where_no_part_does_is_skipped(backend: str) -> None:
    params, optimizers, _ = pair(backend)
    set_grads(params, [torch.full((4,), 7.5e18)] * 2)  # squares to 5.6e37: four are below 3.4e38, eight are above
    for optimizer in optimizers:
        optimizer.step()
    assert [bool(optimizer.step_was_skipped) for optimizer in optimizers] == [True, True]


@pytest.mark.parametrize("window", ["closed", "open"])
def test_a_gradient_that_is_replaced_between_their_steps_is_refused(backend: str, window: str) -> None:
    params, (first, second), _ = pair(backend)
    set_grads(params, [torch.ones(4)] * 2)
    for optimizer in (first, second):
        optimizer.accumulate(last=window == "closed")
    first.step()
    params[1].grad = torch.full((4,), 5.0)
    with refused(second, RuntimeError, r"step all of them after the last backward\(\)"):
        second.step()


def test_a_closed_window_may_be_replaced_before_the_first_of_them_steps(backend: str) -> None:
    params, (first, second), _ = pair(backend, limit=1e9)
    set_grads(params, [torch.ones(4)] * 2)
    for optimizer in (first, second):
        optimizer.accumulate(last=True)
    params[1].grad = torch.full((4,), 5.0)
    first.step()
    second.step()
    assert params[1].tolist() == [-5.0] * 4


def test_a_member_can_be_copied_between_their_steps(backend: str) -> None:
    params, (first, second), _ = pair(backend)
    set_grads(params, [torch.ones(4)] * 2)
    first.step()
    for copied in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert copied._runtime.taken is None
        assert copied._together is not second._together
    shallow = copy.copy(second)
    with refused(second, RuntimeError, "a shallow copy"):
        shallow.step()


def test_nothing_lives_on_once_all_have_stepped(backend: str) -> None:
    params, optimizers, _ = pair(backend)
    set_grads(params, [torch.ones(4)] * 2)
    alive = [weakref.ref(param.grad) for param in params]
    for optimizer in optimizers:
        optimizer.step()
    for param in params:
        param.grad = None
    assert [grad() for grad in alive] == [None, None]


def test_distributed_checkpoint_makes_their_states(backend: str) -> None:
    """By a step of its own for each, with zeros in p.grad and a learning rate of 0, one after the other."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizers = [af.AdamW(layer.parameters(), lr=0.25, backend=backend) for layer in model]
    af.clip_together(optimizers, 1.0)
    before = [param.detach().clone() for param in model.parameters()]
    saved = dcp.get_optimizer_state_dict(model, optimizers)
    dcp.set_optimizer_state_dict(model, optimizers, saved)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.25, 0.25]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_skips_are_counted_where_they_do_not_raise(backend: str, nonfinite: Any) -> None:
    params, optimizers, _ = pair(backend, nonfinite=nonfinite)
    set_grads(params, [torch.full((4,), math.nan)] * 2)
    for optimizer in optimizers:
        if nonfinite == "raise":
            with refused(optimizer, RuntimeError, "nothing was updated"):
                optimizer.step()
        else:
            optimizer.step()
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [int(nonfinite == "skip")] * 2


def test_the_normalizer_may_be_a_tensor(backend: str) -> None:
    params, optimizers, _ = pair(backend, limit=1e9)
    set_grads(params, [torch.full((4,), 6.0)] * 2)
    normalizer = torch.tensor(2.0)
    for optimizer in optimizers:
        optimizer.step(normalizer=normalizer)
    assert [param.tolist() for param in params] == [[-3.0] * 4] * 2


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_under_a_scaler_is_skipped_by_those_that_propagate_too(backend: str, bad: int) -> None:
    params, optimizers, _ = pair(backend, nonfinite="propagate")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(torch.ones(()))
    set_grads(params, [torch.ones(4)] * 2)
    params[bad].grad[1] = math.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [param.tolist() for param in params] == [[0.0] * 4] * 2
    assert scaler.get_scale() == 2.0**7


def test_a_parameter_of_another_member_cannot_be_added(backend: str) -> None:
    params, (_, second), _ = pair(backend)
    with refused(second, ValueError, "a parameter is in two of the optimizers"):
        second.add_param_group({"params": [params[0]]})
    second.add_param_group({"params": [torch.zeros(3).requires_grad_()]})
    assert len(second.param_groups) == 2


def test_a_group_that_is_added_between_their_steps_has_no_gradient_yet(backend: str) -> None:
    params, (first, second), _ = pair(backend, limit=1e9)
    set_grads(params, [torch.ones(4)] * 2)
    first.step()
    added = torch.ones(2).requires_grad_()
    second.add_param_group({"params": [added]})
    second.step()
    assert (params[1].tolist(), added.tolist()) == ([-1.0] * 4, [1.0] * 2)


@pytest.mark.parametrize("name", ["torch", "cpu", "foreach"])
def test_a_parameter_may_be_laid_out_anew_between_their_steps(name: str) -> None:
    if name == "cpu":
        need_native()
    params = [torch.zeros(2, 3, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    first, second = (af.SGD([p], lr=1.0, momentum=0.5, backend=name) for p in params)
    af.clip_together([first, second], 1e9)
    for step in range(2):
        set_grads(params, [torch.ones(2, 3, dtype=torch.bfloat16)] * 2)
        first.step()
        if step == 1:
            params[1].data = params[1].detach().t().contiguous().t()
        second.step()
    assert params[1].tolist() == params[0].tolist() == [[-2.5] * 3] * 2


def test_a_skip_counts_with_the_member_that_steps(backend: str) -> None:
    params, (first, second), _ = pair(backend)
    for _ in range(2):
        set_grads(params, [torch.full((4,), math.nan)] * 2)
        first.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
    assert [int(optimizer.skipped_steps) for optimizer in (first, second)] == [2, 0]


def test_a_window_that_begins_between_their_steps_is_refused_without_gradients_too(backend: str) -> None:
    params, (first, second), _ = pair(backend)
    first.step()
    second.accumulate(weight=0.0)
    with refused(second, RuntimeError, r"step all of them after the last backward\(\)"):
        second.step()
    assert params[1].tolist() == [0.0] * 4
