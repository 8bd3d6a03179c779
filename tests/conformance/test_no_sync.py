"""Nothing on the way of a training step asks a device for a value: the host never waits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from device import NoReads

import accumfused as af
from accumfused.core import coefficients

WEIGHTS = {
    "sums": (None,) * 3, "numbers": (3.0, 0.0, 2.0), "tensors": (3.0, 0.0, 2.0), "one tensor": (3.0,),
    "p.grad": (None,),
}  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "one norm": {"max_grad_norm": 1.0}, "groups": {"max_grad_norm": 0.5}, "tensors": {"clip": af.PerTensor(0.5)},
    "histories": {"clip": af.ZScore(0.1, warmup=2), "skip_above": af.RunningMean(warmup=1)},
}  # fmt: skip


@pytest.mark.pairwise(
    policy=[*POLICIES], weights=[*WEIGHTS], last=[False, True], how=["after", "in the loss", "released"], scaled=[0, 1]
)
def test_a_loop_reads_no_value(
    policy: str, weights: str, last: bool, how: str, scaled: bool, emulate_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coefficients, "ieee", contextlib.nullcontext)  # asks for a CPU's float mode
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    groups = [{"params": [p]} for p in params]
    optimizer: Any = af.AdamW(groups, lr=torch.tensor(0.1), backend="cuda", **POLICIES[policy])
    if policy == "groups":
        optimizer.param_groups[1]["max_grad_norm"] = 0.3
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes states
    optimizer.zero_grad()
    scaler = af.GradScaler("cpu", init_scale=4.0)
    if how == "released":
        af.release_gradients(optimizer, 100)
    for _ in range(3):
        for index, number in enumerate(WEIGHTS[weights]):
            weight = torch.tensor(number) if "tensor" in weights else number
            closes = last and index == len(WEIGHTS[weights]) - 1
            with NoReads():
                loss = sum((p * p).sum() for p in params)
                loss = scaler.scale(loss) if scaled else loss
                if how == "after" or weights == "p.grad":
                    loss.backward()
                else:
                    optimizer.backward(loss, weight, last=closes)
                if how == "after" and weights != "p.grad":
                    optimizer.accumulate(weight, last=closes)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with NoReads():
            (scaler.step if scaled else type(optimizer).step)(optimizer, normalizer=torch.tensor(4.0))
            if scaled:
                scaler.update()
            optimizer.zero_grad()
            optimizer.state_dict()
    assert int(optimizer.skipped_steps) == 0


def test_the_watch_sees_reads() -> None:
    with NoReads(), pytest.raises(AssertionError, match="waits for the device"):
        float(torch.ones(()))
    with NoReads(), pytest.raises(AssertionError, match="goes through the CPU's memory"):
        torch.zeros(2)[1].copy_(torch.tensor(3.0))  # as `[1] = 3.0` does before torch 2.15


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
