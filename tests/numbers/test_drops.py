"""nonfinite="drop": a micro-batch that is not finite is left out, as if it had not been there."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from compare import assert_close, refused
from table import set_grads

import accumfused as af

SIZES = (40, 7, 300)
KEPT = [kept for kept in itertools.product((True, False), repeat=3) if any(kept)]


def grads(number: int, kept: bool) -> list[torch.Tensor]:
    """A micro-batch's gradients; a bad one has NaN in the last tensor, or inf in all."""
    generator = torch.Generator("cpu").manual_seed(number)
    made = [torch.randn(size, generator=generator, device="cpu") for size in SIZES]
    if not kept:
        made[-1][5] = math.nan
        if number % 2:
            made = [torch.full_like(grad, math.inf) for grad in made]
    return [grad.to(torch.get_default_device()) for grad in made]


def stepped(backend: str, kept: tuple[bool, ...], weights: Any, *, leaves_out: bool, **settings: Any) -> Any:
    """A step of a window; with `leaves_out` its bad micro-batches are not given at all."""
    params = [torch.zeros(size, requires_grad=True) for size in SIZES]
    optimizer = af.SGD(params, lr=1.0, backend=backend, **settings)
    for _ in range(2):  # the second window has memory of the first
        for number, (is_kept, weight) in enumerate(zip(kept, weights, strict=True)):
            if is_kept or not leaves_out:
                set_grads(params, grads(number, is_kept))
                optimizer.accumulate(weight() if callable(weight) else weight, last=number == 2 and not leaves_out)
        optimizer.step()
    return optimizer, torch.cat([param.detach() for param in params])


WEIGHTS: dict[str, Any] = {
    "a plain sum": (None,) * 3, "equal": (2.0,) * 3, "host": (3.0, 0.7, 5.0),
    "device": tuple(lambda w=w: torch.tensor(w) for w in (3.0, 0.7, 5.0)),
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_is_dropped_might_not_have_been_there(backend: str, kept: tuple[bool, ...], weights: str) -> None:
    optimizer, found = stepped(backend, kept, WEIGHTS[weights], leaves_out=False, nonfinite="drop", max_grad_norm=1e9)
    _, expected = stepped(backend, kept, WEIGHTS[weights], leaves_out=True, max_grad_norm=1e9)
    assert_close(found, expected, "window")
    assert int(optimizer.dropped_micro_batches) == 2 * kept.count(False)
    assert int(optimizer.skipped_steps) == 0


def test_a_window_with_none_left_is_skipped_and_the_next_one_is_not(backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.SGD([param], lr=1.0, backend=backend, nonfinite="drop")
    for value in (math.nan, 1.0):
        for weight in (2.0, 3.0):
            param.grad = torch.full((3,), value)
            optimizer.accumulate(weight)
        optimizer.step()
    assert param.tolist() == [-1.0] * 3
    assert (int(optimizer.skipped_steps), int(optimizer.dropped_micro_batches)) == (1, 2)


def test_a_step_from_p_grad_is_a_micro_batch_alone(backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.SGD([param], lr=1.0, backend=backend, nonfinite="drop")
    param.grad = torch.tensor([1.0, math.inf, 1.0])
    optimizer.step()
    assert (param.tolist(), int(optimizer.skipped_steps)) == ([0.0] * 3, 1)


def test_the_noise_scale_knows_nothing_of_it(backend: str) -> None:
    found = []
    for kept, settings in (((True, False, True), {"nonfinite": "drop"}), ((True, True), {})):
        params = [torch.zeros(size, requires_grad=True) for size in SIZES]
        optimizer = af.SGD(params, lr=1.0, backend=backend, noise_scale=True, **settings)
        for number, is_kept in enumerate(kept):
            set_grads(params, grads(0 if number == 0 else 1 if not is_kept else 2, is_kept))
            optimizer.accumulate(2.0)
        optimizer.step()
        found.append(torch.stack([optimizer.noise_scale().signal, optimizer.noise_scale().noise]))
    assert_close(found[0], found[1], "norm")


@pytest.mark.parametrize("call", [af.release_gradients, lambda given: af.fuse_linears(torch.nn.Linear(2, 2), given)])
def test_gradients_that_enter_during_backward_are_refused(call: Any) -> None:
    optimizer = af.SGD([torch.zeros(3, requires_grad=True)], lr=1.0, nonfinite="drop")
    with refused(optimizer, ValueError, "looks at a whole micro-batch before it enters"):
        call(optimizer)
