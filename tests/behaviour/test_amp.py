"""torch's own GradScaler, in the loops that people write, held to a float64 loop that needs no scaler."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, refused, snapshot, writes_nothing
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

OPTIONS = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.1}
MAX_NORM = 0.3  # of gradients whose norm is around 1

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "af.AdamW": lambda params, **settings: af.AdamW(params, **OPTIONS, **settings),
    "fused torch": lambda params, **settings: af.fuse(torch.optim.AdamW(params, fused=True, **OPTIONS), **settings),
    "own step": lambda params, **settings: af.fuse(
        type("Own", (torch.optim.AdamW,), {})(params, **OPTIONS), **settings
    ),
}


def scaler_of(scale: float = 2.0**10, growth_interval: int = 2) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


class Truth:
    """The model in float64, with torch's AdamW and no scaler."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = copy.deepcopy(model).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)

    def step(self, batches: Tensor, weights: list[int], *, clip: bool) -> None:
        self.optimizer.zero_grad()
        for batch, weight in zip(batches, weights, strict=True):
            (loss(self.model, batch.double()) * (weight / sum(weights))).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def check(self, model: torch.nn.Module) -> None:
        for param, truth in zip(model.parameters(), self.model.parameters(), strict=True):
            # Six steps of 0.1 on values around 1. A float32 gradient is exact to about 1e-6, and AdamW divides it by
            # its own size; scales are powers of 2 and round nothing.
            torch.testing.assert_close(param.double(), truth, rtol=0, atol=1e-5)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("unscales", "clip"), [(False, "none"), (False, "ours"), (True, "none"), (True, "ours"), (True, "stock")]
)
@pytest.mark.parametrize("weights", [[1], [2, 5, 1]], ids=["p.grad", "closed window"])
def test_the_loops_of_the_manual(backend: str, name: str, unscales: bool, clip: str, weights: list[int]) -> None:
    model = net()
    truth = Truth(model)
    optimizer = MAKE[name](model.parameters(), max_grad_norm=MAX_NORM if clip == "ours" else None, backend=backend)
    scaler = scaler_of()
    window = len(weights) > 1
    scales = set()
    for _ in range(6):
        batches = torch.randn(len(weights), 8, 6)
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            scaler.scale(loss(model, batch)).backward()
            if window:
                optimizer.accumulate(weight, last=i == len(weights) - 1)
        if unscales:
            scaler.unscale_(optimizer)
        if clip == "stock":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scales.add(scaler.get_scale())
        scaler.update()
        if not window:  # a window releases what it took
            optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        truth.step(batches, weights, clip=clip != "none")
    truth.check(model)
    assert len(scales) == 3  # it grew


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("zeroed_by", ["optimizer", "model"])
def test_an_overflow_skips_the_step_and_the_scale_backs_off(
    backend: str, name: str, window: bool, unscales: bool, zeroed_by: str
) -> None:
    model = net()
    truth = Truth(model)
    optimizer = MAKE[name](model.parameters(), backend=backend)
    scaler = scaler_of(growth_interval=100)
    for step in range(4):
        batch = torch.randn(8, 6)
        scaler.scale(loss(model, batch)).backward()
        if step == 1:
            model[0].weight.grad[2, 3] = math.inf if window else math.nan
        if window:
            optimizer.accumulate(3, last=True)
        if unscales:
            scaler.unscale_(optimizer)
        if step == 1:
            kept = {name: bits for name, bits in snapshot(optimizer).items() if not name.startswith("grad")}
            scaler.step(optimizer)
            assert differences(kept, {name: snapshot(optimizer)[name] for name in kept}) == []
        else:
            scaler.step(optimizer)
            truth.step(batch[None], [1], clip=False)
        scaler.update()
        assert scaler.get_scale() == (2.0**10 if step < 1 else 2.0**9)
        (optimizer if zeroed_by == "optimizer" else model).zero_grad()
    truth.check(model)


def test_the_window_of_a_step_that_the_scaler_skipped_is_not_extended(backend: str) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), backend=backend)
    scaler = scaler_of()
    scaler.scale(loss(model, torch.randn(8, 6)) * math.inf).backward()
    optimizer.accumulate(last=True)
    scaler.step(optimizer)  # does not call the optimizer
    scaler.update()
    scaler.scale(loss(model, torch.randn(8, 6))).backward()  # adds to what is poisoned
    with refused(optimizer, RuntimeError, r"call optimizer\.step\(\) or optimizer\.zero_grad\(\) after a window"):
        optimizer.accumulate()
    optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    scaler.scale(loss(model, torch.randn(8, 6))).backward()
    optimizer.accumulate(last=True)
    scaler.step(optimizer)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_is_refused_an_open_window(backend: str, live: bool, unscales: bool) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), backend=backend)
    scaler = scaler_of()
    scaler.scale(loss(model, torch.randn(8, 6))).backward()
    optimizer.accumulate()
    if live:
        scaler.scale(loss(model, torch.randn(8, 6))).backward()
    if unscales:
        scaler.unscale_(optimizer)
    remedy = r"close it with accumulate\(\.\.\., last=True\) before scaler\.unscale_\(\) or scaler\.step\(\)"
    with refused(optimizer, RuntimeError, remedy):
        scaler.step(optimizer)


