"""Loss scaling, by our scaler, torch's and by hand: what is divided, and what skips a step. Loops: test_loops.py."""

from __future__ import annotations

import copy
from math import inf, nan
from typing import Any

import pytest
import torch
from compare import differences, refused, snapshot, stepped
from table import Own
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import accumfused as af

SCALERS = {"ours": af.GradScaler, "stock": torch.amp.GradScaler}
every_scaler = pytest.mark.parametrize("kind", SCALERS)


def scaled(kind: str, backend: str, **settings: Any) -> tuple[Parameter, af.SGD, Any]:
    """A parameter of 8 with momentum, so that there is a state; its optimizer; a scaler of 1024."""
    param = Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([param], lr=0.5, momentum=0.5, backend=backend, **settings)
    return param, optimizer, SCALERS[kind]("cpu", init_scale=2.0**10, growth_interval=100)


@every_scaler
@pytest.mark.parametrize("nonfinite", [None, "skip", "propagate", "raise"])
def test_an_overflow_is_skipped_whatever_nonfinite_says(backend: str, nonfinite: Any, kind: str) -> None:
    """16-bit gradients too: 65504 times the scale overflows float16. The group of the others does not go ahead."""
    param, optimizer, scaler = scaled(kind, backend, nonfinite=nonfinite)
    other = Parameter(torch.full((4,), 8.0))
    stocks = torch.bfloat16 if param.device.type == "cpu" else torch.float32  # of torch 2.11 on a GPU
    param.grad_dtype = torch.float16 if kind == "ours" else stocks
    optimizer.add_param_group({"params": [other], "momentum": 0.0})
    for slope in (inf, 2.0):
        scaler.scale((param * slope + other * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (param.tolist(), other.tolist()) == ([7.0] * 4, [7.0] * 4)
    assert (scaler.get_scale(), int(optimizer.skipped_steps)) == (2.0**9, int(kind == "ours"))


def test_a_scaler_goes_on_in_torchs_and_without_gradients(backend: str) -> None:
    param, optimizer, scaler = scaled("ours", backend)
    scaler.scale(param.sum())
    scaler.step(optimizer)  # no gradients: nothing to do, and no reason to stop
    scaler.update(2.0**9)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == scaler.state_dict()
    assert copy.deepcopy(scaler).get_scale() == 2.0**9
    assert param.tolist() == [8.0] * 4


@every_scaler
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("mended", [False, True])
def test_several_optimizers_on_one_scaler_skip_each_for_itself(backend: str, kind: str, bad: int, mended: bool) -> None:
    params = [Parameter(torch.full((4,), 8.0)) for _ in range(3)]
    foreign = Own(params[1:2], lr=1.0, alpha=0.0, eps=0.0)
    optimizers: list[Any] = [af.SGD(params[:1], lr=0.5, backend=backend), af.fuse(foreign, backend=backend)]
    optimizers.append(torch.optim.SGD(params[2:], lr=0.5))
    scaler = SCALERS[kind]("cpu", init_scale=2.0**10)
    for index, param in enumerate(params):
        scaler.scale((param * (nan if index == bad else 2.0)).sum()).backward()
    if mended:  # too late: unscale_() has seen it
        scaler.unscale_(optimizers[bad])
        params[bad].grad.zero_()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [param[0].item() for param in params] == [8.0 if index == bad else 7.0 for index in range(3)]
    assert scaler.get_scale() == 2.0**9  # once, not three times


@pytest.mark.parametrize(
    ("kind", "window"), [("ours", "none"), ("ours", "open"), ("ours", "closed"), ("stock", "none")]
)
def test_only_a_stock_scaler_makes_a_pass_that_unscales(backend: str, kind: str, window: str) -> None:
    param, optimizer, scaler = scaled(kind, backend)
    scaler.scale(param.sum()).backward()
    if window != "none":
        optimizer.accumulate(last=window == "closed")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        scaler.step(optimizer)
    names = {event.key for event in trace.key_averages()}
    assert ("aten::_amp_foreach_non_finite_check_and_unscale_" in names) == (kind == "stock")


@every_scaler
def test_float16_gradients_can_be_unscaled_once_their_window_is_closed(backend: str, kind: str) -> None:
    param, optimizer, scaler = scaled(kind, backend)
    param.grad_dtype = torch.float16
    for slope in (2.0, 2.0**-9):  # 2 + 2^-9 has no bit to spare in float16, the mean has
        scaler.scale((param * slope).sum()).backward()
        optimizer.accumulate(1.0, last=slope < 1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == [8.0 - 0.5 * (2.0 + 2.0**-9) / 2] * 4


def test_float16_gradients_of_no_window_need_no_unscaling(backend: str) -> None:
    param = Parameter(torch.full((4,), 8.0, dtype=torch.float16))
    optimizer, scaler = (
        af.SGD([param], lr=0.5, max_grad_norm=1e9, backend=backend),
        af.GradScaler("cpu", init_scale=4.0),
    )
    scaler.scale((param.float() * 2).sum()).backward()
    with refused(optimizer, ValueError, r"Attempting to unscale FP16 gradients.*leave unscale_\(\) out"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == [8.0 - 0.5 * 2.0] * 4


def test_a_subclass_need_not_know_of_scalers(backend: str) -> None:
    class Mine(af.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    param = torch.ones(3).requires_grad_()
    scaler, optimizer = af.GradScaler("cpu", init_scale=8.0), Mine([param], lr=1.0, backend=backend)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.0] * 3


@every_scaler
def test_a_scaler_that_is_off_is_as_if_it_were_not_there(backend: str, kind: str) -> None:
    param, optimizer, _ = scaled(kind, backend)
    off = SCALERS[kind]("cpu", enabled=False)
    off.scale(param.sum()).backward()
    optimizer.accumulate()
    off.unscale_(optimizer)
    off.step(optimizer, lambda: None)
    off.update()
    assert param.tolist() == [7.5] * 4


# ---- grad_scale and found_inf, by hand ------------------------------------------------------------------------------

NUMBERS = [float, torch.tensor, lambda number: torch.tensor([number], dtype=torch.float64)]


@pytest.mark.pairwise(
    window=[False, True], scale=NUMBERS, divisor=NUMBERS, by=["hand", "scaler"], foreign=[False, True]
)
def test_grad_scale_scaler_and_normalizer_divide_once_each(
    backend: str, window: bool, scale: Any, divisor: Any, by: str, foreign: bool
) -> None:
    """torch's fused kernels, in a foreign step, do not divide again."""
    param, optimizer, scaler = scaled("ours", backend, max_grad_norm=100.0)
    if foreign:
        own: Any = type("Own", (torch.optim.SGD,), {})
        optimizer = af.fuse(own([param], lr=0.5, fused=True), max_grad_norm=100.0, backend=backend)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), 48.0 * (2**10 if by == "scaler" else 1))
    if window:
        optimizer.accumulate(3)
    optimizer.grad_scale, optimizer.found_inf = scale(4.0), torch.zeros(())
    (scaler.step if by == "scaler" else type(optimizer).step)(optimizer, normalizer=divisor(2.0))
    assert param.tolist() == [8.0 - 0.5 * 6.0] * 4
    assert float(optimizer.grad_norm) == 12.0  # of the gradients as they are applied
    assert optimizer.grad_scale == 4.0  # what the user has set stays, and what the scaler has does not
    optimizer.grad_scale = optimizer.found_inf = None
    param.grad = torch.full((4,), 6.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == 12.0


@pytest.mark.parametrize("found_inf", [1.0, True, torch.tensor(2.0), torch.tensor([1.0])])
@pytest.mark.parametrize("nonfinite", [None, "skip", "propagate", "raise"])
def test_found_inf_skips_whatever_is_not_0(backend: str, found_inf: Any, nonfinite: Any) -> None:
    param, optimizer, _ = scaled("ours", backend, nonfinite=nonfinite)
    param.grad = torch.ones(4)
    optimizer.step()
    before, count = snapshot(optimizer), optimizer.skipped_steps
    optimizer.found_inf = found_inf  # a sum over devices
    optimizer.step()
    assert differences(before, snapshot(optimizer)) == ["skipped steps"]
    optimizer.found_inf = None  # as if it were not there
    optimizer.step()
    assert param.tolist() == [8.0 - 0.5 - 0.75] * 4
    assert int(count) == 0  # as it was then


# ---- skipped without a scaler ----------------------------------------------------------------------------------------

PLACES = ("normalizer", "grad_scale", "weight", "weight, closed", "weight, resumed", "second weight", "both")


def written(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What a step writes."""
    return {name: bits for name, bits in snapshot(optimizer).items() if name.startswith(("param", "state"))}


@pytest.mark.pairwise(place=PLACES, bad=(0.0, -2.0, nan, inf, -inf), nonfinite=(None, "skip"))
def test_a_bad_number_on_the_device_skips_the_step_and_is_counted(
    backend: str, place: str, bad: float, nonfinite: str | None
) -> None:
    param = Parameter(torch.randn(4))
    optimizer: Any = stepped([param], backend, nonfinite=nonfinite)
    param.grad, value = torch.randn(4), torch.tensor(bad)
    if place == "second weight":
        optimizer.accumulate(2)
        param.grad = torch.randn(4)
    if "weight" in place:
        optimizer.accumulate(value, last="closed" in place)
    if "resumed" in place:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
    # (of two below 0 the product would be a good number)
    optimizer.grad_scale = {"grad_scale": value, "both": torch.tensor(-1.0)}.get(place)
    is_skipped = (place, bad) != ("second weight", 0.0)  # which leaves its micro-batch out, as it should
    for skipped in (is_skipped, False):  # and training goes on
        before = written(optimizer)
        optimizer.step(normalizer=value if skipped and place in ("normalizer", "both") else None)
        assert (differences(before, written(optimizer)) == []) is skipped
        assert bool(optimizer.step_was_skipped) is skipped
        assert int(optimizer.skipped_steps) == is_skipped
        optimizer.grad_scale, param.grad = None, torch.randn(4)


def test_what_overflows_propagates_as_in_torch(backend: str) -> None:
    params = [Parameter(torch.tensor([0.5, 1.0])) for _ in range(2)]
    stock, fused = (Own([param], lr=0.3) for param in params)
    af.fuse(fused, max_grad_norm=0.5, nonfinite="propagate", backend=backend)
    for param in params:
        param.grad = torch.tensor([inf, 1.0])
    torch.nn.utils.clip_grad_norm_(params[:1], 0.5)
    stock.step()
    fused.step()
    torch.testing.assert_close(params[1], params[0], equal_nan=True)
    assert params[1].isnan().tolist() == [True, False]
