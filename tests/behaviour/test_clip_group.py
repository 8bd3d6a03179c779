"""One norm over several optimizers, as clip_grad_norm_ over all their parameters would take it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_close, refused
from table import Own, set_grads
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import accumfused as af


def pair(backend: str, limit: float = 1e9, modes: Any = (None, None)) -> tuple[list[Tensor], list[Any], af.ClipGroup]:
    params = [torch.zeros(4).requires_grad_() for _ in modes]
    optimizers = [
        af.SGD([param], lr=1.0, nonfinite=mode, backend=backend) for param, mode in zip(params, modes, strict=True)
    ]
    group = af.ClipGroup(optimizers, 1.0)
    group.max_grad_norm = limit
    set_grads(params, [torch.ones(4)] * 2)
    return params, optimizers, group


@pytest.mark.pairwise(
    foreign=[False, True], copied=[lambda given: given, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))]
)
def test_the_norm_is_that_over_all_members(backend: str, foreign: bool, copied: Callable[[Any], Any]) -> None:
    """Also of a copy, and where all gradients are views of one buffer, as DDP's, and one is clipped where it lies."""
    given = [torch.zeros(4).requires_grad_() for _ in range(2)]
    optimizers: Any = [af.SGD(given[:1], lr=1.0, backend=backend), Own(given[1:], lr=1.0, alpha=0.0)]
    optimizers[1] = af.fuse(optimizers[1], backend=backend) if foreign else af.SGD(given[1:], lr=1.0, backend=backend)
    group = copied(af.ClipGroup(optimizers, 2.5))
    params = [each["params"][0] for each in group.param_groups]
    with pytest.raises(ValueError, match="is in a group already"):
        af.ClipGroup(group.optimizers, 2.5)
    assert group.grad_norm.isnan()
    for _ in range(2):
        for param, grad in zip(params, torch.tensor([3.0] * 4 + [4.0] * 4).split(4), strict=True):
            param.grad = grad  # of the norm 10
        group.step()
        for each in (group, *group.optimizers):
            assert_close(each.grad_norm, torch.tensor(10.0), "norm")
    assert_close(params[0], torch.full((4,), -1.5), "norm")
    assert_close(params[1], torch.full((4,), -2.0), "norm")


def test_released_gradients_without_windows_are_clipped_together(backend: str) -> None:
    params, optimizers, group = pair(backend)
    for optimizer in optimizers:
        af.release_gradients(optimizer)
    group.zero_grad()
    sum(param.sum() for param in params).backward()
    group.step()
    assert [param.tolist() for param in params] == [[-1.0] * 4] * 2


def test_closures_hooks_and_schedulers_of_members_run(backend: str) -> None:
    params, optimizers, group = pair(backend)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    calls: list[Any] = []
    optimizers[0].register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizers[1].register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return torch.ones(())

    assert float(group.step(closure, normalizer=2.0)) == 1.0
    assert calls == ["pre", True, "post"]
    for scheduler in schedulers:
        scheduler.step()  # does not warn that no optimizer has stepped
    assert [each["lr"] for each in group.param_groups] == [0.5, 0.5]
    assert [param.tolist() for param in params] == [[-0.5] * 4] * 2
    group.zero_grad()
    group.step()
    assert params[0].grad is None
    assert group.grad_norm.isnan()  # not that of the step before
    assert [param.tolist() for param in params] == [[-0.5] * 4] * 2


def test_members_do_not_step_alone_and_a_refused_group_changes_none(backend: str) -> None:
    params, (first, second), group = pair(backend)
    first.param_groups[0]["momentum"] = 0.5  # so that there is a state to make
    for optimizer in (first, copy.deepcopy(group).optimizers[1]):
        with refused(optimizer, RuntimeError, r"in a ClipGroup, which clips by one norm; call the group's step\(\)"):
            optimizer.step()
    second.accumulate()
    set_grads(params[1:], [torch.ones(4)])
    with refused(first, RuntimeError, "a gradient that was not accumulated"):
        group.step()
    assert not first.state
    second.accumulate()
    ours, stock = af.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for call in (ours.unscale_, stock.step):
        call.__self__.scale(torch.ones(()))  # type: ignore[attr-defined]
        with refused(second, RuntimeError, "cannot see into an open window"):
            call(group)
    with refused(first, ValueError, "normalizer must be finite and > 0"):
        group.step(normalizer=0.0)
    group.step()
    assert_close(first.grad_norm, torch.tensor(4 * 1.0**2 + 4 * 2.0**2).sqrt(), "norm")


