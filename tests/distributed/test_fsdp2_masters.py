"""16-bit parameters that are spread over processes: masters, mixed precision, what they take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sharded_models as models
import torch
from compare import assert_same_bits
from sharded_models import (
    adamw,
    assert_unchanged,
    backward,
    everything_whole,
    give_whole_gradients,
    sharded,
    small_model,
    twin_of,
    whole,
)
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import accumfused as af
from accumfused import shards

CHECKS = check = models.Checks(__name__)


@check(2)
def bf16_models_and_mixed_precision_are_those_of_one_process_on_the_same_gradients() -> None:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype, policy in [(torch.bfloat16, {}), (torch.float32, {"mp_policy": mixed})]:
        model = sharded(small_model(dtype), **policy)
        optimizer = adamw(model)
        plain, twin = twin_of(optimizer)
        starts = [param.detach().clone() for param in plain]
        for step in range(models.STEPS):
            backward(model, step, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
            give_whole_gradients(optimizer, plain)
            optimizer.step()
            twin.step()
            optimizer.zero_grad()
        assert_unchanged(optimizer, everything_whole(twin))
        assert not any(torch.equal(param, start) for param, start in zip(plain, starts, strict=True))
        assert ("master_remainder" in optimizer.state[model[0].weight]) == (dtype == torch.bfloat16)


@check(2)
def overwritten_parameters_are_noticed() -> None:
    def by_copy(model: Any, values: list[Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements))

    def by_state_dict(model: Any, values: list[Tensor]) -> None:
        named = zip(model.state_dict().items(), values, strict=True)
        model.load_state_dict({
            name: distribute_tensor(value, param.device_mesh, param.placements) for (name, param), value in named
        })  # fmt: skip

    for overwrite in (by_copy, by_state_dict):
        for masters in ("split16", "fp32"):
            model = sharded(small_model(torch.bfloat16))
            optimizer = adamw(model, master_weights=masters)
            backward(model, 0, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            overwrite(model, [torch.full(param.shape, 3.0, dtype=torch.bfloat16) for param in model.parameters()])
            saved = optimizer.full_precision_state_dict(model)
            assert all(bool((whole(value) == 3).all()) for value in saved.values()), (overwrite, masters)
            plain, twin = twin_of(optimizer, master_weights=masters)
            twin.load_state_dict({**twin.state_dict(), "state": gathered_state(optimizer)})
            backward(model, 1, torch.bfloat16)
            give_whole_gradients(optimizer, plain)
            optimizer.step()
            twin.step()
            assert_unchanged(optimizer, everything_whole(twin))
            assert not any(bool((param == 3).all()) for param in plain)


def gathered_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    state = optimizer.state_dict()["state"]
    return {key: {name: whole(value) for name, value in entries.items()} for key, entries in state.items()}


@check(2)
def full_precision_weights_come_and_go() -> None:
    model = sharded(small_model(torch.bfloat16))
    optimizer = adamw(model)
    for step in range(2):
        backward(model, step, torch.bfloat16)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.full_precision_state_dict(model))
    for name, param in model.named_parameters():
        assert saved[name].dtype == torch.float32
        assert saved[name].placements == param.placements
        assert_same_bits(whole(saved[name]).bfloat16(), whole(param), name)
    assert any(bool((whole(saved[name]).bfloat16().float() != whole(saved[name])).any()) for name in saved)
    for given in (saved, {name: whole(value) for name, value in saved.items()}):
        other = sharded(small_model(torch.bfloat16))
        fresh = adamw(other)
        if given is saved:
            fresh.load_full_precision_state_dict(other, given)
        else:  # whole tensors, which a model of DTensors does not take
            placed = {name: distribute_tensor(v, saved[name].device_mesh, [Shard(0)]) for name, v in given.items()}
            fresh.load_full_precision_state_dict(other, placed)
        for name, value in fresh.full_precision_state_dict(other).items():
            assert_same_bits(whole(value), whole(saved[name]), name)


@check(2)
def memory_reports_count_the_part_that_is_here() -> None:
    model = sharded(small_model(torch.bfloat16))
    optimizer = adamw(model)
    here = sum(shards.local(param).numel() for param in model.parameters())
    tensors = len(list(model.parameters()))
    for _ in range(2):  # before and after states are made
        memory = af.memory_report(optimizer).total
        assert memory.elements == here
        assert (memory.parts["parameters"], memory.parts["masters"]) == (2 * here, 2 * here)
        assert memory.parts["states"] == 8 * here + 4 * tensors
        backward(model, 0, torch.bfloat16)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.backward(models.loss_of(model, 0, 0, 0, 3, torch.bfloat16), weight=3.0)
    assert af.memory_report(optimizer).total.parts["accumulators"] == 4 * here


@pytest.mark.parametrize(("size", "name"), CHECKS.every)
def test_over_processes(size: int, name: str) -> None:
    CHECKS.assert_passed(size, name)
