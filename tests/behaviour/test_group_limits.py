"""Limits of parameter groups, beside the settings and in checkpoints. Numbers: numbers/test_clip_policies.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import params_of, refused, writes_nothing
from models import ROUTES, Pair
from table import Own, random_grads, random_params, set_grads
from torch import nn

import accumfused as af

SHAPES = [(10, 6), (6,)]


def optimizer_of(*limits: Any, kind: Any = af.AdamW, lr: float = 0.1, **settings: Any) -> Any:
    """Of two parameters, each with a group; `limits` are those of the groups that have the key."""
    groups: list[dict[str, Any]] = [{"params": [param]} for param in random_params(SHAPES)]
    for group, limit in zip(groups, limits, strict=False):
        group |= {} if limit == "none" else {"max_grad_norm": limit}
    return kind(groups, lr=lr, backend=settings.pop("backend", "cpu"), **settings)


def train(optimizer: Any, seed: int) -> None:
    set_grads(params_of(optimizer), random_grads(params_of(optimizer), seed))
    optimizer.step()


def moved_by_ones(optimizer: Any) -> list[float]:
    """How far a step of SGD moves both parameters, for gradients of ones and a learning rate of 1."""
    params = params_of(optimizer)
    before = [param.detach().clone() for param in params]
    set_grads(params, map(torch.ones_like, before))
    optimizer.step()
    both = zip(params, optimizer.param_groups, before, strict=True)
    return [float((param.detach() - old).norm()) / group["lr"] for param, group, old in both]


LENGTHS = math.sqrt(60), math.sqrt(6)
SHARES = [length / math.sqrt(66) for length in LENGTHS]  # of a global norm of 1
MEETINGS = {  # settings, limits of the two groups ("none": no key), and how far each may move
    "one norm": ({"max_grad_norm": 1.0}, ("none", "none"), SHARES),
    "one norm beside None": ({"max_grad_norm": 1.0}, (None, None), SHARES),
    "no limit": ({}, (None, None), LENGTHS),
    "a default": ({"max_grad_norm": 1.0}, (0.5, "none"), (0.5, 1.0)),
    "a default for None": ({"max_grad_norm": 1.0}, (None, 0.5), (1.0, 0.5)),
    "all have one": ({}, (0.5, 0.25), (0.5, 0.25)),
    "infinity": ({"max_grad_norm": 0.1}, (0.5, math.inf), (0.5, LENGTHS[1])),
    "skip_above beside them": ({"skip_above": 9.0}, (0.5, 0.25), (0.5, 0.25)),
    "skip_above is global": ({"skip_above": 8.0}, (0.5, 0.25), (0.0, 0.0)),
    "no default": ({}, (0.5, "none"), "parameter group 1 has no max_grad_norm, and others have"),
    "None is none": ({}, (0.5, None), "parameter group 1 has no max_grad_norm, and others have"),
    "PerTensor": ({"clip": af.PerTensor(1.0)}, (0.5, 0.5), "does not clip groups"),
    "ZScore": ({"clip": af.ZScore()}, ("none", 0.5), "does not clip groups"),
}


@pytest.mark.parametrize("name", MEETINGS)
@pytest.mark.parametrize("later", [False, True])
def test_limits_of_groups_meet_the_settings(name: str, later: bool) -> None:
    """Given with the group, or written into it between two steps, beside a scheduler."""
    settings, limits, expected = MEETINGS[name]
    if later:
        optimizer = optimizer_of(kind=af.SGD, lr=1.0, **settings)
        moved_by_ones(optimizer)
        for group, limit in zip(optimizer.param_groups, limits, strict=True):
            group |= {} if limit == "none" else {"max_grad_norm": limit}
        if isinstance(expected, str):
            with refused(optimizer, ValueError, expected):
                moved_by_ones(optimizer)
            return
    elif isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            optimizer_of(*limits, kind=af.SGD, lr=1.0, **settings)
        return
    else:
        optimizer = optimizer_of(*limits, kind=af.SGD, lr=1.0, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        assert moved_by_ones(optimizer) == pytest.approx(list(expected), rel=1e-5)
        scheduler.step()


@pytest.mark.parametrize("name", ["clip", "metrics", "noise_scale"])
def test_what_is_one_for_all_groups_is_refused_in_one_also_between_steps(name: str) -> None:
    optimizer = optimizer_of()
    train(optimizer, 0)
    optimizer.param_groups[1][name] = 3.0
    with refused(optimizer, ValueError, f"parameter group 1 has '{name}', which is one for all groups"):
        optimizer.step()
    own: Any = af.fuse(Own([{"params": [nn.Parameter(torch.ones(2))], name: 3.0}], lr=1.0))  # its step may read it
    train(own, 0)


def test_limits_that_cannot_be_are_refused_before_anything_is_changed() -> None:
    optimizer = optimizer_of()
    train(optimizer, 0)
    first, second = optimizer.param_groups
    first["max_grad_norm"] = 0.5
    for bad in (0.0, -1.0, math.nan):
        second["max_grad_norm"] = bad
        with refused(optimizer, ValueError, "max_grad_norm of parameter group 1 must be > 0"):
            optimizer.step()
    second["max_grad_norm"] = 0.5
    with writes_nothing(optimizer), pytest.raises(ValueError, match="group 2 has no max_grad_norm"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(ValueError, match="does not clip groups"):
        optimizer_of(clip=af.PerTensor(1.0)).add_param_group({"params": [torch.ones(1)], "max_grad_norm": 1.0})
    first, second = random_params(SHAPES)
    stock = torch.optim.AdamW([{"params": [first], "max_grad_norm": 1.0}, {"params": [second]}])
    with pytest.raises(ValueError, match="group 1 has no max_grad_norm"):
        af.fuse(stock)
    assert type(stock) is torch.optim.AdamW


def by_torch(old: Pair, new: Pair) -> Pair:
    stock = torch.optim.AdamW([{"params": group["params"]} for group in old[1].param_groups])
    stock.load_state_dict(old[1].state_dict())
    new[1].load_state_dict(stock.state_dict())
    return new


@pytest.mark.parametrize("route", ["torch", *(name for name in ROUTES if name != "flat names")])
def test_checkpoints_bring_the_limits_of_groups_as_any_option_of_a_group(route: str) -> None:
    old, new = (
        (model, af.AdamW([{"params": [param]} for param in model.parameters()], max_grad_norm=1.0))
        for model in (nn.Linear(6, 10), nn.Linear(6, 10))
    )
    for group, limit in zip(old[1].param_groups, (0.5, None), strict=True):
        group["max_grad_norm"] = limit
    train(old[1], 0)
    _, resumed = (ROUTES | {"torch": by_torch})[route](old, new)
    assert [group["max_grad_norm"] for group in resumed.param_groups] == [0.5, None]


def test_a_checkpoint_without_limits_leaves_those_that_are_there() -> None:
    limited, plain = optimizer_of(0.5, 0.5), optimizer_of()
    train(plain, 0)
    limited.load_state_dict(plain.state_dict())
    assert [group["max_grad_norm"] for group in limited.param_groups] == [0.5, 0.5]
