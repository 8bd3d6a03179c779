"""One norm over several optimizers, as clip_grad_norm_ over all their parameters would take it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from snapshot import refused
from table import set_grads
from torch import Tensor

import accumfused as af

BETWEEN = r"step all of them after the last backward\(\)"


def pair(
    backend: str, limit: float = 1e9, modes: Any = (None, None), momentum: float = 0.0
) -> tuple[list[Tensor], list[Any]]:
    params = [torch.zeros(4).requires_grad_() for _ in modes]
    optimizers = [
        af.SGD([param], lr=1.0, momentum=momentum, nonfinite=mode, backend=backend)
        for param, mode in zip(params, modes, strict=True)
    ]
    af.clip_together(optimizers, 1.0).max_grad_norm = limit
    set_grads(params, [torch.ones(4)] * 2)
    return params, optimizers


@pytest.mark.pairwise(
    foreign=[False, True], order=[(0, 1), (1, 0)],
    copied=[list, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))],
)  # fmt: skip
def test_whoever_steps_first_and_copies_too(backend: str, foreign: bool, order: tuple[int, ...], copied: Any) -> None:
    """Also where the gradients of all are views of one buffer, as DDP's, and one is clipped where it lies."""
    given = [torch.zeros(4).requires_grad_() for _ in range(2)]
    optimizers: Any = [af.SGD(given[:1], lr=1.0, backend=backend), torch.optim.RMSprop(given[1:], lr=1.0, alpha=0.0)]
    optimizers[1] = af.fuse(optimizers[1], backend=backend) if foreign else af.SGD(given[1:], lr=1.0, backend=backend)
    af.clip_together(optimizers, 2.5)
    optimizers = copied(optimizers)
    params = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    for _ in range(2):
        for param, grad in zip(params, torch.tensor([3.0] * 4 + [4.0] * 4).split(4), strict=True):
            param.grad = grad  # of the norm 10
        for index in order:
            optimizers[index].step()
            assert_close(optimizers[index].grad_norm, torch.tensor(10.0), "norm")
    assert_close(params[0], torch.full((4,), -1.5), "norm")
    assert_close(params[1], torch.full((4,), -2.0), "norm")


def test_released_gradients_without_windows_are_clipped_together(backend: str) -> None:
    params, optimizers = pair(backend)
    for optimizer in optimizers:
        af.release_gradients(optimizer)
        optimizer.zero_grad()
    sum(param.sum() for param in params).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [param.tolist() for param in params] == [[-1.0] * 4] * 2


CHANGES: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "backward()": (lambda param, optimizer: (param * 2).sum().backward(), BETWEEN),
    "another gradient": (lambda param, optimizer: set_grads([param], [torch.ones(4)]), BETWEEN),
    "a micro-batch": (lambda param, optimizer: optimizer.accumulate(), BETWEEN),
    "a scale": (lambda param, optimizer: setattr(optimizer, "grad_scale", 1.0), "all or none of them unscaled"),
    "a normalizer": (lambda param, optimizer: None, "with the same normalizer, and all or"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_their_steps_is_refused(backend: str, name: str) -> None:
    change, text = CHANGES[name]
    params, (first, second) = pair(backend)
    first.step()
    change(params[1], second)
    with refused(second, RuntimeError, text):
        second.step(normalizer=2 if name == "a normalizer" else None)
    second.grad_scale = None
    for optimizer in (first, second):
        optimizer.zero_grad()
    set_grads(params, [torch.ones(4)] * 2)  # they begin again, with a new norm, and then with another one
    for normalizer in (torch.full((), 2.0), 1.0):
        for optimizer in (second, first):
            optimizer.step(normalizer=normalizer)
    assert [param.tolist() for param in params] == [[-2.5] * 4, [-1.5] * 4]


def test_an_error_in_one_leaves_no_norm_for_others(backend: str) -> None:
    params, (first, second) = pair(backend, momentum=0.5)
    scaler = af.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(second)  # a quarter
    with refused(first, RuntimeError, r"call scaler\.unscale_\(\) on all of them or on none"):
        scaler.step(first)
    second.accumulate()
    set_grads(params[1:], [torch.ones(4)])
    with refused(first, RuntimeError, "a gradient that was not accumulated"):
        first.step()
    second.accumulate()
    first.step()
    assert_close(first.grad_norm, torch.tensor(4 * 1.0**2 + 4 * 1.25**2).sqrt(), "norm")
    second.add_param_group({"params": [torch.ones(2).requires_grad_()]})  # which has no gradient yet
    second.step()
    assert params[1].tolist() == [-1.25] * 4
    for _ in range(2):  # one that steps twice is measured again; the other has no gradient now
        first.step()
    assert_close(first.grad_norm, torch.tensor(2.0), "norm")


@pytest.mark.pairwise(
    order=[(0, 1), (1, 0)],
    row=[((None, None), 7.5e18, False), (("propagate", None), math.nan, False), (("propagate",) * 2, 7.5e18, True)],
)  # fmt: skip
def test_a_norm_that_is_not_finite_is_skipped(backend: str, order: tuple[int, ...], row: Any) -> None:
    """Also where no part overflows, by others than those that propagate; for a scaler, by all."""
    modes, value, for_scaler = row
    params, optimizers = pair(backend, 1.0, modes)
    set_grads(params, [torch.full((4,), value), torch.full((4,), 7.5e18)])  # four squares are below 3.4e38, eight above
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for index in order:
        (scaler.step if for_scaler else type(optimizers[index]).step)(optimizers[index])
    assert params[1].tolist() == [0.0] * 4
    assert int(optimizers[1].skipped_steps) == 1


def sgd(**settings: Any) -> af.SGD:
    return af.SGD([torch.ones(2).requires_grad_()], **settings)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "one": (lambda a: ([a], 1.0), ValueError, "two or more different optimizers, got 1"),
    "twice the same": (lambda a: ([a, a], 1.0), ValueError, "two or more different optimizers"),
    "torch's": (lambda a: ([a, torch.optim.SGD([torch.ones(1)])], 1.0), TypeError, r"got SGD; convert it with accumf"),
    "none": (lambda a: ([a, sgd()], None), TypeError, "must be a number, got None; inf is off"),
    "zero": (lambda a: ([a, sgd()], 0), ValueError, "max_grad_norm must be > 0, got 0; inf is off"),
    "its own": (lambda a: ([a, sgd(max_grad_norm=1.0)], 1.0), ValueError, "has a max_grad_norm of its own"),
    "shared": (lambda a: ([a, af.SGD(a.param_groups[0]["params"])], 1.0), ValueError, "a parameter is in two of the"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_clipped_together_is_refused_and_not_bound(name: str) -> None:
    given, error, text = WRONG[name]
    one, other = sgd(), sgd()
    with pytest.raises(error, match=text):
        af.clip_together(*given(one))
    af.clip_together([one, other], 1.0)  # so it was not bound
    with refused(one, ValueError, "clipped together with others already"):
        af.clip_together([one, sgd()], 1.0)
    with refused(one, ValueError, r"set it on what clip_together\(\) returned"):
        one.max_grad_norm = 1.0
    with refused(one, ValueError, "a parameter is in two of the optimizers"):
        one.add_param_group({"params": other.param_groups[0]["params"]})
