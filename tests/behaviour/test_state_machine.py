"""The state machine of docs/internals/state-machine.md as tables: which call may follow which, and what is refused.

A refused call names the remedy, and nothing is written. Numbers are those of test_loops.py and test_fuzz.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from compare import Errors, refused
from loop import VERBS, Loop, Verb
from torch.nn import Parameter

import accumfused as af

R, V, T = RuntimeError, ValueError, TypeError
NO_GRADIENT = (R, r"call loss\.backward\(\) before each accumulate\(\)")
STILL_ACCUMULATOR = (R, r"call optimizer\.step\(\) or optimizer\.zero_grad\(\) after a window was closed")
NOT_ACCUMULATED = (R, r"call accumulate\(\) after the last backward\(\), before step\(\)")
LEFT_OVER = (R, r"call accumulate\(\) first, or, .*(the module's zero_grad\(\)|zero_grad\(\) of the optimizer)")
OPEN = (R, r"a window is open.* call (optimizer\.)?step\(\) or zero_grad\(\)")
SOME = (V, "give one to every micro-batch, or to none")
ALL_ZERO = (V, r"all zero, .* call zero_grad\(\) in place")

# idle: no window and no gradient. live: no window, a gradient in p.grad. open: a window, p.grad is None.
# open+live: a window and a gradient that is not in it. closed: p.grad is the accumulator.
# fmt: off
STATES = {"idle": "", "live": "backward", "open": "backward accumulate",
          "open+live": "backward accumulate backward", "closed": "backward close"}
TRANSITIONS = {
    #                  idle          live       open          open+live        closed
    "backward":      ("live",       "live",    "open+live",  "open+live",     "closed"),
    "accumulate":    (NO_GRADIENT,  "open",    NO_GRADIENT,  "open",          STILL_ACCUMULATOR),
    "close":         (NO_GRADIENT,  "closed",  NO_GRADIENT,  "closed",        STILL_ACCUMULATOR),
    "step":          ("idle",       "live",    "idle",       NOT_ACCUMULATED, "idle"),
    "zero_grad":     ("idle",       "idle",    "idle",       "idle",          "idle"),
    "zero_fill":     ("idle",       "live",    "idle",       "live",          "live"),
    "model_zero":    ("idle",       "idle",    "open",       "open",          "closed"),  # as the next call notices
    "own_backward":  ("open",       LEFT_OVER, "open",       LEFT_OVER,       STILL_ACCUMULATOR),
    "state_dict":    ("idle",       "live",    "open",       "open+live",     "closed"),
    "load":          ("idle",       "live",    OPEN,         OPEN,            "idle"),
    "read_full":     ("idle",       "live",    "open",       "open+live",     "closed"),
    "load_full":     ("idle",       "live",    OPEN,         OPEN,            "closed"),
}
# fmt: on


def state_of(it: Loop) -> str:
    window = next((line.split()[1] for line in repr(it.optimizer).splitlines() if "window:" in line), "")
    is_live = it.params[0].grad is not None
    return window.strip(",") + "+live" * (window == "open," and is_live) or ("live" if is_live else "idle")


@pytest.mark.parametrize("verb", TRANSITIONS)
@pytest.mark.parametrize("state", STATES)
def test_every_call_from_every_state_does_what_the_table_says(backend: str, state: str, verb: str) -> None:
    it, after = Loop(backend, STATES[state]), TRANSITIONS[verb][[*STATES].index(state)]
    if isinstance(after, tuple):
        with refused(it.optimizer, *after):
            it.run(verb)
        after = state
    else:
        it.run(verb)
    assert state_of(it) == after


# ---- arguments -------------------------------------------------------------------------------------------------------


def call(name: str, *args: Any, **options: Any) -> Verb:
    """Of the optimizer's method; what is a function is called then, and makes a tensor."""

    def run(it: Loop) -> None:
        loss = [it.loss()] if name == "backward" else []
        given = [value() if callable(value) else value for value in args]
        getattr(it.optimizer, name)(*loss, *given, **{k: v() if callable(v) else v for k, v in options.items()})

    return run


def step_by(normalizer: Any) -> Verb:
    """A step with a closure, which a refused one does not run."""
    return lambda it: it.optimizer.step(pytest.fail, normalizer=normalizer() if callable(normalizer) else normalizer)


