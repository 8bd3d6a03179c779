"""Gradient release: which parameters have hooks, and what is alive while gradients come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from table import ADAMW_CASE
from test_no_sync import NoReads
from test_release import EACH, SOME, Net, loss_of, net, one
from torch import Tensor, nn

import accumfused as af

# ---- parameters that come later -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["between windows", "in a window"])
def test_a_group_that_is_added_is_released_too(backend: str, when: str) -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([a], lr=1.0, backend=backend)
    release = af.release_gradients(optimizer, EACH)
    (a * 2).sum().backward()
    optimizer.accumulate()
    if when == "between windows":
        optimizer.step()
    optimizer.add_param_group({"params": [b]})
    for _ in range(2):
        (a * 3 + b * 5).sum().backward()
        assert a.grad is None
        assert b.grad is None
        optimizer.accumulate()
    optimizer.step()
    assert a.tolist() == [-8.0] * 3
    assert b.tolist() == [-10.0] * 3
    release.remove()
    (a + b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None


def test_a_parameter_that_is_unfrozen_is_released_from_the_second_micro_batch_on(backend: str) -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = af.SGD([a, b], lr=1.0, backend=backend)
    af.release_gradients(optimizer, EACH)
    b.requires_grad_()
    for micro_batch in range(2):
        (a * 3 + b * 5).sum().backward()
        assert (b.grad is None) == (micro_batch == 1)
        optimizer.accumulate()
    optimizer.step()
    assert a.tolist() == [-6.0] * 3
    assert b.tolist() == [-10.0] * 3


def test_a_parameter_that_the_optimizer_no_longer_has_keeps_its_gradient(backend: str) -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([a, b], lr=1.0, backend=backend)
    af.release_gradients(optimizer, EACH)
    optimizer.param_groups[0]["params"] = [a]
    (a + b * 5).sum().backward()
    assert a.grad is None
    assert b.grad.tolist() == [5.0] * 3
    optimizer.step()
    assert a.tolist() == [-1.0] * 3
    assert b.tolist() == [0.0] * 3


# ---- memory ---------------------------------------------------------------------------------------------------------


class Meter:
    """Bytes of gradients that are alive, in p.grad or elsewhere, but as accumulators; to be made before release."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.peak, self.seen = optimizer, 0, []
        for param in optimizer.param_groups[0]["params"]:
            param.register_post_accumulate_grad_hook(self._look)

    def _look(self, param: Tensor) -> None:
        self.seen.append(weakref.ref(param.grad))
        kept = {id(accumulator) for accumulator in self.optimizer._runtime.window.accumulators}
        alive = {id(grad): grad.nbytes for ref in self.seen if (grad := ref()) is not None and id(grad) not in kept}
        self.peak = max(self.peak, sum(alive.values()))


@pytest.mark.parametrize("bucket", [1, 5000, 20_000])
def test_no_more_than_a_bucket_and_one_gradient_are_alive(backend: str, bucket: int) -> None:
    model = nn.Sequential(*(nn.Linear(31 + i, 32 + i) for i in range(12)))
    params = list(model.parameters())
    sizes = [4 * param.numel() for param in params]
    optimizer = af.SGD(params, lr=0.1, backend=backend)
    x, meter = torch.randn(4, 31), Meter(optimizer)

    def peak() -> int:
        meter.peak = 0
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.accumulate()
        optimizer.step()
        return meter.peak

    with af.release_gradients(optimizer, bucket):
        released = peak()
    assert max(sizes) <= released <= bucket + max(sizes)
    assert released < sum(sizes) / 2
    assert peak() == sum(sizes)


def test_a_bucket_counts_each_gradient_once_and_is_empty_after_each_micro_batch(backend: str) -> None:
    a, b, c = params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]  # 16 bytes each
    optimizer = af.SGD(params, lr=0.5, backend=backend)
    af.release_gradients(optimizer, 33)
    for used in ((a, a, b), (c,), (b, b, c)):
        for param in used:
            param.sum().backward()
        assert all(param.grad is not None for param in used)
        optimizer.accumulate()
    optimizer.step()
    assert [param[0].item() for param in params] == [-1.0, -1.5, -1.0]


@pytest.mark.parametrize("weight", [2, 2.0 * torch.ones(())], ids=["number", "tensor"])
def test_closing_is_no_pass_of_its_own(backend: str, weight: Any) -> None:
    """Each write of an accumulator counts in its version."""
    versions = []
    for released in (False, True):
        params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
        optimizer = af.SGD(params, lr=0.1, backend=backend)
        if released:
            af.release_gradients(optimizer, 20)
        for last in (False, False, True):
            optimizer.backward(sum(param.sum() for param in params), weight, last=last)
        versions.append([param.grad._version for param in params])
    assert versions[0] == versions[1]


def test_the_bucket_is_32_mib_unless_said_otherwise() -> None:
    params = [nn.Parameter(torch.zeros(9 * 2**18)) for _ in range(5)]  # 9 MiB each
    optimizer = af.SGD(params, lr=0.1)
    af.release_gradients(optimizer)
    alive = []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: alive.append(sum(p.grad is not None for p in params)))
    sum(param.sum() for param in params).backward()
    assert alive == [1, 2, 3, 0, 1]


def test_nothing_is_read_from_the_device(emulate_cuda: None) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), capturable=True, max_grad_norm=1.0, backend="cuda")
    af.release_gradients(optimizer, SOME)
    for update in range(3):
        for weight in (one(2.0), one(0.0), one(3.0)):
            loss = loss_of(model, 1)
            if update:
                with NoReads():
                    optimizer.backward(loss, weight, last=False)
            else:
                optimizer.backward(loss, weight)
        if update:
            with NoReads():
                optimizer.step()
        else:
            optimizer.step()


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("autograd", [False, True], ids=["forward", "backward too"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_loop(fresh_compiler: None, autograd: bool) -> None:
    def window(model: Net, optimizer: Any, x: Tensor) -> None:
        for part in x.split(2):
            loss = model(part).square().mean()
            loss.backward()
            optimizer.accumulate()
        optimizer.step()

    results = []
    for function in (window, torch.compile(window, backend="aot_eager")):
        model = net()
        optimizer = ADAMW_CASE.make(model.parameters(), max_grad_norm=0.05)
        if function is not window:
            af.release_gradients(optimizer, SOME)
        with torch._dynamo.config.patch(compiled_autograd=autograd and function is not window):
            for _ in range(2):
                function(model, optimizer, torch.ones(6, 6))
        results.append(list(model.parameters()))
    for value, truth in zip(*results, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
