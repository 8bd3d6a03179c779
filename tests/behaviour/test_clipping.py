"""Policies of clipping: whom they serve, what is refused, and what skips leave; test_histories.py has what is kept."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import inside
import pytest
import torch
from compare import differences, params_of, refused, snapshot
from models import grads_of
from torch import nn

import accumfused as af

POLICIES: list[dict[str, Any]] = [
    {"of_groups": 0.5}, {"clip": af.PerTensor(0.5)},
    {"clip": af.ZScore(1.0, 0.9, 2)}, {"max_grad_norm": 1.0, "skip_above": af.RunningMean(2.0, 0.9, 1)},
    {"clip": af.ZScore(1.0, 0.9, 2), "skip_above": 50.0},
]  # fmt: skip


def optimizer_of(**settings: Any) -> Any:
    """Of a matrix and a vector, each with a group, and with the limit `of_groups`."""
    own = {"max_grad_norm": limit} if (limit := settings.pop("of_groups", None)) else {}
    weight, bias = nn.Parameter(torch.linspace(-1, 1, 60).view(10, 6)), nn.Parameter(torch.ones(6))
    groups = [{"params": [weight], **own}, {"params": [bias], "lr": 0.2, **own}]
    return af.AdamW(groups, lr=0.1, backend=settings.pop("backend", "cpu"), **settings)


def set_grads(optimizer: Any, seed: int, factor: float = 1.0) -> None:
    grads_of(optimizer, seed)
    for param in params_of(optimizer):
        param.grad.mul_(factor)


def train(optimizer: Any, *seeds: int, windows: bool = False) -> None:
    for seed in seeds:
        set_grads(optimizer, seed, 30.0 if seed % 4 == 3 else 1.0)
        if windows:
            optimizer.accumulate()
        optimizer.step()


@contextlib.contextmanager
def writes_nothing_but_skips(optimizer: Any) -> Iterator[None]:
    before = snapshot(optimizer)
    yield
    assert optimizer.step_was_skipped
    assert differences(before, snapshot(optimizer)) == ["skipped steps"]


# ---- whom they serve ------------------------------------------------------------------------------------------------


class OwnSGD(torch.optim.SGD):
    """A class that is not torch's, so it keeps its own step."""


@pytest.mark.parametrize(("clip", "own"), [(af.PerTensor(1.0), {}), (None, {"max_grad_norm": 1.0})])
def test_an_optimizer_with_its_own_step_sees_gradients_clipped_by_themselves(clip: Any, own: dict[str, float]) -> None:
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(3))]
    optimizer: Any = af.fuse(OwnSGD([{"params": [param], **own} for param in params], lr=1.0), clip=clip)
    for param, slope in zip(params, (3.0, 0.1, 7.0), strict=True):
        param.grad = torch.full_like(param, slope)
    params[2].grad = None
    optimizer.step()
    moved = [(-param.detach()).tolist() for param in params]
    assert moved[0] == pytest.approx([0.5] * 4, rel=1e-5)
    assert moved[1] == pytest.approx([0.1] * 9)
    assert moved[2] == [0.0] * 3
    assert params[0].grad.tolist() == [3.0] * 4, "p.grad stays"


def test_a_limit_may_be_set_later_and_is_in_the_printed_form() -> None:
    optimizer = optimizer_of(max_grad_norm=0.5)
    optimizer.max_grad_norm = 0.25
    assert "max_grad_norm: 0.25" in repr(optimizer)


# ---- skips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_skipped_step_leaves_every_bit_and_the_history(policy: dict[str, Any]) -> None:
    optimizer = optimizer_of(**policy)
    train(optimizer, 0, 1, 2)
    set_grads(optimizer, 5)
    optimizer.param_groups[0]["params"][0].grad[3, 3] = torch.nan
    with writes_nothing_but_skips(optimizer):
        optimizer.step()


def test_a_tensor_whose_norm_is_lost_skips_the_step() -> None:
    """Its squares vanish in fp32, and the divisor makes it large all the same."""
    optimizer = optimizer_of(clip=af.PerTensor(1.0))
    train(optimizer, 0)
    for (param,), slope in zip((group["params"] for group in optimizer.param_groups), (1e-30, 1e-12), strict=True):
        param.grad = torch.full_like(param, slope)
    with writes_nothing_but_skips(optimizer):
        optimizer.step(normalizer=torch.tensor(1e-20))
    assert math.isfinite(float(optimizer.grad_norm))