def scaled_by_0(it: Loop) -> None:
    it.optimizer.grad_scale = 0.0
    it.optimizer.step()


BAD = (-1, -0.5, nan, inf, -inf)
NO_NUMBER = ("8 tokens", "8", [1], object)
NOT_ONE = (lambda: torch.ones(2), lambda: torch.ones(0), lambda: torch.tensor(1j))
WEIGHT, NORMALIZER, WINDOW = "weight must be ", "normalizer must be ", "backward weighted"
MOVED = (R, r"removed or reordered .* call step\(\) or zero_grad\(\) first")
Row = tuple[str, Verb, Errors, str]
# fmt: off
CALLS: list[Row] = [
    *[("backward", call("accumulate", w, last=w == -1), V, f"{WEIGHT}finite and >= 0, got {w}") for w in BAD],
    *[(WINDOW, call("backward", w, w == -1), V, f"{WEIGHT}finite and >= 0, got {w}") for w in BAD],
    *[("backward", step_by(n), V, f"{NORMALIZER}finite and > 0, got {n}") for n in (0, 0.0, *BAD)],
    *[(WINDOW, step_by(n), V, f"{NORMALIZER}finite and > 0, got {n}") for n in (0, *BAD)],
    *[("backward", call("accumulate", w), T, f"{WEIGHT}a number or a tensor of one element") for w in NO_NUMBER],
    *[("backward", call("accumulate", w), V, f"{WEIGHT}one real number") for w in NOT_ONE],
    *[(WINDOW, step_by(n), V, f"{NORMALIZER}one real number") for n in NOT_ONE],
    (WINDOW, scaled_by_0, V, "grad_scale must be finite and > 0, got 0.0"),
    ("", call("__setattr__", "max_grad_norm", 0.0), V, "max_grad_norm must be > 0, got 0.0; None is off"),
    ("backward", call("accumulate", 0, last=True), *ALL_ZERO),
    ("", call("backward", 0.0, last=True), *ALL_ZERO),
    ("own_empty", VERBS["step"], *ALL_ZERO),
    (WINDOW, VERBS["weighted"], *NO_GRADIENT),
    (WINDOW, lambda it: af.fuse_linears(it.layers, it.optimizer), *OPEN),
    (f"{WINDOW} backward", VERBS["accumulate"], *SOME),
    ("own_backward backward", VERBS["weighted"], *SOME),
    ("own_backward", VERBS["own_weighted"], *SOME),
    ("own_backward take_out", VERBS["step"], *MOVED),
    ("backward close exchange", VERBS["accumulate"], *STILL_ACCUMULATOR),
]
# fmt: on


@pytest.mark.parametrize(("before", "call", "error", "remedy"), CALLS)
def test_a_call_that_cannot_be_right_is_refused(
    backend: str, before: str, call: Verb, error: Errors, remedy: str
) -> None:
    it = Loop(backend, f"backward step zero_grad {before}", momentum=0.5)
    with refused(it.optimizer, error, remedy):
        call(it)


@pytest.mark.parametrize("before", ["nan", "nan weighted", "backward"])
def test_what_is_not_finite_is_refused_where_that_is_asked_for(backend: str, before: str) -> None:
    it = Loop(backend, f"backward step zero_grad {before}", momentum=0.5, nonfinite="raise")
    with refused(it.optimizer, R, r"norm .*, nothing was updated; look for .* call zero_grad\(\) to go"):
        it.optimizer.step(normalizer=torch.tensor(0.0) if before == "backward" else None)


# ---- released gradients, and linear layers that add theirs to the sums -----------------------------------------------


def added(it: Loop) -> None:
    other = af.SGD([Parameter(torch.zeros(1))], lr=0.1)
    af.release_gradients(other)
    try:
        other.add_param_group({"params": it.params[:1]})
    finally:
        assert len(other.param_groups) == 1


