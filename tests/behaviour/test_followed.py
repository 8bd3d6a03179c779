"""What changes between two steps is followed; what a call no longer needs is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compare import assert_close, everything, params_of
from inside import plan_of
from models import grads_of, train
from table import ADAMW_CASE, random_params
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.backends import TorchBackend


def on_first(change: Callable[[Tensor, dict[str, Any]], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: change(params_of(optimizer)[0], optimizer.state[params_of(optimizer)[0]])


def data(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return on_first(lambda param, state: setattr(param, "data", change(param.data)))


def move(optimizer: Any, there: int, back: int) -> None:
    groups = optimizer.param_groups
    groups[back]["params"].insert(0, groups[there]["params"].pop())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda optimizer: None,
    "other strides over the same memory": data(lambda values: values.t()),
    "a part of the same memory": data(lambda values: values[:2]),
    "another size": data(lambda values: torch.ones(6, 4)),
    "two states change names": on_first(
        lambda param, state: (state["exp_avg"].abs_(), *(state.update({to: state.pop(name)}) for to, name in NAMES))
    ),
    "the step count": on_first(lambda param, state: state.update(step=torch.tensor(7.0))),
    "a parameter moves to the next group": lambda optimizer: move(optimizer, 0, 1),
    "a parameter moves to the group before": lambda optimizer: move(optimizer, 1, 0),
    "groups change places": lambda optimizer: optimizer.param_groups.reverse(),
    "a parameter is taken out": lambda optimizer: optimizer.param_groups[1]["params"].pop(),
    "a group is added": lambda optimizer: optimizer.add_param_group({"params": random_params([(5,)])}),
    "an option": lambda optimizer: optimizer.param_groups[1].update(lr=0.01),
    "the norm": lambda optimizer: setattr(optimizer, "max_grad_norm", 0.01),
    "a switch": lambda optimizer: optimizer.param_groups[1].update(amsgrad=True),
}
NAMES = (("was", "exp_avg"), ("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "was"))
UNSEEN = ("nothing", "an option", "the norm")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_is_followed(backend: str, change: str) -> None:
    """The reference watches nothing, and reads everything at each step; then the table does, and the plan."""
    optimizers = []
    for each in ("reference", backend, TorchBackend()):
        optimizer = ADAMW_CASE.make(random_params([(4, 4), (7,), (3,)]), each, max_grad_norm=1.0)
        optimizer.add_param_group({"params": random_params([(6,)], seed=1), "lr": 0.5})
        train(optimizer, 2)
        for seed in range(2):
            grads_of(optimizer, seed, torch.bfloat16)
            optimizer.accumulate()
            optimizer.step()
            if seed == 0:
                known = plan_of(optimizer)
                CHANGES[change](optimizer)
                assert (plan_of(optimizer) is not known) == (change not in UNSEEN or each == "reference")
                first = params_of(optimizer)[0]
                if first.shape != (4, 4):  # whose states were of another shape
                    optimizer.state[first].clear()
                train(optimizer, 2, seed=5)
        optimizers.append(optimizer)
    expected, *others = map(everything, optimizers)
    for found in others:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, "torch.optim", name)
    assert params_of(optimizers[0])[0].isfinite().all()


@pytest.mark.parametrize("call", ["accumulate", "step", "raise"])
def test_gradients_are_let_go(backend: str, call: str) -> None:
    param = Parameter(torch.ones(2))
    optimizer = af.SGD([param], backend=backend, nonfinite="raise" if call == "raise" else None)
    param.grad = torch.full((2,), torch.nan if call == "raise" else 1.0)
    grad = weakref.ref(param.grad)
    with pytest.raises(RuntimeError, match="nothing was updated") if call == "raise" else nullcontext():
        optimizer.accumulate() if call == "accumulate" else optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None


def test_a_window_that_a_step_consumes_and_clears_itself_is_not_told_as_dropped(backend: str) -> None:
    """A second window in a row that is dropped draws a warning, and warnings are errors."""

    class Tidy(torch.optim.RMSprop):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.zero_grad()

    param = Parameter(torch.ones(2))
    optimizer: Any = af.fuse(Tidy([param], lr=0.1), backend=backend)
    for _ in range(3):
        param.grad = torch.ones(2)
        optimizer.accumulate()
        optimizer.step()
    assert param.grad is None
