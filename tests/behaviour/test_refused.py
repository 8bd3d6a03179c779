"""Calls that cannot be right, and tensors that cannot be used: an error with the remedy, and nothing is written.

What the device alone knows is not asked for: it skips the step, which is counted, and nothing is written either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import stored
import torch
from snapshot import Errors, differences, refused, snapshot, trained
from table import STATES, WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.core.rows import check_gradient

Call = Callable[[Any], Any]


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def subject(backend: str, given: str) -> af.FusedOptimizer:
    """An optimizer that has stepped before.

    Args:
        given: words. open, weighted, empty, closed: there is a window. live: there are gradients. nan: one is. raise:
            the setting. scaled: by 0. removed: a parameter.
    """
    params = [Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer: Any = trained(params, backend, nonfinite="raise" if "raise" in given else None)
    for word in [word for word in given.split() if word in ("open", "weighted", "empty", "closed", "live")]:
        for param in params:
            param.grad = torch.randn_like(param)
        params[1].grad[1] = nan if "nan" in given else 1.0  # type: ignore[index]
        if word != "live":
            optimizer.accumulate({"weighted": 2.0, "empty": 0}.get(word), last=word == "closed")
    if "scaled" in given:
        optimizer.grad_scale = 0.0
    if "removed" in given:
        optimizer.param_groups[0]["params"].pop()
    return optimizer


def call(name: str, *args: Any, **options: Any) -> Call:
    """Of the optimizer's method; what is a function is called then, and makes a tensor."""

    def run(optimizer: Any) -> Any:
        loss = [torch.stack([param.sum() for param in params_of(optimizer)]).sum()] if name == "backward" else []
        given = [value() if callable(value) else value for value in args]
        return getattr(optimizer, name)(*loss, *given, **{k: v() if callable(v) else v for k, v in options.items()})

    run.__name__ = f"{name} {' '.join(str(v) for v in (*args, *options.values()) if isinstance(v, (int, float)))}"
    return run


# ---- calls -----------------------------------------------------------------------------------------------------------

BAD = (-1, -0.5, nan, inf, -inf)
NO_NUMBER = ("8 tokens", [1], object)
NOT_ONE = (lambda: torch.ones(2), lambda: torch.ones(0), lambda: torch.tensor(1j))
WEIGHT, NORMALIZER, ALL_ZERO = "weight must be ", "normalizer must be ", r"all zero, .* call zero_grad\(\) in place"
EXPOSED = r"still the previous window's accumulator; call optimizer\.step\(\) or optimizer\.zero_grad\(\) after"
R, V, T = RuntimeError, ValueError, TypeError
# fmt: off
CALLS: list[tuple[str, Call, Errors, str]] = [
    *[("live", call("accumulate", w, last=w == -1), V, f"{WEIGHT}finite and >= 0, got {w}") for w in BAD],
    *[("weighted", call("backward", w, w == -1), V, f"{WEIGHT}finite and >= 0, got {w}") for w in BAD],
    *[("live", call("step", normalizer=n), V, f"{NORMALIZER}finite and > 0, got {n}") for n in (0, 0.0, *BAD)],
    *[("weighted", call("step", normalizer=n), V, f"{NORMALIZER}finite and > 0, got {n}") for n in (0, *BAD)],
    *[("live", call("accumulate", w), T, f"{WEIGHT}a number or a tensor of one element") for w in NO_NUMBER],
    *[("live", call("accumulate", w), V, f"{WEIGHT}one real number") for w in NOT_ONE],
    *[("weighted", call("step", normalizer=n), V, f"{NORMALIZER}one real number") for n in NOT_ONE],
    ("weighted scaled", call("step"), V, "grad_scale must be finite and > 0, got 0.0"),
    ("live", call("__setattr__", "max_grad_norm", 0.0), V, "max_grad_norm must be > 0, got 0.0; None is off"),
    ("live", call("accumulate", 0, last=True), V, ALL_ZERO),
    ("", call("backward", 0.0, last=True), V, ALL_ZERO),
    ("empty", call("step"), V, ALL_ZERO),
    ("", call("accumulate"), R, r"no new gradient to accumulate; call loss\.backward\(\) before each accumulate"),
    ("weighted", call("accumulate", 1), R, r"no new gradient to accumulate; call loss\.backward\(\) before each"),
    ("weighted live", call("accumulate"), V, "began with weights: give one to every micro-batch, or to none"),
    ("open live", call("accumulate", 1), V, "began without weights: give one to every micro-batch, or to none"),
    ("open", call("backward", 1), V, "began without weights: give one to every micro-batch, or to none"),
    ("closed", call("accumulate"), R, EXPOSED),
    ("closed", call("backward"), R, EXPOSED),
    ("live", call("backward"), R, r"not accumulated; call accumulate\(\) or zero_grad\(\) first"),
    ("open live", call("step"), R, r"call accumulate\(\) after the last backward\(\), before step\(\)"),
    ("open removed", call("step"), R, r"removed or reordered .* call step\(\) or zero_grad\(\) first"),
    ("open", call("load_state_dict", dict), R, r"call optimizer.step\(\) or zero_grad\(\) before load_state_dict\(\)"),
    ("raise nan live", call("step"), R, r"norm .* is nan, nothing was updated; look for .* call zero_grad\(\) to go"),
    ("raise nan weighted", call("step"), R, "norm of the gradients is nan, nothing was updated"),
    ("raise live", call("step", normalizer=lambda: torch.tensor(0.0)), R, "nothing was updated"),
]
# fmt: on


