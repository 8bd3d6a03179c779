"""torch.compile: functions that step run as they are, with a graph break around each call; models may be compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from compare import assert_close
from table import random_params
from torch import Tensor, _dynamo
from torch._dynamo.utils import counters

import accumfused as af

pytestmark = [  # the compiler's own, of a loss that lives on from one part of the function to the next
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def window(model: Any, optimizer: Any, batch: Tensor) -> None:
    for part in batch.split(2):
        model(part).square().mean().backward()
        optimizer.accumulate(float(len(part)))
    optimizer.step()


def own_backward(model: Any, optimizer: Any, batch: Tensor) -> None:
    optimizer.backward(model(batch).square().mean(), 3.0, last=True)
    optimizer.step(normalizer=2.0)


def with_closure(model: Any, optimizer: Any, batch: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def step_alone(model: Any, optimizer: Any, batch: Tensor) -> None:
    optimizer.step()


@pytest.mark.parametrize("function", [
    window, own_backward, with_closure, step_alone,
    pytest.param(None, marks=pytest.mark.full),  # the model, by inductor, which takes ten seconds
])  # fmt: skip
def test_a_compiled_function_or_model(backend: str, function: Any) -> None:
    torch.compiler.reset()
    counters.clear()
    results = []
    compile_it = functools.partial(torch.compile, backend="aot_eager" if function else "inductor")
    for compiled in (lambda each: each, compile_it):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        model, train = (model, compiled(function)) if function else (compiled(model), window)
        optimizer = af.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.5, backend=backend)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for batch in random_params([(n, 6) for n in (4, 7, 2)]):
            if function is step_alone:
                model(batch).square().mean().backward()
            train(model, optimizer, batch.detach())
            scheduler.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
        results.append([param.detach() for param in model.parameters()])
    for value, expected in zip(*results, strict=True):
        assert_close(value, expected, "model")
    breaks = "\n".join(counters["graph_break"])
    assert "plan.py" not in breaks  # our code is not traced: it breaks where it is called
    assert "FusedOptimizer" in breaks or function in (step_alone, None)
    assert counters["stats"]["unique_graphs"] == 0 or function is not step_alone
    torch.compiler.reset()


@pytest.mark.parametrize("autograd", [False, True], ids=["forward", "backward too"])
def test_a_compiled_loop_of_released_gradients(autograd: bool) -> None:
    def train(param: Tensor, optimizer: Any) -> None:
        for slope in (1.0, 2.0, 3.0):
            ((param + 1) * slope).sum().backward()
            optimizer.accumulate()
        optimizer.step()

    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0)
    torch.compiler.reset()
    with af.release_gradients(optimizer, 1), _dynamo.config.patch(compiled_autograd=autograd):
        for _ in range(2):
            torch.compile(train, backend="aot_eager")(param, optimizer)
    torch.compiler.reset()
    assert param.tolist() == [-12.0] * 4
