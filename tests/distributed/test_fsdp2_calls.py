"""The calls of a training loop over parameters that are spread over processes: what they leave, refuse and send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sharded_models as models
import torch
import torch.distributed as dist
from compare import assert_close, assert_same_bits
from sharded_models import (
    ADAMW,
    adamw,
    assert_unchanged,
    backward,
    everything_whole,
    give_whole_gradients,
    mesh_over,
    params_of,
    sharded,
    small_model,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import accumfused as af
from accumfused import shards

CHECKS = check = models.Checks(__name__)


def same_everywhere(value: Any) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return all(other == every[0] for other in every)


# ---- windows and their gradients -------------------------------------------------------------------------------------


@check(2)
def a_closed_window_is_in_p_grad() -> None:
    def make(params: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, **ADAMW)

    for weighted in (True, False):
        model = sharded(small_model())
        optimizer = adamw(model)
        for part, count in enumerate(models.COUNTS[dist.get_rank()]):
            loss = models.loss_of(model, 0, part, dist.get_rank(), count)
            if weighted:
                optimizer.backward(loss, weight=count, last=part == 1)
            else:
                loss.backward()
                optimizer.accumulate(last=part == 1)
        truth = models.stock(2, make, float("inf"), weighted=weighted, steps=1)[2]
        for param, wanted in zip(model.parameters(), truth, strict=True):
            grad: Any = param.grad
            assert isinstance(grad, DTensor)
            assert (grad.shape, grad.placements) == (param.shape, param.placements)
            assert_close(whole(grad), wanted, "window")
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # others may look at it, and write to it
        norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        assert_close(whole(norm), torch.tensor(0.05), "model")
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())


@check(2)
def states_lie_as_their_parameters() -> None:
    model = sharded(small_model())
    optimizer = adamw(model)
    backward(model)
    optimizer.step()
    for param in model.parameters():
        state, part = optimizer.state[param], shards.local(param)
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert not isinstance(state["step"], DTensor)
        assert state["step"].shape == ()
        for name in ("exp_avg", "exp_avg_sq"):
            value: Any = state[name]
            assert (value.shape, value.placements, value.device_mesh) == (
                param.shape, param.placements, param.device_mesh
            )  # fmt: skip
            assert value.to_local().shape == part.shape
    assert shards.local(model[3].bias).numel() == (2 if dist.get_rank() == 0 else 1)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all-reduces that are called by name."""
    sizes: list[int] = []
    inner = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return inner(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = inner


@check(2)
def a_step_sends_one_number() -> None:
    def fold(model: Any, optimizer: Any, weight: float | None) -> None:
        for part in range(2):
            optimizer.backward(models.loss_of(model, 0, part, 0, 3), weight=weight)

    # A norm costs one number, a window three: what is divided by; a plain step asks nobody.
    cases = [({"max_grad_norm": 0.1}, "grads", [1]), ({}, "grads", []), ({}, None, [3, 1]), ({}, 3.0, [3, 1])]
    for settings, weight, sizes in cases:
        model = sharded(small_model())
        optimizer = adamw(model, **settings)
        for _ in range(2):
            if weight == "grads":
                backward(model)
            else:
                fold(model, optimizer, weight)
            with counted() as found, CommDebugMode() as sent:
                optimizer.step()
            assert found == sizes, (settings, weight, found)
            assert sent.get_total_counts() == len(sizes), (settings, weight, sent.get_comm_counts())
            optimizer.zero_grad()


@check(2)
def overflows_of_one_process_skip_on_all() -> None:
    for scaler_kind, last, value in [
        (None, False, "inf"), (torch.amp.GradScaler, True, "inf"), (af.GradScaler, True, "nan"),
        (af.GradScaler, False, "inf"), ("unscaled", True, "inf"), ("plain", False, "inf"),
    ]:  # fmt: skip
        model = sharded(small_model())
        optimizer = adamw(model, max_grad_norm=0.1)
        kind = af.GradScaler if isinstance(scaler_kind, str) else scaler_kind
        scaler = kind("cpu", init_scale=64.0, enabled=True) if kind else torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            for part in range(2):
                scaler.scale(models.loss_of(model, step, part, dist.get_rank(), 3)).backward()
                local = shards.local(model[0].weight.grad)
                if step == 1 and part == 0 and dist.get_rank() == 1:
                    local[0, 0] = float(value)
                if scaler_kind != "plain":
                    optimizer.accumulate(last=last and part == 1)
            before = everything_whole(optimizer)
            if scaler_kind == "unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                assert_unchanged(optimizer, before)
            else:
                assert not torch.equal(before["param 0"], whole(model[0].weight)), (scaler_kind, step)
            optimizer.zero_grad()
        if scaler_kind is not torch.amp.GradScaler:  # which does not call step() then
            assert int(optimizer.skipped_steps) == 1, scaler_kind
        assert scaler.get_scale() == (32.0 if kind else 1.0)
        assert same_everywhere((scaler.get_scale(), [whole(p).tolist() for p in model.parameters()]))


# ---- other optimizers, groups and schedulers -------------------------------------------------------------------------


@check(2)
def converted_optimizers_clip_by_the_norm_over_all_processes() -> None:
    for kind in (torch.optim.AdamW, torch.optim.RMSprop):

        def make(params: Any, kind: Any = kind) -> Any:
            return kind(params, lr=1e-2)

        truth = models.stock(2, make, 0.1)
        model = sharded(small_model())
        optimizer = af.fuse(make(model.parameters()), max_grad_norm=0.1)
        norms = train(model, optimizer, last=kind is torch.optim.RMSprop)
        assert_close(torch.tensor(norms), torch.tensor(truth[1]), "model", "norm")
        for param, wanted in zip(model.parameters(), truth[0], strict=True):
            assert_close(whole(param), wanted, "model", kind.__name__)


@check(2)
def optimizers_that_are_clipped_together_share_one_norm() -> None:
    def stock(params: Any) -> Any:
        return torch.optim.AdamW(params, **ADAMW)

    truth = models.stock(2, stock, 0.1)
    model = sharded(small_model())
    params = list(model.parameters())
    optimizers = [af.AdamW(params[:3], **ADAMW), af.AdamW(params[3:], **ADAMW)]
    af.clip_together(optimizers, 0.1)
    for step in range(models.STEPS):
        for part, count in enumerate(models.COUNTS[dist.get_rank()]):
            (models.loss_of(model, step, part, dist.get_rank(), count) * count).backward()
        mean = sum(map(sum, models.COUNTS[:2])) / 2
        for optimizer in optimizers:
            optimizer.step(normalizer=mean)
            assert optimizer.grad_norm is not None
            assert_close(optimizer.grad_norm, torch.tensor(truth[1][step]), "model", "norm")
        model.zero_grad()
    for param, wanted in zip(params, truth[0], strict=True):
        assert_close(whole(param), wanted, "model")


@check(2)
def groups_and_schedulers() -> None:
    model = sharded(small_model())
    params = list(model.parameters())
    optimizer = af.AdamW(params[:2], **ADAMW)
    plain = [nn.Parameter(whole(param)) for param in params]
    twin = af.AdamW(plain[:2], **ADAMW)
    both = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, twin)]
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": params[2:], "lr": 0.1, "amsgrad": True})
            twin.add_param_group({"params": plain[2:], "lr": 0.1, "amsgrad": True})
        backward(model, step)
        give_whole_gradients(optimizer, plain)
        for one in (optimizer, twin):
            one.step()
        for scheduler in both:
            scheduler.step()
        model.zero_grad()
    assert_unchanged(optimizer, everything_whole(twin))
    assert not torch.equal(whole(params[2]), small_model()[2].weight)