def test_where_a_member_raises_for_a_norm_none_steps(backend: str) -> None:
    params, (first, second), group = pair(backend, modes=(None, "raise"))
    set_grads(params[:1], [torch.full((4,), math.inf)])
    with refused(first, RuntimeError, "the global norm of the gradients is inf, nothing was updated"):
        group.step()
    assert first.step_was_skipped
    assert second.step_was_skipped
    set_grads(params, [torch.ones(4)] * 2)
    group.step()
    assert [param.tolist() for param in params] == [[-1.0] * 4] * 2


@pytest.mark.pairwise(
    scaler=[None, torch.amp.GradScaler, af.GradScaler],
    row=[((None, None), 7.5e18, 1), (("propagate", None), math.nan, 1), (("propagate",) * 2, 7.5e18, 0)],
)
def test_a_norm_that_is_not_finite_skips_all(backend: str, scaler: Any, row: Any) -> None:
    """Also where no part overflows, by others than those that propagate; for a scaler, by all."""
    modes, value, skips = row
    params, optimizers, group = pair(backend, 1.0, modes)
    set_grads(params, [torch.full((4,), value), torch.full((4,), 7.5e18)])  # four squares are below 3.4e38, eight above
    if scaler is None:
        group.step()
    else:
        scales = scaler("cpu", init_scale=1.0)
        scales.scale(torch.ones(()))
        scales.step(group)
        scales.update()
        assert scales.get_scale() == 0.5 or scaler is torch.amp.GradScaler  # which sees finite gradients
    is_skipped = bool(skips or scaler)
    assert [bool(each.step_was_skipped) for each in (group, *optimizers)] == [is_skipped] * 3
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [is_skipped] * 2
    assert (params[1].tolist() == [0.0] * 4) is is_skipped or not skips


@pytest.mark.parametrize("value", [1.0, math.inf])
@pytest.mark.parametrize("has_windows", [False, True])
def test_a_step_that_fails_between_two_members_is_not_made_again(backend: str, value: float, has_windows: bool) -> None:
    """Its norm would be that of the other members alone. Each counts the skip of a step that it has made."""
    params, optimizers, group = pair(backend)
    set_grads(params, [torch.full((4,), value)] * 2)
    for optimizer in optimizers if has_windows else ():
        optimizer.accumulate()
    with inside.fails(optimizers[0], "step"), pytest.raises(RuntimeError, match="out of memory"):
        group.step()  # no member has stepped: it can be made again
    with inside.fails(optimizers[1], "step"), pytest.raises(RuntimeError, match="out of memory"):
        group.step()
    assert [int(each.skipped_steps) for each in optimizers] == [value == math.inf, 0]
    with refused(optimizers[1], RuntimeError, r"ended between two .* call optimizer\.zero_grad\(\)"):
        group.step()
    group.zero_grad()
    set_grads(params, [torch.ones(4)] * 2)
    group.step()
    assert_close(group.optimizers[0].grad_norm, torch.tensor(8.0).sqrt(), "norm")


@pytest.mark.pairwise(
    weights=[(None, None), (2.0, 2.0), (3.0, 5.0), (torch.tensor(2.0), torch.tensor(6.0))],
    scale=[None, 4.0],
    limit=[1.0, 1e9],
)
def test_the_coefficient_is_that_of_one_optimizer(backend: str, weights: Any, scale: Any, limit: float) -> None:
    """With one divisor for all windows bit for bit; else to rounding."""
    torch.manual_seed(0)
    sizes = (5, 40000, 7, 300)
    starts, grads = [torch.randn(n) for n in sizes], [[torch.randn(n) for n in sizes] for _ in weights]
    results = []
    for members in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        params = [start.clone().requires_grad_() for start in starts]
        optimizers = [af.SGD(params[member], lr=0.1, backend=backend) for member in members]
        taker: Any = optimizers[0]
        if len(members) > 1:
            taker = af.ClipGroup(optimizers, limit)
        else:
            taker.max_grad_norm = limit
        for weight, own in zip(weights, grads, strict=True):
            set_grads(params, own)
            for optimizer in optimizers:
                optimizer.accumulate(weight)
        taker.grad_scale = scale
        taker.step(normalizer=3.0)
        results.append(torch.cat([*params, optimizers[0].grad_norm[None]]).detach())
    if isinstance(weights[0], torch.Tensor):
        assert_close(results[1], results[0], "norm")
    else:
        assert torch.equal(*results)


