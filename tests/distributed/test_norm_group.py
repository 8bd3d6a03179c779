"""norm_group: processes with a part of the parameters each have one norm, one limit and one skip."""

from __future__ import annotations

import functools
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_all_same_bits, assert_close
from table import random_grads, random_params, set_grads

import accumfused as af

SHAPES = [(40, 30), (7,), (300, 5), (11,)]


def trained(params: list[Any], taker: Any, bad: int) -> dict[str, Any]:
    """Three steps with whole gradients in every process; those of step `bad` have an inf, in the first parameter."""
    for step in range(3):
        set_grads(params, random_grads(params, step))
        if step == bad:
            params[0].grad[0, 0] = torch.inf
        taker.step()
    return {str(index): param.detach().clone() for index, param in enumerate(params)}


def zero(bad: int, max_grad_norm: float) -> dict[str, Any]:
    """torch's ZeRO, whose ranks update a part of the parameters each."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    params = random_params(SHAPES)
    settings = {"max_grad_norm": max_grad_norm, "norm_group": dist.group.WORLD}
    return trained(params, ZeroRedundancyOptimizer(params, functools.partial(af.AdamW, **settings), lr=0.1), bad)


def staged(bad: int, max_grad_norm: float) -> dict[str, Any]:
    """A pipeline's stages, in windows: each process has two parameters, and the second's have no gradient at first."""
    params, rank = random_params(SHAPES), dist.get_rank()
    own = params[2 * rank : 2 * rank + 2]
    optimizer = af.AdamW(own, lr=0.1, max_grad_norm=max_grad_norm, norm_group=dist.group.WORLD)
    norms = []
    for step in range(3):
        set_grads(params, random_grads(params, step))
        if step == bad:
            params[0].grad[0, 0] = torch.inf  # type: ignore[index]
        if step == 0 and rank == 1:
            optimizer.zero_grad()
        elif step != 1:
            optimizer.accumulate()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return {"norms": torch.stack(norms), "skipped": optimizer.skipped_steps}


@pytest.mark.parametrize("bad", [-1, 1])
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
def test_zero_has_the_norm_and_the_skips_of_one_process(bad: int, max_grad_norm: float) -> None:
    params = random_params(SHAPES)
    expected = trained(params, af.AdamW(params, lr=0.1, max_grad_norm=max_grad_norm), bad)
    found = processes.agreed(2, zero, bad, max_grad_norm)
    if max_grad_norm > 1:
        assert_all_same_bits(found, expected)
    for name, value in expected.items():
        assert_close(found[name], value, "torch.optim", name)


@pytest.mark.parametrize("bad", [-1, 2])
def test_processes_without_gradients_join_and_all_skip(bad: int) -> None:
    found = processes.agreed(2, staged, bad, 0.5)
    params = random_params(SHAPES)
    wanted = []
    for step in range(3):
        grads = random_grads(params, step)[: 2 if step == 0 else 4]
        wanted.append(torch.cat([grad.flatten() for grad in grads if grad is not None]).norm())
    wanted[bad] = torch.tensor(torch.inf) if bad >= 0 else wanted[bad]
    assert_close(found["norms"], torch.stack(wanted), "norm")
    assert int(found["skipped"]) == (bad >= 0)


def flagged() -> bool:
    """In a worker: whether a step is skipped for which one process's scaler has found an inf."""
    params = random_params(SHAPES)
    optimizer: Any = af.AdamW(params, nonfinite="propagate", norm_group=dist.group.WORLD)
    set_grads(params, random_grads(params, 0))
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))
    optimizer.step()
    return bool(optimizer.step_was_skipped)


def test_what_one_scaler_has_found_all_skip() -> None:
    assert processes.agreed(2, flagged)
