"""What a loop does wrong without a wrong call, and is told once."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop import Loop
from table import Own
from torch import nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accumfused as af


def told(loop: Callable[[], Any]) -> list[str]:
    """The texts of the package's warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop()
    return [str(warning.message) for warning in seen if warning.category is af.AccumulationWarning]


# ---- gradients that nobody resets ------------------------------------------------------------------------------------


def train(micro_batches: int, reset: str, backend: str) -> Any:
    """Three windows as README has them, but for one line: each backward pass adds 1 to the gradient."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    x = torch.ones(1, 2)
    if reset == "static":
        model.weight.grad = torch.ones(1, 2)
    for _, last in af.windows(range(3 * micro_batches), micro_batches):
        if reset == "static":  # as a captured graph writes it
            model.weight.grad.data.copy_(x)  # type: ignore[union-attr]
        else:
            model(x).sum().backward()
        if reset == "accumulate":
            optimizer.accumulate()
        if last:
            optimizer.step()
            if reset == "model":
                model.zero_grad(set_to_none=False)
            elif reset == "optimizer":
                optimizer.zero_grad(set_to_none=False)
            elif reset == "none":
                optimizer.zero_grad()
            elif reset == "in place":
                model.weight.grad.zero_()  # type: ignore[union-attr]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("reset", ["forgotten", "accumulate", "model", "optimizer", "none", "in place", "static"])
def test_a_loop_that_piles_up_gradients_is_told_once(backend: str, reset: str, micro_batches: int) -> None:
    found = told(lambda: train(micro_batches, reset, backend))
    assert ["neither accumulate() nor zero_grad()" in text for text in found] == [True] * (reset == "forgotten")


# ---- parameters that are written within a window ---------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 1, 130, 199])
def test_a_parameter_that_each_window_writes_comes_to_light_in_a_few(backend: str, written: int) -> None:
    params = [Parameter(torch.ones(1)) for _ in range(200)]
    optimizer = af.SGD(params, lr=0.1, backend=backend)

    def loop(windows: int, *, writes: bool) -> None:
        for _ in range(windows):
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones(1)
                optimizer.accumulate()
                if writes:
                    with torch.no_grad():
                        params[written].mul_(1.0)
            optimizer.step()

    assert told(lambda: loop(5, writes=False)) == []
    (text,) = told(lambda: loop(4, writes=True))  # 64 of the 200 are watched in each
    assert "was written while a window was open" in text


def test_parameters_that_a_window_takes_up_are_watched_too(backend: str) -> None:
    first, *new = (Parameter(torch.ones(1)) for _ in range(100))
    optimizer = af.SGD([first], lr=0.1, backend=backend)
    first.grad = torch.ones(1)
    optimizer.accumulate()
    with torch.no_grad():
        new[0].mul_(1.0)  # before it has a gradient here
    optimizer.add_param_group({"params": new})
    first.grad = torch.ones(1)
    optimizer.accumulate()
    twin = copy.deepcopy(optimizer)
    assert told(optimizer.step) == told(twin.step) == []


def test_windows_that_another_loop_left_standing_count_for_no_optimizer() -> None:
    """A cell of a notebook was stopped after two micro-batches; zeros in place and one backward are two writes, too."""
    standing = iter(af.windows(range(4), 4))
    next(standing), next(standing)
    model = nn.Linear(2, 1, bias=False)
    optimizer = af.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    assert told(loop) == []
    assert len([*standing]) == 2


# ---- windows that a loop leaves open ---------------------------------------------------------------------------------

LEFT_OPEN = r"has left open .* call optimizer\.zero_grad\(\) after such a loop"


class EndedError(Exception):
    """What ends a loop within a window."""


class Phases:
    """Loops over four micro-batches of gradients 1, 2, 3, 4, in windows of two; one begins a window and ends there."""

    def __init__(self, backend: str) -> None:
        self.param = Parameter(torch.zeros(1))
        self.optimizer = af.SGD([self.param], lr=1.0, backend=backend)

    def phase(self, end: str = "", **options: Any) -> None:
        with contextlib.suppress(EndedError):
            for x, last in af.windows([1.0, 2.0, 3.0, 4.0], 2, **options):
                if x == 4 and end == "break":
                    break  # the policy has moved too far: nothing more of this rollout counts
                if x == 4 and end == "exception":
                    raise EndedError
                if x == 4 and end == "continue":
                    continue
                (self.param * x).sum().backward()
                self.optimizer.accumulate(weight=1)
                if last:
                    self.optimizer.step()


@pytest.mark.parametrize("end", ["break", "exception", "continue"])
def test_a_window_that_a_loop_has_left_open_is_told_when_the_next_loop_adds_to_it(backend: str, end: str) -> None:
    it = Phases(backend)
    assert told(lambda: it.phase(end)) == []
    with pytest.warns(af.AccumulationWarning, match=LEFT_OPEN):
        it.phase()
    assert told(lambda: (it.phase(end), it.phase())) == []  # once
    strict = Phases(backend)
    strict.phase(end)
    with warnings.catch_warnings():
        af.strict()
        with pytest.raises(af.AccumulationWarning, match=LEFT_OPEN):
            strict.phase()
    assert strict.param.item() == -1.5  # before anything is written: the remedy gives what an early stop gives
    strict.optimizer.zero_grad()
    assert told(strict.phase) == []
    assert strict.param.item() == -1.5 - 1.5 - 3.5


@pytest.mark.parametrize("remedy", ["zero_grad", "step", "resumed", "checkpoint", "copy"])
def test_a_window_that_is_to_go_on_or_has_ended_is_not_told(remedy: str) -> None:
    it = Phases("auto")
    it.phase("break")
    options: dict[str, Any] = {}
    if remedy in ("zero_grad", "step"):
        getattr(it.optimizer, remedy)()
    elif remedy == "resumed":
        options = {"resumed": it.optimizer}
    elif remedy == "checkpoint":
        saved = it.optimizer.state_dict()
        it.optimizer.zero_grad()
        it.optimizer.load_state_dict(saved)
        options = {"resumed": it.optimizer}
    else:
        it.optimizer = copy.deepcopy(it.optimizer)
        it.param = it.optimizer.param_groups[0]["params"][0]
    assert told(lambda: it.phase(**options)) == []


def test_a_checkpoints_window_is_told_when_a_loop_adds_to_it_without_resumed() -> None:
    saved = Phases("auto")
    saved.phase("break")
    it = Phases("auto")
    it.optimizer.load_state_dict(saved.optimizer.state_dict())
    with pytest.warns(af.AccumulationWarning, match=LEFT_OPEN):
        it.phase()
    it = Phases("auto")
    it.optimizer.load_state_dict(saved.optimizer.state_dict())
    it.param.sum().backward()
    assert told(lambda: it.optimizer.accumulate(weight=1)) == []  # a loop that counts for itself


def test_loops_within_a_window_may_begin_and_end() -> None:
    """The outer optimizer takes the gradients of all inner loops of two tasks; each of these has windows of its own."""
    shared, head = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    outer, inner = af.SGD([shared], lr=1.0), af.SGD([head], lr=1.0)

    def loop(end: bool) -> None:
        for task, task_is_last in af.windows([1.0, 2.0, 3.0, 4.0], 2):
            for x, last in af.windows([1.0, 2.0, 3.0, 4.0], 2):
                (shared * task * x + head * x).sum().backward()
                outer.accumulate()
                inner.accumulate()
                if last:
                    inner.step()
                if end and x == 3:
                    inner.step()
                    break
            if task_is_last:
                outer.step()

    assert told(lambda: loop(False)) == told(lambda: loop(True)) == []


def test_an_inner_loop_that_leaves_its_window_open_is_told() -> None:
    """PPO within a loop over rollouts: a rollout is a window of its own, and its windows should end within it."""
    it = Phases("auto")

    def loop() -> None:
        for rollout, _ in af.windows(range(3), 1):
            it.phase("break" if rollout == 1 else "")

    assert len(told(loop)) == 1


# ---- a clip that finds no gradients ----------------------------------------------------------------------------------


def clip_in(optimizer: Any, *, last: bool = False) -> None:
    for _ in range(2):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.accumulate(last=last)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("last", [False, True])
def test_a_clip_of_an_open_window_is_told_once_where_it_is_needed(
    backend: str, limit: float | None, last: bool
) -> None:
    optimizer = af.SGD([Parameter(torch.ones(2))], lr=0.1, backend=backend, max_grad_norm=limit)
    found = told(lambda: clip_in(optimizer, last=last))
    assert ["max_grad_norm=" in text for text in found] == [True] * (limit is None and not last)


# ---- hooks before a step ---------------------------------------------------------------------------------------------


def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.clamp_(-0.5, 0.5)


class Noise:
    def __call__(self, optimizer: Any, *_: Any) -> None:
        [p.grad.add_(0.0) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]

    def method(self, optimizer: Any, *_: Any) -> None:
        self(optimizer)
        any(p.grad is not None for g in optimizer.param_groups for p in g["params"])


def clips(optimizer: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)


def counts(optimizer: Any, *_: Any) -> None:
    optimizer.counted = 1


def limited(limit: float, optimizer: Any, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        if getattr(param.grad, "shape", None):
            param.grad.clamp_(-limit, limit)


HOOKS: dict[str, Any] = {
    "function": clamp, "object": Noise(), "method": Noise().method, "clip": clips,
    "decorated": torch.no_grad()(clamp), "partial": functools.partial(limited, 0.5),
}  # fmt: skip


def step_windows(optimizer: Any, group: Any = None, *, last: bool = False, accumulates: bool = True) -> None:
    for _ in range(2):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        if accumulates:
            optimizer.accumulate(last=last)
        (group or optimizer).step()
        optimizer.zero_grad()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", ["one", "all", "group", "own step"])
def test_a_hook_that_finds_no_gradients_in_an_open_window_is_told_once(backend: str, hook: str, place: str) -> None:
    def made(hooks: Any) -> Any:
        stock = Own if place == "own step" else torch.optim.SGD
        optimizer = af.fuse(stock([Parameter(torch.ones(2))], lr=0.1), backend=backend, max_grad_norm=9.0)
        if place != "all":
            optimizer.register_step_pre_hook(hooks)
        return optimizer

    def loop(hooks: Any, **options: Any) -> Callable[[], None]:
        optimizer = made(hooks)
        if place == "group":
            other = af.SGD([Parameter(torch.ones(2))])
            optimizer.max_grad_norm = None
            return lambda: step_windows(optimizer, af.ClipGroup([optimizer, other], 1.0), **options)
        return lambda: step_windows(optimizer, **options)

    handle = register_optimizer_step_pre_hook(HOOKS[hook]) if place == "all" else None
    try:
        (text,) = told(loop(HOOKS[hook]))
        assert "finds no gradient in an open window; close the window before step()" in text
        assert told(loop(HOOKS[hook], last=True)) == []
        assert told(loop(HOOKS[hook], accumulates=False)) == []
    finally:
        if handle is not None:
            handle.remove()
    assert told(loop(counts)) == []


def test_the_hooks_of_torch_and_of_the_audit_are_not_told(backend: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(print)  # a builtin function has no code

    def loop() -> None:
        with torch.profiler.profile(), af.audit.watch(model, optimizer):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.accumulate()
                optimizer.step()
                schedule.step()

    assert told(loop) == []


# ---- windows that are dropped ---------------------------------------------------------------------------------------


def test_windows_that_are_dropped_before_each_of_the_last_steps_warn_once(backend: str) -> None:
    it, update = Loop(backend), "backward accumulate " * 2 + "step "
    misplaced = "zero_grad backward accumulate " * 2 + "step "  # half of each window of two is lost
    it.run(misplaced * 2 + update + misplaced * 2)  # two in a row may be lawful
    with pytest.warns(UserWarning, match="dropped before each of the last steps; zero_grad"):
        it.run(misplaced)
    it.run(misplaced)
    assert it.values() == [8.0 - 0.5 * (6 * 1 + 1 * 2), 8.0 - 0.5 * 2 * (6 * 1 + 1 * 2)]


# ---- steps that are skipped ------------------------------------------------------------------------------------------


def skipping(first: int, every: int, steps: int, backend: str, **settings: Any) -> list[int]:
    """After how many steps a run is told whose first steps, and then every so-manieth, are not finite."""
    param = Parameter(torch.ones(1))
    optimizer = af.SGD([param], lr=0.1, max_grad_norm=1.0, backend=backend, **settings)
    found = []
    for index in range(steps):
        param.grad = torch.full((1,), torch.nan if index < first or index % every == 0 else 1.0)
        if told(optimizer.step):
            found.append(index + 1)
    return found


@pytest.mark.parametrize(
    ("first", "every", "found"),
    [
        (160, 1, [32, 64, 96, 128, 160]),  # all
        (12, 1000, []),  # a loss scale that falls to where it should be
        (13, 1000, [32]),
        (0, 2, [64, 96, 128, 160]),  # half of the first ones may be
        (0, 4, []),
    ],
)
def test_a_run_that_skips_a_third_of_its_steps_is_told(backend: str, first: int, every: int, found: list[int]) -> None:
    assert skipping(first, every, 160, backend) == found


def test_a_run_that_stalls_above_a_limit_is_told_which() -> None:
    param = Parameter(torch.ones(1))
    optimizer = af.SGD([param], lr=0.1, skip_above=1.0)

    def stall() -> None:
        for _ in range(32):
            param.grad = torch.full((1,), 2.0)
            optimizer.step()

    (text,) = told(stall)
    assert "24 of 24 steps" in text
    assert "raise skip_above" in text