# ---- refusals --------------------------------------------------------------------------------------------------------


@check(2)
def what_cannot_be_right_is_refused_on_every_process() -> None:
    model = sharded(small_model())
    for backward_first, remedy, call in (
        (True, "call optimizer.backward", lambda optimizer: optimizer.accumulate(3.0)),
        (True, "call optimizer.backward", lambda optimizer: optimizer.accumulate(torch.tensor(3.0), last=True)),
        (False, "DTensor: fully_shard", lambda optimizer: af.release_gradients(optimizer)),
    ):
        optimizer = adamw(model)
        if backward_first:
            backward(model)
        with refused_whole(optimizer, remedy):
            call(optimizer)
        model.zero_grad()
    for setting in ("process_group",):
        for calls in ("accumulate", "step", "backward"):
            optimizer = adamw(model, **{setting: dist.group.WORLD})
            loss = models.loss_of(model, 0, 0, 0, 3)
            if calls != "backward":
                loss.backward()
            with refused_whole(optimizer, "leave process_group to optimizers"):
                optimizer.backward(loss) if calls == "backward" else getattr(optimizer, calls)()
            model.zero_grad()
    mesh = mesh_over()
    # In an order of its own: torch takes an equal mesh of an earlier test for it.
    without = DeviceMesh("cpu", torch.tensor([1, 0]), _init_backend=False)
    for given, remedy in (
        (DTensor.from_local(torch.ones(2, 3), without, [Shard(0)], run_check=False), "has no process groups"),
        (DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False), "a sum that is pending"),
        (DTensor.from_local(torch.ones(2, 3), mesh_over(2, 1), [Replicate(), Partial()], run_check=False), "pending"),
    ):
        param = nn.Parameter(given)
        param.grad = DTensor.from_local(torch.ones(2, 3), given.device_mesh, given.placements, run_check=False)
        for call in ("accumulate", "step"):
            optimizer = af.AdamW([param], lr=0.1)
            with pytest.raises(RuntimeError, match=remedy):
                getattr(optimizer, call)()
            assert bool((shards.local(param) == 1).all())
            assert not optimizer.state


@contextmanager
def refused_whole(optimizer: Any, remedy: str) -> Iterator[None]:
    """As `refused`, which looks at this process's parts here."""
    before = [(shards.local(param).clone(), shards.local(param.grad)) for param in params_of(optimizer)]
    with pytest.raises(RuntimeError, match=remedy):
        yield
    for param, (value, grad) in zip(params_of(optimizer), before, strict=True):
        assert_same_bits(shards.local(param).detach(), value)
        assert shards.local(param.grad) is grad
    assert not optimizer.state
    optimizer.zero_grad()


@pytest.mark.parametrize(("size", "name"), CHECKS.every)
def test_over_processes(size: int, name: str) -> None:
    CHECKS.assert_passed(size, name)