@pytest.mark.parametrize(("given", "call", "error", "remedy"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_call_that_cannot_be_right_is_refused(
    backend: str, given: str, call: Call, error: Errors, remedy: str
) -> None:
    optimizer = subject(backend, given)
    with refused(optimizer, error, remedy):
        call(optimizer)


@pytest.mark.parametrize("name", ["step", "accumulate", "backward"])
def test_a_maximum_that_is_switched_on_later_is_refused_in_8_bits(backend: str, name: str) -> None:
    optimizer = trained([Parameter(torch.randn(4, 3))], backend, state_dtype="int8", state_dtype_min_numel=2)
    optimizer.param_groups[0]["amsgrad"] = True
    if name != "backward":
        params_of(optimizer)[0].grad = torch.ones(4, 3)
    with refused(optimizer, ValueError, "state_dtype='int8' does not go with amsgrad=True"):
        call(name)(optimizer)
    optimizer.param_groups[0]["amsgrad"] = False
    call(name)(optimizer)


# ---- gradients and parameters ----------------------------------------------------------------------------------------


def put(grad: Callable[[], Tensor], data: Callable[[], Tensor] | None = None) -> Callable[[Any], None]:
    def spoil(param: Any) -> None:
        param.grad_dtype, param.grad = None, grad()  # of any dtype
        param.data = param.data if data is None else data()

    return spoil


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape, dtype=dtype)


FORMATS = r"supported are torch\.float32, torch\.float16, torch\.bfloat16"
EXPANDED = r"overlaps itself in memory \(expanded\?\); clone\(\) it first"
SPOILED: list[tuple[Callable[[Any], None], Errors, str]] = [
    (
        put(lambda: torch.ones(4, 3).to_sparse(1)),
        R,
        r"use Embedding\(sparse=False\), or .* an optimizer of torch's own",
    ),
    (put(ones(4, 3, dtype=torch.complex64)), R, rf"a gradient is torch\.complex64; {FORMATS}"),
    (put(ones(4, 3, dtype=torch.float64)), T, rf"a gradient is torch\.float64; {FORMATS}"),
    (put(ones(4, 3), ones(2, 3)), R, r"a gradient has shape \[4, 3\], its parameter \[2, 3\]"),
    (put(ones(4, 3), ones(4, 3, dtype=torch.float64)), (R, T), r"a parameter (is|became) torch\.float64"),
    (put(ones(4, 3), lambda: torch.ones(1, 3).expand(4, 3)), R, EXPANDED),
]


@pytest.mark.parametrize(("spoil", "error", "remedy"), SPOILED)
@pytest.mark.parametrize("given", ["", "open", "empty"])
@pytest.mark.parametrize("position", [0, 1])
def test_what_kernels_cannot_use_is_refused(
    backend: str, given: str, spoil: Callable[[Any], None], error: Errors, remedy: str, position: int
) -> None:
    params = [Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer, other = trained(params, backend), params[1 - position]
    if given:
        other.grad = torch.randn(4, 3)
        optimizer.accumulate(2.0 if given == "open" else 0)
    other.grad = torch.randn(4, 3)
    spoil(params[position])
    for verb in [call("accumulate", 2.0), call("accumulate", 2.0, last=True), *([call("step")] * (not given))]:
        with refused(optimizer, error, remedy):
            verb(optimizer)


def test_a_gradient_on_another_device_is_refused() -> None:
    # torch lets nobody assign one, so the check is called by itself.
    with pytest.raises(RuntimeError, match="a gradient is on meta, its parameter on cpu; move one of them"):
        check_gradient(torch.ones(4, 3), torch.ones(4, 3, device="meta"))


@pytest.mark.parametrize("move", [Tensor.double, lambda data: torch.ones(2, 2)], ids=["float64", "another shape"])
@pytest.mark.parametrize("live", [False, True])
def test_a_parameter_moved_within_a_window_is_refused_and_may_come_back(
    backend: str, move: Callable[[Tensor], Tensor], live: bool
) -> None:
    optimizer = subject(backend, "weighted")
    param, *_ = params_of(optimizer)
    before, param.data = param.data, move(param.data)
    verbs = (call("accumulate", 2.0), call("accumulate", 2.0, last=True))
    for verb in verbs if live else (call("step"), call("backward", 2)):
        param.grad = torch.ones_like(param) if live else None
        with refused(optimizer, RuntimeError, r"Move the model back, or call zero_grad\(\) and begin the window again"):
            verb(optimizer)
    param.grad, param.data = None, before
    optimizer.step()
    assert not optimizer.step_was_skipped


# ---- skipped ---------------------------------------------------------------------------------------------------------

PLACES = ("normalizer", "grad_scale", "weight", "weight, closed", "weight, resumed", "second weight", "both")


def written(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What a step writes."""
    return {name: bits for name, bits in snapshot(optimizer).items() if name.startswith(("param", "state"))}


@pytest.mark.pairwise(place=PLACES, bad=(0.0, -2.0, nan, inf, -inf), nonfinite=(None, "skip"))
def test_a_bad_number_on_the_device_skips_the_step_and_is_counted(
    backend: str, place: str, bad: float, nonfinite: str | None
) -> None:
    param = Parameter(torch.randn(4))
    optimizer: Any = trained([param], backend, nonfinite=nonfinite)
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
    optimizer.grad_scale = {"grad_scale": value, "both": torch.tensor(-1.0)}.get(place)
    before = written(optimizer)
    optimizer.step(normalizer=value if place in ("normalizer", "both") else None)
    fine = place == "second weight" and bad == 0.0  # it leaves its micro-batch out, as it should
    assert (differences(before, written(optimizer)) == []) is not fine
    assert bool(optimizer.step_was_skipped) is not fine
    assert int(optimizer.skipped_steps) == (not fine)

    optimizer.grad_scale, param.grad = None, torch.randn(4)
    optimizer.step()  # and training goes on
    assert differences(before, written(optimizer))
    assert not optimizer.step_was_skipped
    assert int(optimizer.skipped_steps) == (not fine)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("states", STATES)
def test_a_skipped_step_writes_no_format(backend: str, weights: str, states: str) -> None:
    _, optimizer = stored.trained(weights, states, backend)
    stored.grads_of(optimizer, 5)
    optimizer.param_groups[0]["params"][1].grad[3] = nan
    before = written(optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert differences(before, written(optimizer)) == []


def test_a_first_step_that_raises_leaves_an_optimizer_that_has_not_stepped(backend: str) -> None:
    optimizers = [af.AdamW([Parameter(torch.ones(4))], nonfinite="raise", backend=backend) for _ in range(2)]
    params_of(optimizers[0])[0].grad = torch.full((4,), nan)
    with pytest.raises(RuntimeError, match="nothing was updated"):
        optimizers[0].step()
    for optimizer in optimizers:
        params_of(optimizer)[0].grad = torch.full((4,), 2.0)
        optimizer.step()
    assert differences(*map(snapshot, optimizers)) == []


def test_what_overflows_propagates_as_in_torch(backend: str) -> None:
    params = [Parameter(torch.tensor([0.5, 1.0])) for _ in range(2)]
    stock, fused = (torch.optim.RMSprop([param], lr=0.3) for param in params)
    af.fuse(fused, max_grad_norm=0.5, nonfinite="propagate", backend=backend)
    for param in params:
        param.grad = torch.tensor([inf, 1.0])
    torch.nn.utils.clip_grad_norm_(params[:1], 0.5)
    stock.step()
    fused.step()
    torch.testing.assert_close(params[1], params[0], equal_nan=True)
    assert params[1].isnan().tolist() == [True, False]