@pytest.mark.parametrize("policy", [{"clip": af.PerTensor(1.0)}, {"of_groups": 1.0}])
def test_a_tiny_divisor_beside_several_norms_is_refused_because_zeros_would_skip(policy: dict[str, Any]) -> None:
    optimizer = optimizer_of(**policy)
    train(optimizer, 0)
    set_grads(optimizer, 1, 1e-12)
    optimizer.param_groups[0]["params"][0].grad.zero_()
    with refused(optimizer, ValueError, r"divided by 1e-20, which is below 2\^-50"):
        optimizer.step(normalizer=1e-20)
    optimizer.grad_scale = 1e-10
    with refused(optimizer, ValueError, "below 2"):
        optimizer.step(normalizer=1e-10)
    optimizer.step(normalizer=1e-5)
    assert not optimizer.step_was_skipped
    globally = optimizer_of(max_grad_norm=1.0)
    set_grads(globally, 1)
    globally.param_groups[0]["params"][0].grad.zero_()
    globally.step(normalizer=1e-20)
    assert not globally.step_was_skipped


def test_a_loss_scale_backs_off_for_overflows_and_not_for_norms_above_the_limit() -> None:
    optimizer, scaler = optimizer_of(skip_above=10.0), af.GradScaler("cpu", init_scale=4.0)
    for factor, scale in ((4.0, 4.0), (1e3, 4.0), (math.inf, 2.0)):
        set_grads(optimizer, 0, factor)
        scaler.scale(torch.ones(()))  # makes its scale
        scaler.step(optimizer)
        assert bool(optimizer.step_was_skipped) is (factor > 4.0)
        scaler.update()
        assert scaler.get_scale() == scale


def test_many_skips_above_the_limit_are_told_and_as_an_error_do_not_repeat_the_step() -> None:
    """af.strict() makes one of the warning, which comes after a step."""
    optimizer = optimizer_of(skip_above=1e-3)
    with pytest.raises(UserWarning, match=r"steps were skipped.*non-finite gradients or norms above skip_above"):
        train(optimizer, *range(3 * 32), windows=True)
    assert not inside.open_window(optimizer)


# ---- refusals -------------------------------------------------------------------------------------------------------

BAD = {
    "a negative limit": (lambda: af.PerTensor(-1.0), "max_norm must be > 0"),
    "no number": (lambda: af.PerTensor("1"), "max_norm must be a number"),  # type: ignore[arg-type]
    "a limit of 0": (lambda: af.PerTensor(0), "max_norm must be > 0"),
    "NaN": (lambda: af.PerTensor(math.nan), "max_norm must be > 0"),
    "one norm": (lambda: af.ZScore(warmup=1), "warmup must be a whole number >= 2"),
    "no history": (lambda: af.RunningMean(warmup=0), "warmup must be a whole number >= 1"),
    "a decay of 1": (lambda: af.ZScore(decay=1.0), "decay must be a number between 0 and 1"),
    "no threshold": (lambda: af.ZScore(0.0), "threshold must be > 0"),
    "below the mean": (lambda: af.RunningMean(1.0), "times must be a number > 1"),
    "both": (lambda: optimizer_of(clip=af.PerTensor(1.0), max_grad_norm=1.0), "give one of them"),
    "no policy": (lambda: optimizer_of(clip=1.0), "clip must be af.clip.PerTensor"),
    "a negative norm": (lambda: optimizer_of(skip_above=-1.0), "skip_above must be > 0"),
    "no skips": (lambda: optimizer_of(skip_above=1.0, nonfinite="propagate"), "nonfinite='propagate'"),
    "errors": (lambda: optimizer_of(skip_above=1.0, nonfinite="raise"), "use nonfinite='skip'"),
}


@pytest.mark.parametrize("name", BAD)
def test_policies_that_cannot_be_are_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


def test_max_grad_norm_cannot_be_set_beside_another_policy() -> None:
    optimizer = optimizer_of(clip=af.PerTensor(1.0))
    with pytest.raises(ValueError, match="give one of them"):
        optimizer.max_grad_norm = 1.0
    assert optimizer.max_grad_norm is None
