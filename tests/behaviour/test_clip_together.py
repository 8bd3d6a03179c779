"""One norm over several optimizers, as clip_grad_norm_ over all their parameters would take it."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from snapshot import refused, writes_nothing
from table import random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af

SHAPES = [[(6, 4), (5, 5)], [(40_000,), (3,)], [(7,)]]
LIMIT = 0.5
PER_OPTIMIZER = ("muon", "adamw", "sgd")


def make(module: Any, params: list[list[Tensor]], **settings: Any) -> list[Any]:
    convert: Callable[..., Any] = af.fuse if module is af else lambda optimizer: optimizer
    return [
        convert(torch.optim.Muon(params[0], lr=0.1, weight_decay=0.1), **settings),
        module.AdamW(params[1], lr=0.1, betas=(0.5, 0.7), **settings),
        module.SGD(params[2], lr=0.3, **settings),
    ]


class Both:
    """Ours and a loop of torch's, on the same gradients."""

    def __init__(self, backend: str) -> None:
        self.ours = [random_params(shapes, seed) for seed, shapes in enumerate(SHAPES)]
        self.theirs = [[p.detach().clone().requires_grad_() for p in params] for params in self.ours]
        self.optimizers = make(af, self.ours, backend=backend)
        self.stock = make(torch.optim, self.theirs)
        self.together = af.clip_together(self.optimizers, LIMIT)

    def gradients(self, seed: int, scale: float = 1.0) -> list[Tensor]:
        grads = random_grads([p for params in self.ours for p in params], seed)
        return [grad * scale for grad in grads]

    def set(self, grads: list[Tensor], stock: list[Tensor] | None = None) -> None:
        set_grads([p for params in self.ours for p in params], grads)
        set_grads([p for params in self.theirs for p in params], grads if stock is None else stock)

    def stock_step(self, limit: float = LIMIT) -> Tensor:
        flat = [p for params in self.theirs for p in params]
        # In float64: torch's own norm is off by up to 1e-3 on a CPU.
        norm = torch.cat([p.grad.double().flatten() for p in flat]).norm()
        for param in flat:
            param.grad.mul_(min(1.0, limit / (float(norm) + 1e-6)))
        for optimizer in self.stock:
            optimizer.step()
        return norm

    def check(self, norm: Tensor | None = None) -> None:
        for index, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            for one, other in zip(ours, theirs, strict=True):
                if index == 0:  # Muon's Newton-Schulz steps run in bfloat16, which a last bit of the gradient moves
                    torch.testing.assert_close(one, other, rtol=0, atol=2e-2)
                else:
                    assert_close(one, other, "torch.optim")
        if norm is not None:
            for optimizer in self.optimizers:
                assert_close(optimizer.grad_norm, norm, "norm")


ORDERS = pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)


@ORDERS
@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
@pytest.mark.parametrize("limit", [LIMIT, 1e9])
def test_the_norm_is_over_all_whoever_steps_first(
    backend: str, order: tuple[int, ...], window: str, limit: float
) -> None:
    both = Both(backend)
    both.together.max_grad_norm = limit
    for step in range(3):
        grads = both.gradients(step)
        if window == "p.grad":
            both.set(grads)
        else:
            more = both.gradients(step + 50, scale=3.0)
            for part, weight in ((grads, 1.0), (more, 3.0)):
                set_grads([p for params in both.ours for p in params], part)
                for optimizer in both.optimizers:
                    optimizer.accumulate(weight, last=window == "closed" and weight == 3.0)
            mean = [(a.double() / 4 + b.double() * 3 / 4).float() for a, b in zip(grads, more, strict=True)]
            set_grads([p for params in both.theirs for p in params], mean)
        for index in order:
            both.optimizers[index].step()
        both.check(both.stock_step(limit))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_gradient_that_is_not_finite_makes_all_of_them_skip(backend: str, bad: int) -> None:
    both = Both(backend)
    grads = both.gradients(0)
    before = [[p.detach().clone() for p in params] for params in both.ours]
    both.set(grads)
    both.ours[bad][0].grad.view(-1)[2] = math.inf
    for optimizer in both.optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for x, y in zip(both.ours, before, strict=True) for a, b in zip(x, y, strict=True))
    assert [int(optimizer.skipped_steps) for optimizer in both.optimizers] == [1, 1, 1]
    both.set(grads)
    for optimizer in both.optimizers:
        optimizer.step()
    both.check(both.stock_step())


SCALERS = {"af": af.GradScaler, "stock": torch.amp.GradScaler}


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("unscales", [False, True])
def test_under_a_scaler(backend: str, kind: str, unscales: bool) -> None:
    both = Both(backend)
    scaler = SCALERS[kind]("cpu", init_scale=2.0**12)
    scaler.scale(torch.ones(()))
    for step in range(4):
        grads = both.gradients(step)
        both.set([grad * scaler.get_scale() for grad in grads], grads)
        if step == 2:
            both.ours[1][1].grad[0] = math.nan
        if unscales:
            for optimizer in both.optimizers:
                scaler.unscale_(optimizer)
        for optimizer in both.optimizers:
            scaler.step(optimizer)
        scaler.update()
        if step != 2:
            both.check(both.stock_step())
    assert scaler.get_scale() == 2.0**11


def test_one_without_gradients_adds_nothing(backend: str) -> None:
    both = Both(backend)
    grads = both.gradients(0)
    both.set(grads)
    for param in both.ours[1] + both.theirs[1]:
        param.grad = torch.zeros_like(param)
    for param in both.ours[1]:
        param.grad = None
    for optimizer in both.optimizers:
        optimizer.step()
    norm = both.stock_step()
    assert_close(both.optimizers[0].grad_norm, norm, "norm")
    assert_close(both.ours[2][0], both.theirs[2][0], "torch.optim")
    assert both.optimizers[1].grad_norm is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("between", [False, True])
