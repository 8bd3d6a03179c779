"""Optimizers and options that torch has not: their arguments, and checkpoints of torch's and of the authors' code."""

from __future__ import annotations

import copy
import math
from typing import Any

import inside
import pytest
import torch
from compare import assert_same, params_of, train
from table import random_params
from torch.nn import Parameter

import accumfused as af

SHAPES = [(5, 3), (), (7,)]


# ---- warmups --------------------------------------------------------------------------------------------------------


def test_the_slow_means_half_life_grows_linearly_from_a_fast_mean_without_memory(backend: str) -> None:
    """With the authors' 1e-8; a gradient of 1 and then zeros leave a product of betas."""
    param, beta1, end, steps = Parameter(torch.zeros(1)), 0.0, 0.99, 8
    optimizer = af.AdEMAMix([param], betas=(beta1, 0.9, end), beta3_warmup=steps, backend=backend)
    half_life = [math.log(0.5) / math.log(beta + 1e-8) for beta in (beta1, end)]
    value = 0.0
    for step in range(1, steps + 3):
        part = min(step / steps, 1.0)
        beta = 0.5 ** (1 / ((1 - part) * half_life[0] + part * half_life[1]))
        value = beta * value + (1 - beta) * (step == 1)
        param.grad = torch.full((1,), float(step == 1))
        optimizer.step()
        torch.testing.assert_close(optimizer.state[param]["exp_avg_slow"], torch.tensor([value]), rtol=2e-6, atol=0)


# ---- cautious -------------------------------------------------------------------------------------------------------


def test_cautious_elements_against_the_gradient_stay_and_tiny_ones_still_move(backend: str) -> None:
    """A product of a momentum and a gradient of 1e-30 is 0 in fp32."""
    param = Parameter(torch.zeros(4))
    optimizer = af.Lion([param], lr=0.5, betas=(0.9, 0.9), cautious=True, backend=backend)
    found = []
    for grads in ([1.0, 1.0, -1e-30, 1.0], [1.0, -0.5, -1e-30, 0.0]):
        param.grad = torch.tensor(grads)
        optimizer.step()
        found.append(param.tolist())
    assert found == [[-0.5, -0.5, 0.5, -0.5], [-1.0, -0.5, 1.0, -0.5]]


@pytest.mark.parametrize("torch_class", [torch.optim.Adam, torch.optim.AdamW])
def test_cautious_checkpoints_load_in_torch_and_torchs_here(backend: str, torch_class: Any) -> None:
    """A checkpoint without the options switches them off, as one of torch's without amsgrad does."""
    kind = {torch.optim.Adam: af.Adam, torch.optim.AdamW: af.AdamW}[torch_class]
    cautious = kind(random_params(SHAPES), lr=0.1, weight_decay=0.3, cautious=True, backend=backend)
    stock = torch_class(random_params(SHAPES), lr=0.1, weight_decay=0.3)
    plain = kind(random_params(SHAPES), lr=0.1, weight_decay=0.3, backend=backend)
    assert plain.param_groups[0].keys() == stock.param_groups[0].keys()
    train(cautious)
    stock.load_state_dict(copy.deepcopy(cautious.state_dict()))
    plain.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert plain.param_groups[0]["cautious"] is True
    for optimizer in (stock, plain):
        for param, other in zip(params_of(optimizer), params_of(cautious), strict=True):
            param.data.copy_(other.data)
    train(cautious, plain, seed=1)
    assert_same(plain, cautious)
    cautious.load_state_dict(torch_class(random_params(SHAPES)).state_dict())
    assert not cautious.param_groups[0].get("cautious", False)


def test_cautious_may_be_set_at_any_time_and_checkpoints_of_lion_may_lack_it(backend: str) -> None:
    fused = af.fuse(torch.optim.AdamW(random_params([(5,)])), backend=backend)
    fused.param_groups[0]["cautious"] = True  # any time
    twin = af.AdamW(random_params([(5,)]), cautious=True, backend=backend)
    train(fused, twin)
    assert_same(fused, twin)
    lion = af.Lion(random_params([(5,)]), cautious=True, backend=backend)
    older = lion.state_dict()
    del older["param_groups"][0]["cautious"]
    lion.load_state_dict(older)
    assert inside.rule_of(lion, lion.param_groups[0]).name == "lion"


# ---- checkpoints of the authors' code -------------------------------------------------------------------------------


def test_adan_takes_the_authors_count_of_a_groups_steps(backend: str) -> None:
    ours = af.Adan(random_params(SHAPES), lr=0.1, weight_decay=0.2, backend=backend)
    train(ours)
    theirs = copy.deepcopy(ours.state_dict())
    for entries in theirs["state"].values():
        del entries["step"]
    (group,) = theirs["param_groups"]
    group |= {"step": 3, "max_grad_norm": 0.0, "foreach": True, "fused": False}
    del group["maximize"]
    twin = af.Adan([param.detach().clone().requires_grad_() for param in params_of(ours)], backend=backend)
    twin.load_state_dict(theirs)
    train(ours, twin, seed=1)
    assert_same(twin, ours)
