"""Nothing on the way of a training step asks a device for a value: the host never waits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from device import NoReads

import accumfused as af
from accumfused.core import clipping

WEIGHTS = {"sums": (None,) * 3, "numbers": (3.0, 0.0, 2.0), "tensors": (3.0, 0.0, 2.0), "one tensor": (3.0,)}


@pytest.fixture
def optimizer(emulate_cuda: None) -> af.AdamW:
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    found = af.AdamW(params, lr=torch.tensor(0.1), max_grad_norm=1.0, backend="cuda")
    for p in params:
        p.grad = torch.ones_like(p)
    found.step()  # makes states
    found.zero_grad()
    return found


@pytest.mark.pairwise(weights=[*WEIGHTS], last=[False, True], how=["after", "in the loss", "released"], scaled=[0, 1])
def test_a_window_reads_no_value(weights: str, last: bool, how: str, scaled: bool, optimizer: af.AdamW) -> None:
    params = optimizer.param_groups[0]["params"]
    scaler = af.GradScaler("cpu", init_scale=4.0)
    if how == "released":
        af.release_gradients(optimizer, 100)
    for _ in range(2):
        for index, number in enumerate(WEIGHTS[weights]):
            weight = torch.tensor(number) if "tensor" in weights else number
            closes = last and index == len(WEIGHTS[weights]) - 1
            with NoReads():
                loss = sum((p * p).sum() for p in params)
                loss = scaler.scale(loss) if scaled else loss
                if how == "after":
                    loss.backward()
                    optimizer.accumulate(weight, last=closes)
                else:
                    optimizer.backward(loss, weight, last=closes)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with NoReads():
            (scaler.step if scaled else type(optimizer).step)(optimizer, normalizer=torch.tensor(4.0))
            if scaled:
                scaler.update()
    assert int(optimizer.skipped_steps) == 0


def test_steps_from_p_grad_read_no_value_and_the_watch_sees_reads(optimizer: af.AdamW) -> None:
    for _ in range(2):
        with NoReads():
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
    with NoReads(), pytest.raises(AssertionError, match="waits for the device"):
        float(optimizer.skipped_steps)
    with NoReads(), pytest.raises(AssertionError, match="goes through the CPU's memory"):
        torch.zeros(2)[1] = 3.0


@pytest.mark.parametrize(
    "policy",
    [
        {"max_grad_norm": 0.5}, {"clip": af.PerTensor(0.5)},
        {"clip": af.ZScore(0.1, warmup=2), "skip_above": af.RunningMean(warmup=1)},
    ],
    ids=str,
)  # fmt: skip
def test_no_policy_of_clipping_reads_a_value(
    policy: dict[str, Any], emulate_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "ieee", contextlib.nullcontext)  # asks for a CPU's float mode
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    optimizer = af.AdamW([{"params": [p]} for p in params], backend="cuda", **policy)
    if "max_grad_norm" in policy:
        optimizer.param_groups[1]["max_grad_norm"] = 0.3
    for step in range(4):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + step)
        with NoReads() if step else contextlib.nullcontext():
            if step % 2:
                optimizer.accumulate(torch.tensor(2.0))
            optimizer.step()
            optimizer.state_dict()
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("last", [False, True], ids=["open", "closed"])
def test_neither_a_clip_group_nor_saving_reads_a_value(emulate_cuda: None, last: bool) -> None:
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    optimizers = [af.AdamW([p], capturable=True, backend="cuda") for p in params]
    group = af.ClipGroup(optimizers, 1.0)
    for step in range(2):
        for weight in (2.0, torch.tensor(3.0)):
            for p, optimizer in zip(params, optimizers, strict=True):
                p.grad = torch.ones_like(p)
                with NoReads():
                    optimizer.accumulate(weight, last=last and isinstance(weight, torch.Tensor))
        before, normalizer = params[0].detach().clone(), torch.tensor(2.0)
        with NoReads() if step else contextlib.nullcontext():
            for optimizer in optimizers if step else []:
                optimizer.state_dict()
            group.step(normalizer=normalizer)
        assert not torch.equal(params[0], before)