def test_copies_are_clipped_together_too(copied: Any, between: bool) -> None:
    both = Both("auto")
    if between:  # between their steps: the norm that was taken is not the copies'
        both.set([torch.zeros_like(grad) for grad in both.gradients(0)])
        both.optimizers[2].step()
    both.optimizers = copied(both.optimizers)
    both.ours = [optimizer.param_groups[0]["params"] for optimizer in both.optimizers]
    both.set(both.gradients(0))
    for optimizer in both.optimizers:
        optimizer.step()
    both.check(both.stock_step())


# ---- what is refused -------------------------------------------------------------------------------------------------


def change_in_place(both: Both) -> None:
    (both.ours[1][0].sum() * 2.0).backward()


def change_by_another(both: Both) -> None:
    both.ours[1][0].grad = torch.ones_like(both.ours[1][0])


@pytest.mark.parametrize("change", [change_in_place, change_by_another])
def test_a_gradient_that_changes_between_their_steps_is_refused(backend: str, change: Callable[[Both], None]) -> None:
    both = Both(backend)
    both.set(both.gradients(0))
    both.optimizers[0].step()
    change(both)
    with refused(both.optimizers[1], RuntimeError, r"step all of them after the last backward\(\)"):
        both.optimizers[1].step()
    for optimizer in both.optimizers:
        optimizer.zero_grad()
    fresh = Both(backend)
    both.set(both.gradients(1))
    both.optimizers[1].step()
    fresh.set(fresh.gradients(1))
    fresh.optimizers[1].step()
    assert torch.equal(both.optimizers[1].grad_norm, fresh.optimizers[1].grad_norm)


def test_a_fold_between_their_steps_is_refused(backend: str) -> None:
    both = Both(backend)
    for seed in range(2):
        set_grads([p for params in both.ours for p in params], both.gradients(seed))
        for optimizer in both.optimizers:
            optimizer.accumulate()
    both.optimizers[0].step()
    set_grads(both.ours[1], random_grads(both.ours[1], 9))
    both.optimizers[1].accumulate()
    with refused(both.optimizers[1], RuntimeError, r"step all of them after the last backward\(\)"):
        both.optimizers[1].step()


def test_one_that_was_left_out_is_measured_again(backend: str) -> None:
    both = Both(backend)
    for seed in range(2):
        both.set(both.gradients(seed))
        both.optimizers[0].step()
    assert_close(both.optimizers[0].grad_norm, both.stock_step(), "norm")


@pytest.mark.parametrize("unscaled", [0, 1])
def test_unscaling_some_of_them_is_refused(backend: str, unscaled: int) -> None:
    both = Both(backend)
    scaler = af.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    both.set(both.gradients(0))
    scaler.unscale_(both.optimizers[unscaled])
    remedy = r"call scaler\.unscale_\(\) on all of them or on none"
    with contextlib.ExitStack() as stack:
        for optimizer in both.optimizers[1:]:
            stack.enter_context(writes_nothing(optimizer))
        with refused(both.optimizers[0], RuntimeError, remedy):
            scaler.step(both.optimizers[0])


def test_another_normalizer_or_scale_for_the_second_is_refused(backend: str) -> None:
    for first, second in (({"normalizer": 2.0}, {}), ({}, {"normalizer": 2.0})):
        both = Both(backend)
        both.set(both.gradients(0))
        both.optimizers[0].step(**first)
        with refused(both.optimizers[1], RuntimeError, "with the same normalizer, and all or none of them unscaled"):
            both.optimizers[1].step(**second)
    both = Both(backend)
    both.set(both.gradients(0))
    both.optimizers[0].step(normalizer=2)
    both.optimizers[1].step(normalizer=2.0)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "one": (lambda a, b: ([a], 1.0), ValueError, "two or more different optimizers, got 1"),
    "twice the same": (lambda a, b: ([a, a], 1.0), ValueError, "two or more different optimizers"),
    "torch's": (
        lambda a, b: ([a, torch.optim.SGD([torch.ones(1).requires_grad_()])], 1.0), TypeError,
        r"got SGD; convert it with accumfused\.fuse\(\)",
    ),
    "none": (lambda a, b: ([a, b], None), TypeError, "must be a number, got None; inf is off"),
    "zero": (lambda a, b: ([a, b], 0), ValueError, "max_grad_norm must be > 0, got 0; inf is off"),
    "negative": (lambda a, b: ([a, b], -1.0), ValueError, r"max_grad_norm must be > 0, got -1\.0; inf is off"),
    "its own": (
        lambda a, b: ([a, af.SGD([torch.ones(1).requires_grad_()], max_grad_norm=1.0)], 1.0), ValueError,
        "has a max_grad_norm of its own",
    ),
    "a shared parameter": (
        lambda a, b: ([a, af.SGD(a.param_groups[0]["params"])], 1.0), ValueError, "a parameter is in two of the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_clipped_together_is_refused_and_not_bound(name: str) -> None:
    given, error, text = WRONG[name]
    one, other = (af.SGD([torch.ones(2).requires_grad_()]) for _ in range(2))
    with pytest.raises(error, match=text):
        af.clip_together(*given(one, other))
    assert one._together is None
    af.clip_together([one, other], 1.0)
    with pytest.raises(ValueError, match="clipped together with others already"):
        af.clip_together([one, af.SGD([torch.ones(1).requires_grad_()])], 1.0)
    with pytest.raises(ValueError, match=r"set it on what clip_together\(\) returned"):
        one.max_grad_norm = 1.0