def test_a_scaler_that_is_off_does_not_mind_an_open_window(backend: str) -> None:
    model = net()
    truth = Truth(model)
    optimizer = af.AdamW(model.parameters(), backend=backend, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        batches = torch.randn(2, 8, 6)
        for batch, weight in zip(batches, (1, 3), strict=True):
            scaler.scale(loss(model, batch)).backward()
            optimizer.accumulate(weight)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        truth.step(batches, [1, 3], clip=False)
    truth.check(model)


def test_fp16_gradients_can_be_unscaled_once_their_window_is_closed(backend: str) -> None:
    param = Parameter(torch.full((4,), 8.0))
    param.grad_dtype = torch.float16
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    scaler = scaler_of(2.0**4)
    for slope in (2.0, 2.0**-9):  # 2 + 2^-9 has no bit to spare in float16, the mean has
        scaler.scale((param * slope).sum()).backward()
        optimizer.accumulate(1.0, last=slope < 1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [8.0 - 0.5 * (2.0 + 2.0**-9) / 2] * 4


# ---- grad_scale and found_inf, by hand -----------------------------------------------------------------------------


def by_hand(optimizer: Any, params: list[Parameter], grads: list[Tensor], **values: Tensor) -> list[Tensor]:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    for name, value in values.items():
        setattr(optimizer, name, value)
    optimizer.step()
    for name in values:
        delattr(optimizer, name)
    return [param.detach().double() for param in params]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_grad_scale_divides_and_found_inf_skips_as_in_torch(backend: str, name: str, window: bool) -> None:
    ours, theirs = ([Parameter(torch.linspace(-2, 2, n)) for n in (5, 9)] for _ in range(2))
    optimizer = MAKE[name](ours, backend=backend)
    stock = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for scale, found_inf in ((64.0, 0.0), (128.0, 1.0), (3.0, 0.0)):
        grads = [torch.randn(n) * 64 for n in (5, 9)]
        values = {"grad_scale": torch.tensor(scale), "found_inf": torch.tensor(found_inf)}
        if window:
            for param, grad in zip(ours, grads, strict=True):
                param.grad = grad.clone()
            optimizer.accumulate(2)
            for key, value in values.items():
                setattr(optimizer, key, value)
            optimizer.step()
            for key in values:
                delattr(optimizer, key)
            result = [param.detach().double() for param in ours]
        else:
            result = by_hand(optimizer, ours, grads, **values)
        for param, truth in zip(result, by_hand(stock, theirs, grads, **values), strict=True):
            # Both float32: a few roundings each of values around 2. AdamW hardly sees a scale: SGD does, below.
            torch.testing.assert_close(param, truth, rtol=0, atol=2e-6)
        assert bool(optimizer.step_was_skipped) == bool(found_inf)
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("kind", ["number", "tensor", "tensor of one element", "float64"])
def test_grad_scale_and_the_normalizer_divide_once_each(backend: str, kind: str) -> None:
    param = Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([param], lr=0.5, max_grad_norm=100.0, backend=backend)
    param.grad = torch.full((4,), 48.0)
    optimizer.grad_scale = {
        "number": 4.0,
        "tensor": torch.tensor(4.0),
        "tensor of one element": torch.tensor([4.0]),
        "float64": torch.tensor(4.0, dtype=torch.float64),
    }[kind]
    optimizer.step(normalizer=2)
    assert param.tolist() == [8.0 - 0.5 * 6.0] * 4
    assert float(optimizer.grad_norm) == 12.0  # of the gradients as they are applied


@pytest.mark.parametrize("found_inf", [torch.tensor(1.0), torch.tensor(2.0), torch.tensor([1.0]), 1.0, True])
@pytest.mark.parametrize("nonfinite", [None, "skip", "propagate"])
def test_found_inf_skips_whatever_is_not_0(backend: str, found_inf: Any, nonfinite: Any) -> None:
    param = Parameter(torch.randn(4))
    optimizer = af.AdamW([param], nonfinite=nonfinite, backend=backend)
    param.grad = torch.randn(4)
    optimizer.step()
    optimizer.found_inf = found_inf  # a sum over devices
    kept = {name: bits for name, bits in snapshot(optimizer).items() if name != "skipped steps"}
    optimizer.step()
    assert differences(kept, {name: snapshot(optimizer)[name] for name in kept}) == []
    assert int(optimizer.skipped_steps) == 1


def test_a_scale_on_the_host_is_checked(backend: str) -> None:
    param = Parameter(torch.randn(4))
    optimizer = af.AdamW([param], backend=backend)
    param.grad = torch.randn(4)
    optimizer.step()
    optimizer.grad_scale = 0.0
    with refused(optimizer, ValueError, "grad_scale must be finite and > 0, got 0.0"):
        optimizer.step()
    optimizer.grad_scale = None
    optimizer.found_inf = None
    optimizer.step()  # as if they were not there
    assert not optimizer.step_was_skipped


def test_reading_the_scaler_flag_writes_nothing(backend: str) -> None:
    param = Parameter(torch.randn(4))
    optimizer = af.AdamW([param], backend=backend)
    param.grad = torch.randn(4)
    with writes_nothing(optimizer):
        assert optimizer._step_supports_amp_scaling is False
    assert hasattr(optimizer, "_step_supports_amp_scaling")