def test_a_hook_before_the_step_counts_in_the_norm(backend: str) -> None:
    params, optimizers, group = pair(backend, limit=1.0)
    optimizers[0].register_step_pre_hook(lambda *_: params[0].grad.mul_(100))  # type: ignore[union-attr]
    group.step()
    assert_close(torch.stack(params).norm(), torch.tensor(1.0), "norm")


def test_a_checkpoint_by_torch_distributed_makes_a_members_states(backend: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizers = [af.SGD(part.parameters(), lr=0.1, momentum=0.9, backend=backend) for part in model]
    af.ClipGroup(optimizers, 1.0)
    saved = get_optimizer_state_dict(model, optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1, 0.1]
    set_optimizer_state_dict(model, optimizers, saved)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("scaler_class", [af.GradScaler, torch.amp.GradScaler])
def test_members_that_were_unscaled_one_by_one_are_not_divided_again(backend: str, scaler_class: Any) -> None:
    _, optimizers, group = pair(backend)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizers[0])
    with refused(optimizers[0], RuntimeError, r"call scaler\.unscale_\(\) on the group"):
        scaler.step(group)


def test_a_member_that_is_copied_without_its_group_waits_for_another_one(backend: str) -> None:
    _, optimizers, _ = pair(backend)
    twins = [copy.copy(optimizers[0]), copy.deepcopy(optimizers[1])]
    with refused(twins[0], RuntimeError, r"in a ClipGroup"):
        twins[0].step()
    af.ClipGroup(twins, 1.0).step()


def sgd(**settings: Any) -> af.SGD:
    return af.SGD([torch.ones(2).requires_grad_()], **settings)


def limited(optimizer: af.SGD) -> af.SGD:
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    return optimizer


def test_schedulers_and_checkpoints_take_the_members_and_the_group_says_so(backend: str) -> None:
    _, _, group = pair(backend)
    with pytest.raises(AttributeError, match=r"has no state_dict: torch optimizers are its members, group\.optimizers"):
        group.state_dict()
    with pytest.raises(TypeError, match="ClipGroup is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(group, 1)  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "one": (lambda a: ([a], 1.0), ValueError, "two or more different optimizers, got 1"),
    "twice the same": (lambda a: ([a, a], 1.0), ValueError, "two or more different optimizers"),
    "none": (lambda a: ([a, sgd()], None), TypeError, "must be a number, got None; inf is off"),
    "zero": (lambda a: ([a, sgd()], 0), ValueError, "max_grad_norm must be > 0, got 0; inf is off"),
    "its own": (lambda a: ([a, sgd(max_grad_norm=1.0)], 1.0), ValueError, "has a max_grad_norm of its own"),
    "a policy": (lambda a: ([a, sgd(clip=af.PerTensor(1.0))], 1.0), ValueError, "a ClipGroup clips by one norm"),
    "a limit of norms": (lambda a: ([a, sgd(skip_above=3.0)], 1.0), ValueError, "a ClipGroup clips by one norm"),
    "a group's limit": (lambda a: ([a, limited(sgd())], 1.0), ValueError, "a ClipGroup clips by one norm"),
    "shared": (lambda a: ([a, af.SGD(a.param_groups[0]["params"])], 1.0), ValueError, "a parameter is in two of the"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_group_is_refused_and_not_bound(name: str) -> None:
    given, error, text = WRONG[name]
    one, other = sgd(), sgd()
    with pytest.raises(error, match=text):
        af.ClipGroup(*given(one))
    group = af.ClipGroup([one, other], 1.0)  # so it was not bound
    with refused(one, ValueError, "is in a group already"):
        af.ClipGroup([one, sgd()], 1.0)
    with refused(one, ValueError, "in a ClipGroup; set max_grad_norm on that"):
        one.max_grad_norm = 1.0
    limited(other)
    with refused(one, ValueError, "a ClipGroup clips by one norm"):
        group.step()
    del other.param_groups[0]["max_grad_norm"]
    one.add_param_group({"params": other.param_groups[0]["params"]})
    with refused(one, ValueError, "a parameter is in two of the optimizers"):
        group.step()
