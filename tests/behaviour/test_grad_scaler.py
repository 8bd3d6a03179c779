"""Loss scaling without torch's extra pass: af.GradScaler, held to float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from snapshot import differences, refused, snapshot
from test_amp import MAKE, MAX_NORM, Truth, loss, net
from test_no_sync import NoReads
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import accumfused as af

SCALERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "af.GradScaler": (af.GradScaler, {}),
}
every_scaler = pytest.mark.parametrize("kind", SCALERS)


def scaler_of(kind: str, scale: float = 2.0**10, growth_interval: int = 2, **options: Any) -> Any:
    return SCALERS[kind][0]("cpu", init_scale=scale, growth_interval=growth_interval, **options)


# window, unscales, clip, zeroed by
ORDERS = [
    *[
        (window, unscales, clip, "optimizer")
        for window in ("p.grad", "open", "closed")
        for unscales, clip in ((False, "none"), (False, "ours"), (True, "none"), (True, "ours"), (True, "stock"))
        if not (window == "open" and unscales)  # refused, which another test shows
    ],
    *[(window, False, "ours", "model") for window in ("p.grad", "open", "closed")],
    *[(window, False, "ours", "nobody") for window in ("open", "closed")],
]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("kind", "window", "unscales", "clip", "zeroed_by"),
    [("af.GradScaler", *order) for order in ORDERS],
)
def test_every_order_of_the_loop(
    backend: str, name: str, kind: str, window: str, unscales: bool, clip: str, zeroed_by: str
) -> None:
    model = net()
    truth = Truth(model)
    settings = {"max_grad_norm": MAX_NORM} if clip == "ours" else {}
    optimizer = MAKE[name](model.parameters(), **settings, **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind)
    weights = [1] if window == "p.grad" else [2, 5, 1]
    scales = []
    for step in range(7):
        batches = torch.randn(len(weights), 8, 6)
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            scaler.scale(loss(model, batch)).backward()
            if step == 3 and i == 0:
                model[0].weight.grad[2, 3] = math.inf
            if window != "p.grad":
                optimizer.accumulate(weight, last=window == "closed" and i == len(weights) - 1)
        if unscales:
            scaler.unscale_(optimizer)
        if clip == "stock":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        before = snapshot(optimizer)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        changed = [key for key in differences(before, snapshot(optimizer)) if key.startswith(("param", "state"))]
        assert bool(changed) == (step != 3)
        scales.append(math.log2(scaler.get_scale()))
        scaler.update()
        if zeroed_by == "optimizer":
            optimizer.zero_grad()
        elif zeroed_by == "model":
            model.zero_grad()
        if step != 3:
            truth.step(batches, weights, clip=clip != "none")
    truth.check(model)
    assert int(optimizer.skipped_steps) == 1
    assert scales == [10, 10, 11, 11, 10, 10, 11]  # the overflow is in the fourth


@every_scaler
def test_no_order_waits_for_the_device(kind: str, emulate_cuda: None) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0, **SCALERS[kind][1], backend="cuda")
    scaler = scaler_of(kind)
    for step in range(4):
        for last in (False, True):
            scaler.scale(loss(model, torch.randn(8, 6))).backward()
            with NoReads():
                optimizer.accumulate(last=last and (step % 2 == 0 or "stock" in kind))
        with NoReads():
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("window", ["p.grad", "open", "closed"])
@pytest.mark.parametrize("clips", [False, True])
def test_the_pass_that_unscales_is_gone(backend: str, window: str, clips: bool) -> None:
    def calls(scaler: Any) -> set[str]:
        model = net()
        optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0 if clips else None, backend=backend)
        scaler.scale(loss(model, torch.randn(8, 6))).backward()
        if window != "p.grad":
            optimizer.accumulate(last=window == "closed")
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            scaler.step(optimizer)
            scaler.update()
        return {event.key for event in trace.key_averages()}

    unscales = "aten::_amp_foreach_non_finite_check_and_unscale_"
    assert unscales not in calls(scaler_of("af.GradScaler"))
    if window != "open":
        assert unscales in calls(torch.amp.GradScaler("cpu"))


@every_scaler
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_several_optimizers_on_one_scaler_skip_each_for_itself(backend: str, kind: str, bad: int) -> None:
    params = [Parameter(torch.full((4,), 8.0)) for _ in range(3)]
    settings = {**SCALERS[kind][1], "backend": backend}
    optimizers = [
        af.SGD(params[:1], lr=0.5, **settings),
        af.fuse(torch.optim.SGD(params[1:2], lr=0.5), **settings),
        torch.optim.SGD(params[2:], lr=0.5),
    ]
    scaler = scaler_of(kind, growth_interval=100)
    for index, param in enumerate(params):
        scaler.scale((param * 2.0).sum()).backward()
        if index == bad:
            param.grad[1] = math.nan
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [param[0].item() for param in params] == [8.0 if index == bad else 7.0 for index in range(3)]
    assert scaler.get_scale() == 2.0**9  # once, not three times


@every_scaler
def test_an_overflow_on_the_first_step_leaves_no_group_ahead(backend: str, kind: str) -> None:
    first, second = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    optimizer = af.AdamW([{"params": [first]}, {"params": [second]}], lr=0.1, **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind)
    for value in (math.inf, 1.0):
        scaler.scale(first.sum() + (second * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [float(optimizer.state[p]["step"]) for p in (first, second)] == [1.0, 1.0]
    torch.testing.assert_close(first.detach(), torch.full((3,), (1 - 0.1 * 0.01) - 0.1), rtol=0, atol=1e-6)


@every_scaler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients(backend: str, kind: str, dtype: torch.dtype) -> None:
    param = Parameter(torch.full((4,), 8.0))
    param.grad_dtype = dtype
    optimizer = af.SGD([param], lr=0.5, **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind, 2.0**4, 100)
    for slope in (2.0, 65504.0 if dtype is torch.float16 else math.inf, 4.0):  # 65504 * 16 overflows float16
        scaler.scale((param * slope).sum()).backward()
        assert param.grad.dtype == dtype
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert param.tolist() == [8.0 - 0.5 * 6.0] * 4
    assert scaler.get_scale() == 2.0**3


@every_scaler
@pytest.mark.parametrize("nonfinite", [None, "skip", "propagate", "raise"])
def test_an_overflow_is_skipped_whatever_nonfinite_says(backend: str, nonfinite: Any, kind: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], nonfinite=nonfinite, **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind)
    scaler.scale((param * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0] * 3
    assert (scaler.get_scale(), int(optimizer.skipped_steps)) == (2.0**9, 1)


def test_a_step_without_gradients_does_nothing_and_does_not_stop_the_loop(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], backend=backend)
    scaler = scaler_of("af.GradScaler")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0] * 3


# ---- what is refused, and what is torch's ---------------------------------------------------------------------------


@every_scaler
def test_a_scaler_used_twice_is_refused(backend: str, kind: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    with refused(optimizer, RuntimeError, "already been called since the last update"):
        scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    with refused(optimizer, RuntimeError, "already been called on this optimizer since the last update"):
        scaler.unscale_(optimizer)


def test_unscaling_an_open_window_is_refused(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], backend=backend)
    scaler = scaler_of("af.GradScaler")
    scaler.scale(param.sum()).backward()
    optimizer.accumulate()
    with refused(optimizer, RuntimeError, r"close it with accumulate\(\.\.\., last=True\) before scaler\.unscale_\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param[0].item() < 1.0


def test_a_closure_is_refused(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], backend=backend)
    scaler = scaler_of("af.GradScaler")
    scaler.scale(param.sum()).backward()
    for call in (lambda: scaler.step(optimizer, lambda: 0.0), lambda: scaler.step(optimizer, closure=lambda: 0.0)):
        with refused(optimizer, RuntimeError, r"call backward\(\) before scaler\.step\(\)"):
            call()


@every_scaler
def test_a_normalizer_goes_with_the_step(backend: str, kind: str) -> None:
    param = Parameter(torch.full((3,), 8.0))
    optimizer = af.SGD([param], lr=0.5, **SCALERS[kind][1], backend=backend)
    scaler = scaler_of(kind)
    scaler.scale((param * 6.0).sum()).backward()
    optimizer.grad_scale = torch.tensor(3.0)  # torch multiplies the scales
    scaler.step(optimizer, normalizer=2)
    assert param.tolist() == [7.5] * 3


def test_a_scaler_that_is_off_steps_as_if_it_were_not_there(backend: str) -> None:
    param = Parameter(torch.full((3,), 8.0))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    scaler = scaler_of("af.GradScaler", enabled=False)
    scaler.scale((param * 2.0).sum()).backward()
    optimizer.accumulate()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: None)
    scaler.update()
    assert param.tolist() == [7.0] * 3


def test_its_checkpoint_is_torchs(backend: str) -> None:
    ours, theirs = scaler_of("af.GradScaler"), torch.amp.GradScaler("cpu")
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], backend=backend)
    for _ in range(3):
        ours.scale(param.sum()).backward()
        ours.step(optimizer)
        ours.update()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    assert copy.deepcopy(ours).get_scale() == 2.0**11