OF_ANOTHER = (R, "released by another optimizer")
LATE = (R, r"optimizer\.backward\(loss, weight\) in place of")
EARLY = (R, r"ended early, by an exception.*call optimizer\.zero_grad\(\)")
PART = (R, r"a micro-batch is in progress.*call accumulate\(\)")
RELEASED: dict[str, Row] = {
    "a second release": ("", VERBS["release"], R, r"already; call remove\(\)"),
    "a parameter of two": ("", lambda it: af.release_gradients(af.SGD(it.params[1:])), *OF_ANOTHER),
    "a parameter of two in a new group": ("", added, *OF_ANOTHER),
    "release": ("remove backward accumulate", VERBS["release"], *OPEN),
    "remove in a window": ("backward accumulate", VERBS["remove"], *OPEN),
    "the end of a block": ("backward accumulate", lambda it: it.release.__exit__(None, None, None), *OPEN),
    "a late weight": ("backward", VERBS["weighted"], *LATE),
    "a late tensor": ("backward", call("accumulate", lambda: torch.ones(()), last=True), *LATE),
    "weights first": ("own_weighted", VERBS["backward"], *SOME),
    "weights second": ("backward accumulate", VERBS["own_weighted"], *SOME),
    "zeros": ("own_empty", call("backward", 0, last=True), V, "all zero"),
    "nothing new": ("backward accumulate", VERBS["accumulate"], *NO_GRADIENT),
    "two": ("backward", VERBS["own_backward"], *LEFT_OVER),
    "a step": ("backward accumulate backward", VERBS["step"], *NOT_ACCUMULATED),
    "closed": ("backward close backward", VERBS["accumulate"], *STILL_ACCUMULATOR),
    "closed, backward()": ("backward close", VERBS["own_backward"], *STILL_ACCUMULATOR),
    "a part in state_dict()": ("backward", VERBS["state_dict"], *PART),
    "a part in a copy": ("backward", lambda it: copy.deepcopy(it.optimizer), *PART),
    "failed, accumulate()": ("fail backward", VERBS["accumulate"], *EARLY),
    "failed, backward()": ("backward accumulate fail", VERBS["own_backward"], *EARLY),
    "failed, step()": ("backward accumulate fail backward", VERBS["step"], *EARLY),
}


@pytest.mark.parametrize("way", [{"bucket": 1}, {"bucket": 2**30}, {"fuses": True}], ids=["each", "all", "linears"])
@pytest.mark.parametrize("name", RELEASED)
def test_what_cannot_be_is_refused_and_zero_grad_goes_on(backend: str, way: dict[str, Any], name: str) -> None:
    before, call, error, text = RELEASED[name]
    it = Loop(backend, before, **way)
    with refused(it.optimizer, error, text):
        call(it)
    assert [param.grad for param in it.run("zero_fill").params] == [None, None]
    assert it.run("backward step").values() == [7.5, 7.0]


# ---- loss scaling ----------------------------------------------------------------------------------------------------

OURS, STOCK = af.GradScaler, torch.amp.GradScaler
NOT_CLOSED = r"close it with accumulate\(\.\.\., last=True\) before scaler\.unscale_\(\) or scaler\.step\(\)"
CLOSURE = r"call backward\(\) before scaler\.step\(\)"
SCALED: list[tuple[Callable[..., Any], str, Verb, str]] = [
    (OURS, "scale scaler_step", VERBS["scaler_step"], "already been called since the last update"),
    (OURS, "scale unscale_", VERBS["unscale_"], "already been called on this optimizer"),
    (OURS, "scale accumulate", VERBS["unscale_"], NOT_CLOSED),
    (OURS, "scale", lambda it: it.scaler.step(it.optimizer, lambda: 0.0), CLOSURE),
    (OURS, "scale", lambda it: it.scaler.step(it.optimizer, closure=lambda: 0.0), CLOSURE),
    (STOCK, "scale accumulate", VERBS["scaler_step"], NOT_CLOSED),
    (STOCK, "scale accumulate scale unscale_", VERBS["scaler_step"], NOT_CLOSED),
    (STOCK, "overflow close scaler_step update scale", VERBS["accumulate"], STILL_ACCUMULATOR[1]),
]


@pytest.mark.parametrize(("scaler", "before", "call", "text"), SCALED)
def test_what_a_scaler_cannot_do_is_refused(backend: str, scaler: Any, before: str, call: Verb, text: str) -> None:
    it = Loop(backend, before, scaler=scaler("cpu", init_scale=2.0**10))
    with refused(it.optimizer, R, text):
        call(it)
