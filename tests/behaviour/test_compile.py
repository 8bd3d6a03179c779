"""torch.compile: functions that step run as they are, with a graph break around each call; models may be compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from table import random_params
from torch import Tensor
from torch._dynamo.utils import counters

import accumfused as af

pytestmark = [  # the compiler's own, of a loss that lives on from one part of the function to the next
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batches() -> list[Tensor]:
    return [batch.detach() for batch in random_params([(n, 6) for n in (4, 7, 2, 5)])]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def plain(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    loss = (model(batch) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def window(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    for part in batch.split(2):
        loss = (model(part) ** 2).mean()
        loss.backward()
        optimizer.accumulate(float(len(part)))
    optimizer.step()
    return loss.detach()


def own_backward(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    loss = (model(batch) ** 2).mean()
    optimizer.backward(loss, 3.0, last=True)
    optimizer.step(normalizer=2.0)
    return loss.detach()


def with_closure(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch) ** 2).mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def train(function: Callable[..., Tensor], backend: str, *, scheduled: bool = False) -> list[Tensor]:
    model = net()
    optimizer = af.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.5, backend=backend)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
    losses = []
    data = batches()
    for batch in data:
        losses.append(function(model, optimizer, batch))
        if scheduler is not None:
            scheduler.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(len(data))}
    return [*losses, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.parametrize("function", [plain, window, own_backward, with_closure], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_compiled_function_that_steps(backend: str, function: Callable[..., Tensor], scheduled: bool) -> None:
    compiled = train(torch.compile(function, backend="aot_eager"), backend, scheduled=scheduled)
    for value, truth in zip(compiled, train(function, backend, scheduled=scheduled), strict=True):
        # The same operators, which the compiler may take apart: some roundings of values around 1.
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)


def test_our_code_is_not_traced(backend: str) -> None:
    train(torch.compile(plain, backend="aot_eager"), backend)
    breaks = "\n".join(counters["graph_break"])
    assert "FusedOptimizer.step" in breaks  # it breaks where it is called
    assert "plan.py" not in breaks
    assert counters["stats"]["unique_graphs"] <= 3  # the model: for one shape, and for any; nothing of the step


def test_a_step_alone_makes_no_graph(backend: str) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), lr=0.1, backend=backend)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    data = batches()
    for batch in data:
        (model(batch) ** 2).mean().backward()
        step()
    assert counters["stats"]["unique_graphs"] == 0
    assert float(optimizer.state[model[0].weight]["step"]) == len(data)


def test_a_compiled_model(backend: str) -> None:
    """With inductor, so that gradients come from generated code."""
    model = net()
    compiled = torch.compile(copy.deepcopy(model))
    results = []
    for each in (model, compiled):
        optimizer = af.AdamW(each.parameters(), lr=0.1, max_grad_norm=0.5, backend=backend)
        for batch in batches()[:2]:
            window(each, optimizer, batch)
        results.append(list(each.parameters()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
