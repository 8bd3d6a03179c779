"""nonfinite="drop": a micro-batch that is not finite is left out, as if it had not been there."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from compare import assert_close
from table import set_grads

import accumfused as af

SIZES = (40, 7, 300)
KEPT = [*itertools.product((True, False), repeat=3)]


def grads(number: int, kept: bool) -> list[torch.Tensor]:
    """A micro-batch's gradients; a bad one has NaN in the last tensor, or inf in all."""
    generator = torch.Generator("cpu").manual_seed(number)
    made = [torch.randn(size, generator=generator, device="cpu") for size in SIZES]
    if not kept:
        made[-1][5] = math.nan
        if number % 2:
            made = [torch.full_like(grad, math.inf) for grad in made]
    return [grad.to(torch.get_default_device()) for grad in made]


NUMBERS = {"equal": (2.0,) * 3, "host": (3.0, 0.7, 5.0), "device": (3.0, 0.7, 5.0)}
WEIGHTS: dict[str, Any] = {
    **NUMBERS, "a plain sum": (None,) * 3, "device": tuple(lambda w=w: torch.tensor(w) for w in NUMBERS["device"]),
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("closes", [False, True])
def test_what_is_dropped_might_not_have_been_there(
    backend: str, kept: tuple[bool, ...], weights: str, closes: bool
) -> None:
    """Against fp64; a step with none left is skipped. A second, good window has the memory of the first."""
    params = [torch.zeros(size, requires_grad=True) for size in SIZES]
    optimizer = af.SGD(params, lr=1.0, backend=backend, nonfinite="drop", max_grad_norm=1e9)
    expected = torch.zeros(sum(SIZES), dtype=torch.float64)
    for window in (kept, (True,) * 3):
        for number, (is_kept, weight) in enumerate(zip(window, WEIGHTS[weights], strict=True)):
            set_grads(params, grads(number, is_kept))
            optimizer.accumulate(weight() if callable(weight) else weight, last=closes and number == 2)
        optimizer.step()
        left = [number for number, is_kept in enumerate(window) if is_kept]
        own = {number: NUMBERS.get(weights, (1.0,) * 3)[number] for number in left}
        total = sum(torch.cat(grads(number, True)).double() * weight for number, weight in own.items())
        expected -= total / (1.0 if weights == "a plain sum" else sum(own.values()) or 1.0)
    assert_close(torch.cat([param.detach() for param in params]), expected, "window")
    assert int(optimizer.dropped_micro_batches) == kept.count(False)
    assert int(optimizer.skipped_steps) == (not any(kept))


def test_a_step_from_p_grad_is_a_micro_batch_alone(backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.SGD([param], lr=1.0, backend=backend, nonfinite="drop")
    for value in (math.inf, 1.0):
        param.grad = torch.tensor([1.0, value, 1.0])
        optimizer.step()
    assert (param.tolist(), int(optimizer.skipped_steps)) == ([-1.0] * 3, 1)


def test_the_noise_scale_knows_nothing_of_it(backend: str) -> None:
    params = [torch.zeros(size, requires_grad=True) for size in SIZES]
    optimizer = af.SGD(params, lr=1.0, backend=backend, noise_scale=True, nonfinite="drop")
    for number, is_kept in enumerate((True, False, True)):
        set_grads(params, grads(number, is_kept))
        optimizer.accumulate(2.0)
    optimizer.step()
    one, other = (torch.cat(grads(number, True)).double() for number in (0, 2))
    mean, each = ((one + other) / 2).square().sum(), 2 * (one.square().sum() + other.square().sum())
    assert_close(optimizer.noise_scale().noise, each - 4 * mean, "norm")
    signal = float(2 * mean - each / 4)  # a difference of sums many times as large
    assert float(optimizer.noise_scale().signal) == pytest.approx(signal, rel=1e-4)
    assert_close(torch.cat([param.detach() for param in params]), -(one + other) / 2, "window")


# ---- under a scaler -------------------------------------------------------------------------------------------------


def scaled_window(optimizers: list[Any], *, last: bool = False) -> None:
    """Gradients of 1, 1, 1 and, out of float16's range at a scale of 1024, 100: the last one of the first only."""
    for size in (1.0, 1.0, 1.0, 100.0):
        for index, optimizer in enumerate(optimizers):
            param = optimizer.param_groups[0]["params"][0]
            param.grad = torch.full_like(param, math.inf if size > 1 and index == 0 else 1024.0 * size)
            optimizer.accumulate(1.0, last=last and size > 1)


@pytest.mark.parametrize("kind", ["open", "closed", "unscaled", "group", "copied", "saved"])
def test_a_scaler_backs_off_once_for_a_window_whose_rest_steps(backend: str, kind: str) -> None:
    """A group's other member keeps all four; the next window, without an overflow, leaves the scale."""
    params = [torch.zeros(3, requires_grad=True) for _ in range(2 if kind == "group" else 1)]
    optimizers: list[Any] = [af.SGD([p], lr=1.0, momentum=0.1, backend=backend, nonfinite="drop") for p in params]
    scaler = af.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))  # makes the scale
    scaled_window(optimizers, last=kind in ("closed", "unscaled"))
    if kind == "unscaled":
        scaler.unscale_(optimizers[0])
    if kind == "copied":
        optimizers = [copy.deepcopy(optimizers[0])]
    if kind == "saved":
        saved = optimizers[0].state_dict()
        optimizers = [af.SGD(params, lr=1.0, momentum=0.1, backend=backend, nonfinite="drop")]
        optimizers[0].load_state_dict(saved)
    stepper = af.ClipGroup(optimizers, max_grad_norm=1e9) if kind == "group" else optimizers[0]
    scaler.step(stepper)
    scaler.update()
    param = optimizers[0].param_groups[0]["params"][0]
    assert (param.tolist(), scaler.get_scale()) == ([-1.0] * 3, 2.0**9)
    assert not bool(stepper.step_was_skipped)
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = torch.full((3,), 512.0)
        optimizer.accumulate(1.0)
    scaler.step(stepper)
    scaler.update()
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("call", ["accumulate", "backward"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_weight_of_0_leaves_out_what_is_not_finite_and_no_scaler_hears_of_it(
    backend: str, on_device: bool, call: str
) -> None:
    """The masked mean of an empty micro-batch is NaN, with any loss scale."""
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.SGD([param], lr=1.0, backend=backend, nonfinite="drop")
    scaler = af.GradScaler("cpu", init_scale=2.0**4)
    for step in range(1, 4):
        for empty in (step % 2, (step + 1) % 2, 1):  # at the window's beginning, and later
            loss = scaler.scale((param * (math.nan if empty else 1.0)).sum())
            weight: Any = 0.0 if empty else 5.0
            weight = torch.tensor(weight) if on_device else weight
            if call == "backward":
                optimizer.backward(loss, weight)
            else:
                loss.backward()
                optimizer.accumulate(weight)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [-float(step)] * 3
    assert scaler.get_scale() == 2.0**4
    assert int(optimizer.dropped_micro_batches) == 0


@pytest.mark.parametrize("kind", ["open", "closed", "group"])
def test_torchs_scaler_is_refused_before_it_writes_a_weight(backend: str, kind: str) -> None:
    params = [torch.zeros(3, requires_grad=True) for _ in range(2 if kind == "group" else 1)]
    optimizers: list[Any] = [af.SGD([param], lr=1.0, backend=backend, nonfinite="drop") for param in params]
    stepper: Any = af.ClipGroup(optimizers, max_grad_norm=1e9) if kind == "group" else optimizers[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    scaled_window(optimizers, last=kind != "open")
    before = [None if param.grad is None else param.grad.clone() for param in params]
    with pytest.raises(RuntimeError, match=r"before torch\.amp\.GradScaler can see them.*take accumfused\.GradScaler"):
        scaler.step(stepper)
    for param, grad in zip(params, before, strict=True):
        assert param.tolist() == [0.0] * 3
        assert (param.grad is None) if grad is None else torch.equal(param.grad, grad)


def test_the_largest_micro_batches_count_under_a_scaler(backend: str) -> None:
    """In float16 a loss of 100 times the others' gradient overflows first: without a backoff it would never count."""
    param = torch.ones(1, requires_grad=True)
    optimizer = af.SGD([param], lr=0.0, backend=backend, nonfinite="drop")
    scaler = af.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    dropped = list[int]()
    for _ in range(60):
        for size in (1.0, 1.0, 1.0, 100.0):
            scaler.scale((param.half() * size).sum().float()).backward()
            optimizer.accumulate(1.0)
        scaler.step(optimizer)
        scaler.update()
        dropped.append(int(optimizer.dropped_micro_batches))
    assert scaler.get_scale() <= 2.0**10
    assert dropped[-1] <= 60 / 6 + 1  # one in each growth interval and its backoff
