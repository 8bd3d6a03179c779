"""The state machine of docs/state-machine.md as a table: which call may follow which. Numbers are test_fuzz.py's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import refused

import accumfused as af

NO_GRADIENT = (RuntimeError, r"call loss\.backward\(\) before each accumulate\(\)")
STILL_ACCUMULATOR = (RuntimeError, r"call optimizer\.step\(\) or optimizer\.zero_grad\(\) after a window was closed")
NOT_ACCUMULATED = (RuntimeError, r"call accumulate\(\) after the last backward\(\), before step\(\)")
LEFT_OVER = (RuntimeError, r"call accumulate\(\) or zero_grad\(\) first")
OPEN = (RuntimeError, "a window is open")

# idle: no window and no gradient. live: no window, a gradient in p.grad. open: a window, p.grad is None.
# open+live: a window and a gradient that is not in it. closed: p.grad is the accumulator.
# fmt: off
STATES = {"idle": [], "live": ["backward"], "open": ["backward", "accumulate"],
          "open+live": ["backward", "accumulate", "backward"], "closed": ["backward", "close"]}
TRANSITIONS = {
    #                  idle          live       open          open+live        closed
    "backward":      ("live",       "live",    "open+live",  "open+live",     "closed"),
    "accumulate":    (NO_GRADIENT,  "open",    NO_GRADIENT,  "open",          STILL_ACCUMULATOR),
    "close":         (NO_GRADIENT,  "closed",  NO_GRADIENT,  "closed",        STILL_ACCUMULATOR),
    "step":          ("idle",       "live",    "idle",       NOT_ACCUMULATED, "idle"),
    "zero_grad":     ("idle",       "idle",    "idle",       "idle",          "idle"),
    "zero_fill":     ("idle",       "live",    "idle",       "live",          "live"),
    "own_backward":  ("open",       LEFT_OVER, "open",       LEFT_OVER,       STILL_ACCUMULATOR),
    "state_dict":    ("idle",       "live",    "open",       "open+live",     "closed"),
    "load":          ("idle",       "live",    OPEN,         OPEN,            "idle"),
}
# fmt: on


def calls(param: torch.Tensor, optimizer: Any) -> dict[str, Callable[[], Any]]:
    saved = optimizer.state_dict()
    return {
        "backward": lambda: (2 * param).sum().backward(), "accumulate": optimizer.accumulate,
        "close": lambda: optimizer.accumulate(last=True), "step": optimizer.step, "zero_grad": optimizer.zero_grad,
        "zero_fill": lambda: optimizer.zero_grad(set_to_none=False),
        "own_backward": lambda: optimizer.backward((2 * param).sum()), "state_dict": optimizer.state_dict,
        "load": lambda: optimizer.load_state_dict(saved),
    }  # fmt: skip


def state_of(param: torch.Tensor, optimizer: Any) -> str:
    window = next((line.split()[1] for line in repr(optimizer).splitlines() if "window:" in line), "")
    return window.strip(",") + "+live" * (window == "open," and param.grad is not None) or (
        "idle" if param.grad is None else "live"
    )


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("state", STATES)
def test_every_call_from_every_state_does_what_the_table_says(backend: str, state: str, name: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    call, after = calls(param, optimizer), TRANSITIONS[name][[*STATES].index(state)]
    for before in STATES[state]:
        call[before]()
    if isinstance(after, tuple):
        with refused(optimizer, *after):
            call[name]()
        after = state
    else:
        call[name]()
    assert state_of(param, optimizer) == after
