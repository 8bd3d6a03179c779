"""The state machine of a training loop, as a table, and its numbers, as a plain loop in float64.

The gradients are small whole numbers, which the test writes into `p.grad` through autograd. With lr = 0.5 all results
are exact in float32 as long as nothing is clipped or divided by a sum of weights.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot import differences, refused, snapshot
from torch import Tensor

import accumfused as af

LR = 0.5
SHAPES = [(3, 4), (5,), (0,)]

NO_GRADIENT = (RuntimeError, r"call loss\.backward\(\) before each accumulate\(\)")
STILL_ACCUMULATOR = (RuntimeError, r"call optimizer\.step\(\) or optimizer\.zero_grad\(\) after a window was closed")
NOT_ACCUMULATED = (RuntimeError, r"call accumulate\(\) after the last backward\(\), before step\(\)")
LEFT_OVER = (RuntimeError, r"call accumulate\(\) or zero_grad\(\) first")

# idle: no window and no gradient. live: no window, a gradient in p.grad. open: a window, p.grad is None.
# open+live: a window and a gradient that is not in it. closed: p.grad is the accumulator.
# fmt: off
TRANSITIONS = {
    #                     idle          live       open          open+live        closed
    "backward":         ("live",       "live",    "open+live",  "open+live",     "closed"),
    "accumulate":       (NO_GRADIENT,  "open",    NO_GRADIENT,  "open",          STILL_ACCUMULATOR),
    "accumulate_last":  (NO_GRADIENT,  "closed",  NO_GRADIENT,  "closed",        STILL_ACCUMULATOR),
    "step":             ("idle",       "live",    "idle",       NOT_ACCUMULATED, "idle"),
    "zero_grad":        ("idle",       "idle",    "idle",       "idle",          "idle"),
    "zero_grad_fill":   ("idle",       "live",    "idle",       "live",          "live"),
    "model_zero_grad":  ("idle",       "idle",    "open",       "open",          "idle"),
    "model_zero_fill":  ("idle",       "live",    "open",       "open+live",     "closed"),
    "clip":             ("idle",       "live",    "open",       "open+live",     "closed"),
    "closure":          ("live",       "live",    NOT_ACCUMULATED, NOT_ACCUMULATED, "idle"),
    "own_backward":     ("open",       LEFT_OVER, "open",       LEFT_OVER,       STILL_ACCUMULATOR),
    "own_backward_last": ("closed",    LEFT_OVER, "closed",     LEFT_OVER,       STILL_ACCUMULATOR),
    "state_dict":       ("idle",       "live",    "open",       "open+live",     "closed"),
    "resume":           ("idle",       "live",    "open",       "open+live",     "live"),
    "copy":             ("idle",       "idle",    "open",       "open",          "idle"),
}
# fmt: on
STATES = ("idle", "live", "open", "open+live", "closed")
ROUTES = {  # how to come to a state
    "idle": [],
    "idle, after a window": ["backward", "accumulate", "step"],
    "idle, after a closed window": ["backward", "accumulate_last", "step"],
    "idle, after zero_grad on a window": ["backward", "accumulate", "zero_grad"],
    "idle, after model.zero_grad on a closed window": ["backward", "accumulate_last", "model_zero_grad"],
    "live": ["backward"],
    "open": ["backward", "accumulate"],
    "open, by own_backward": ["own_backward"],
    "open+live": ["backward", "accumulate", "backward"],
    "closed": ["backward", "accumulate_last"],
    "closed, of two": ["backward", "accumulate", "backward", "accumulate_last"],
}


class Loop:
    """A model whose gradients are given, its optimizer, and beside it what a plain loop computes in float64."""

    def __init__(self, backend: str, *, weighted: bool = False, max_grad_norm: float | None = None) -> None:
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.full(shape, 8.0)) for shape in SHAPES])
        self.optimizer = af.SGD(self.model.parameters(), lr=LR, backend=backend, max_grad_norm=max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.backend = backend
        self.weighted = weighted
        self.exact = not weighted and max_grad_norm is None
        self.state = "idle"
        self.replaceable = False  # the closed window's p.grad was released by the model, and no call has seen it yet
        self.backwards = 0
        self.params = [param.detach().double() for param in self.model]
        self.grads: list[Tensor] | None = None  # what p.grad is to be
        self.sums: list[Tensor] | None = None  # the open window's
        self.total = 0.0

    def call(self, name: str) -> None:
        """Makes a call and checks what comes of it: the refusal, or the new state with all its numbers."""
        expected = TRANSITIONS[name][STATES.index(self.state)]
        if self.replaceable and expected == "live" and name in ("step", "closure"):
            expected = "idle"  # what is in p.grad now counts as the window's gradients, replaced: consumed
        if isinstance(expected, str):
            getattr(self, name)()
            self.state = expected
        elif name == "closure":
            before = snapshot(self.optimizer)
            with pytest.raises(expected[0], match=expected[1]):
                self.closure()
            written = differences(before, snapshot(self.optimizer))
            assert written == ["grad 0", "grad 1", *(["grad 2"] if self.state == "open" else [])]  # the closure's own
            self.state = "open+live"
        else:
            with refused(self.optimizer, *expected):
                getattr(self, name)()
        if name in ("accumulate", "accumulate_last", "own_backward", "own_backward_last", "step", "closure"):
            self.replaceable = False
        self.check()

    def check(self) -> None:
        for param, truth in zip(self.model, self.params, strict=True):
            torch.testing.assert_close(param.detach().double(), truth, rtol=0, atol=self.tolerance)
        for index, param in enumerate(self.model):
            if self.grads is None:
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad.double(), self.grads[index], rtol=0, atol=self.tolerance)

    @property
    def tolerance(self) -> float:
        # Sums of whole numbers are exact. Dividing by weights and clipping round relatively by 2^-24, a few times;
        # the values stay below 1000. A coefficient that is off by 1e-3 moves the parameters by more than 1e-3.
        return 0.0 if self.exact else 2e-4

    # ---- the calls, each with what it means ----------------------------------------------------------------------

    def loss(self) -> Tensor:
        self.backwards += 1
        slopes = [torch.arange(p.numel()).reshape(p.shape) % 4 + 1 + self.backwards % 3 for p in self.model]
        self.slopes = [slope.double() for slope in slopes]
        return torch.stack([(param * slope).sum() for param, slope in zip(self.model, slopes, strict=True)]).sum()

    @property
    def weight(self) -> float | None:
        return float(1 + self.backwards % 3) if self.weighted else None

    def backward(self) -> None:
        self.loss().backward()
        self.grads = _add(self.grads, self.slopes)

    def closure(self) -> None:
        def evaluate() -> float:
            self.backward()
            return 17.0

        assert self.optimizer.step(evaluate) == 17.0
        self._plain_step()

    def accumulate(self) -> None:
        self.optimizer.accumulate(self.weight)
        self._plain_fold()

    def accumulate_last(self) -> None:
        self.optimizer.accumulate(self.weight, last=True)
        self._plain_fold()
        self._plain_close()

    def own_backward(self) -> None:
        loss = self.loss()
        self.optimizer.backward(loss, self.weight)
        self.grads = self.slopes
        self._plain_fold()

    def own_backward_last(self) -> None:
        loss = self.loss()
        self.optimizer.backward(loss, weight=self.weight, last=True)
        self.grads = self.slopes
        self._plain_fold()
        self._plain_close()

    def step(self) -> None:
        assert self.optimizer.step() is None
        self._plain_step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.grads = self.sums = None
        self.replaceable = False

    def zero_grad_fill(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.grads = None if self.grads is None else [torch.zeros_like(grad) for grad in self.grads]
        self.sums = None
        self.replaceable = False

    def model_zero_grad(self) -> None:
        self.model.zero_grad()
        self.grads = None
        self.replaceable = self.replaceable or self.state == "closed"

    def model_zero_fill(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.grads = None if self.grads is None else [torch.zeros_like(grad) for grad in self.grads]

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 4.0)
        if self.grads is not None:
            self.grads = _clipped(self.grads, 4.0)
            self.exact = False

    def state_dict(self) -> None:
        assert self.optimizer.state_dict()["param_groups"][0]["lr"] == LR

    def resume(self) -> None:
        """A new optimizer for the same model goes on from the checkpoint."""
        checkpoint = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = af.SGD(self.model.parameters(), lr=1e3, backend=self.backend, max_grad_norm=self.max_grad_norm)
        self.optimizer.load_state_dict(checkpoint)
        self.replaceable = False

    def copy(self) -> None:
        """A copy of model and optimizer goes on, without p.grad (as torch copies); the original goes another way."""
        model, optimizer = self.model, self.optimizer
        self.model, self.optimizer = copy.deepcopy((model, optimizer))
        self.grads, self.replaceable = None, False
        for param in model:
            param.grad = torch.full_like(param, 100.0)
        if self.state != "closed":
            optimizer.accumulate(7.0 if optimizer._runtime.window.is_weighted else None)

    def _plain_fold(self) -> None:
        assert self.grads is not None
        weight = self.weight or 1.0
        self.total = (self.total if self.sums is not None else 0.0) + weight
        self.sums = _add(self.sums, [grad * weight for grad in self.grads])
        self.grads = None

    def _plain_close(self) -> None:
        assert self.sums is not None
        self.grads = [total / self.total for total in self.sums] if self.weighted else self.sums
        self.sums = None

    def _plain_step(self) -> None:
        consumed = self.state in ("open", "closed") or self.replaceable
        if self.sums is not None:
            self._plain_close()
        if self.grads is None:
            return
        grads = self.grads if self.max_grad_norm is None else _clipped(self.grads, self.max_grad_norm)
        self.params = [param - LR * grad for param, grad in zip(self.params, grads, strict=True)]
        if consumed:
            self.grads = None


def _add(sums: list[Tensor] | None, terms: list[Tensor]) -> list[Tensor]:
    return list(terms) if sums is None else [total + term for total, term in zip(sums, terms, strict=True)]


def _clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    return [grad * min(1.0, max_norm / (float(norm) + 1e-6)) for grad in grads]


# ---- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_call_from_every_state_does_what_the_table_says(backend: str, route: str, weighted: bool) -> None:
    for name in TRANSITIONS:
        loop = Loop(backend, weighted=weighted)
        for call in ROUTES[route]:
            loop.call(call)
        assert loop.state == route.split(",")[0]
        loop.call(name)
        for call in {"open+live": ["accumulate", "step"]}.get(loop.state, ["step"]):
            loop.call(call)  # what the call left behind reaches the parameters, no more and no less


@pytest.mark.filterwarnings("ignore:two accumulation windows")
@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.sampled_from([*TRANSITIONS, *["backward", "accumulate", "step"] * 3]), min_size=5, max_size=25),
    weighted=st.booleans(),
    max_grad_norm=st.sampled_from([None, 3.0]),
    backend=st.sampled_from(["auto", "torch"]),
)
def test_any_sequence_of_calls_follows_the_table(
    calls: list[str], weighted: bool, max_grad_norm: float | None, backend: str
) -> None:
    loop = Loop(backend, weighted=weighted, max_grad_norm=max_grad_norm)
    for call in calls:
        loop.call(call)
