"""Optimizers that keep torch's own step, after `fuse`: `p.grad` stays, and a step that failed can be made again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits
from faults import Fault
from torch.nn import Parameter

import accumfused as af

CLASSES: dict[str, dict[str, Any]] = {
    "NAdam": {"lr": 0.1, "weight_decay": 0.1}, "ASGD": {"lr": 0.1, "t0": 1}, "Rprop": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {"normalizer": {}, "grad_scale": {}, "clip": {"max_grad_norm": 0.5}, "as it is": {}}


class Run:
    """Two steps were made of `p.grad`, or a window; the third one is to come."""

    def __init__(self, name: str, how: str, window: str, steps: int = 2, **options: Any) -> None:
        self.params = [Parameter(torch.linspace(-1, 1, size)) for size in (6, 3)]
        groups = [{"params": [param]} for param in self.params]
        optimizer = getattr(torch.optim, name)(groups, **CLASSES[name], **options)
        self.optimizer: Any = af.fuse(optimizer, backend="torch", **HOW[how])
        self.how, self.window = how, window
        for _ in range(steps):
            self.prepare()
            self.step()
        self.prepare()

    def prepare(self) -> None:
        self.optimizer.zero_grad()
        for number in range(1 if self.window == "p.grad" else 2):
            for param in self.params:
                param.grad = (number + 1.0) * torch.linspace(0.3, 1, len(param))
            if self.window != "p.grad":
                self.optimizer.accumulate(1.0, last=self.window == "closed" and number == 1)

    def step(self) -> None:
        if self.how == "grad_scale":
            self.optimizer.grad_scale = torch.tensor(4.0)
        self.optimizer.step(normalizer=4.0 if self.how == "normalizer" else None)

    def grads(self) -> list[Any]:
        return [None if param.grad is None else param.grad.tolist() for param in self.params]

    def values(self) -> dict[str, Any]:
        """Weights and states, but for the window's own."""
        values = {f"weight {index}": param.detach().clone() for index, param in enumerate(self.params)}
        for index, entries in self.optimizer.state_dict(window=False)["state"].items():
            values |= {f"{name} {index}": torch.as_tensor(value) for name, value in entries.items()}
        return copy.deepcopy(values)


@pytest.mark.pairwise(name=[*CLASSES], how=[*HOW], window=["p.grad", "open", "closed"], foreach=[False, True])
def test_p_grad_stays_until_zero_grad_and_a_windows_is_released(
    name: str, how: str, window: str, foreach: bool
) -> None:
    run = Run(name, how, window, foreach=foreach)
    before = run.grads()
    run.step()
    assert run.grads() == (before if window == "p.grad" else [None, None])


@pytest.mark.pairwise(
    name=[*CLASSES], how=[*HOW], window=["p.grad", "open", "closed"], foreach=[False, True], steps=[0, 2]
)
def test_a_step_without_memory_is_made_again_or_refused(
    name: str, how: str, window: str, foreach: bool, steps: int, request: pytest.FixtureRequest
) -> None:
    """It is refused where torch's step has written some weights or states; `p.grad` is as it was in any case.

    Every second call fails, others of `foreach`; with --full each of them.
    """

    def made() -> Run:
        return Run(name, how, window, steps, foreach=foreach)

    whole = made()
    with Fault(None) as counted:
        whole.step()
    expected, outcomes = whole.values(), list[str]()
    every = request.config.getoption("--full")
    for at in range(1, counted.seen + 1) if every else range(1 + foreach, counted.seen + 1, 2):
        run = made()
        before = run.grads()
        with Fault(at), pytest.raises(MemoryError):
            run.step()
        assert run.grads() == before
        if "window: broken" in repr(run.optimizer):
            outcomes.append("refused")
            with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
                run.step()
            run.prepare()
            run.step()
            continue
        outcomes.append("again")
        run.step()
        assert_all_same_bits(run.values(), expected)
    assert outcomes == sorted(outcomes)  # all that may be repeated come first
    assert outcomes[0] == "again"


def test_gradients_that_share_memory_are_scaled_once() -> None:
    """One tensor is p.grad of two parameters, and a view with a stride of 0 is that of a third."""
    params = [Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer: Any = af.fuse(torch.optim.ASGD(params, lr=1.0, lambd=0.0), backend="torch")
    params[0].grad = params[1].grad = torch.full((3,), 8.0)
    params[2].grad = torch.tensor(8.0).expand(3)
    optimizer.step(normalizer=4.0)
    assert [param.tolist() for param in params] == [[-2.0] * 3] * 3
