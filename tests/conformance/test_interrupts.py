"""Ctrl-C at any point of accumulate() and step(): the optimizer is as before the call or as after it.

Then whoever goes on (and repeats what has left its gradients in p.grad, or its window open) gets the numbers of a run
that nobody interrupted, bit for bit. A backend that launches several times may call its window broken instead.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits
from interrupts import OURS, Interrupted

import accumfused as af
from accumfused.backends.several import SeveralDevices

SIZES = (40, 7, 300)
Call = Callable[[], Any]


class Run:
    """A window of two micro-batches and its step, again and again; each has the same gradients."""

    def __init__(self, backend: Any, weights: tuple[Any, Any], *, closes: bool, **settings: Any) -> None:
        self.params = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]
        self.optimizer = af.AdamW(self.params, lr=0.1, **settings)
        if isinstance(backend, str):
            self.optimizer = af.AdamW(self.params, lr=0.1, backend=backend, **settings)
        else:
            inside.use_backend(self.optimizer, backend)
        self.weights, self.closes = weights, closes

    def backward(self, number: int) -> None:
        for param, size in zip(self.params, SIZES, strict=True):
            assert param.grad is None
            param.grad = (number + 1) * (torch.arange(size) - size / 3) / size

    def calls(self) -> Iterator[tuple[Call, Call, Callable[[], bool]]]:
        """What comes before a call; the call; whether it has to be made again."""
        for number, weight in enumerate(self.weights):
            last = self.closes and number == 1
            yield (
                lambda number=number: self.backward(number),
                lambda weight=weight, last=last: self.optimizer.accumulate(weight, last=last),
                lambda: self.params[0].grad is not None and not self.is_closed,
            )
        yield self.note_values, self.optimizer.step, lambda: torch.equal(self.values(), self.before)

    def note_values(self) -> None:
        self.before = self.values()

    def values(self) -> torch.Tensor:
        return torch.cat([param.detach() for param in self.params]).clone()

    @property
    def is_closed(self) -> bool:
        return "window: closed" in repr(self.optimizer)

    def state(self) -> dict[str, Any]:
        state = {"params": self.values(), "skipped": self.optimizer.skipped_steps}
        for index, entries in enumerate(self.optimizer.state_dict()["state"].values()):
            state |= {f"{name} {index}": value for name, value in entries.items()}
        return state


def whole(run: Run) -> dict[str, Any]:
    for _ in range(2):
        for prepare, call, _ in run.calls():
            prepare()
            call()
    return run.state()


WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {"weights": (None, None), "closes": False},
    "weights": {"weights": (3, 5), "closes": False},
    "weights on the device": {"weights": (lambda: torch.tensor(3.0), lambda: torch.tensor(5.0)), "closes": False},
    "closed": {"weights": (3, 5), "closes": True},
    "clipped, with histories": {
        "weights": (3, 5), "closes": False, "clip": af.ZScore(warmup=2), "noise_scale": True, "metrics": True,
    },
}  # fmt: skip


def made(backend: Any, window: dict[str, Any]) -> Run:
    own = dict(window)
    own["weights"] = tuple(weight() if callable(weight) else weight for weight in own["weights"])
    return Run(backend, own.pop("weights"), closes=own.pop("closes"), **own)


@pytest.mark.parametrize("which", ["cpu", "reference", "two devices"])
@pytest.mark.parametrize("name", WINDOWS)
def test_an_interrupted_call_is_made_or_not(
    which: str, name: str, request: pytest.FixtureRequest, two_devices: SeveralDevices
) -> None:
    backend: Any = two_devices if which == "two devices" else which
    expected = whole(made(backend, WINDOWS[name]))
    found = set[str]()
    for number in range(3):  # the call that is interrupted, in the second window: the first has warmed up
        instructions = interrupt(made(backend, WINDOWS[name]), number, None)[0].seen
        draws = random.Random(number)
        points = range(instructions)
        some = [*draws.sample(points, min(6, instructions)), points[-1]]  # the last one is behind the launch
        for at in points if request.config.getoption("--full") else some:
            run = made(backend, WINDOWS[name])
            interrupted, (is_to_do, again), rest = interrupt(run, number, at)
            assert interrupted.came
            if "window: broken" in repr(run.optimizer):
                found.add("broken")
                assert which != "cpu" or "metrics" in WINDOWS[name]  # a measured step launches several times
                assert_broken(run)
                continue
            is_again = is_to_do()
            found.add("not made" if is_again else "made")
            if is_again:
                again()
            for prepare, call, _ in rest:
                prepare()
                call()
            assert_all_same_bits(run.state(), expected)
    assert "not made" in found
    assert not found.isdisjoint({"made", "broken"})


def interrupt(run: Run, number: int, at: int | None) -> tuple[Interrupted, tuple[Call, Call], list[Any]]:
    """Makes a window and the next one's calls before this one, which is interrupted there, or counted.

    Returns:
        The interruption; whether the call has to be made again, and the call; the calls that remain.
    """
    for prepare, call, _ in run.calls():
        prepare()
        call()
    calls = [*run.calls()]
    for prepare, call, _ in calls[:number]:
        prepare()
        call()
    prepare, call, is_to_do = calls[number]
    prepare()
    with Interrupted(at) as interrupted:
        call()
    return interrupted, (is_to_do, call), calls[number + 1 :]


def assert_broken(run: Run) -> None:
    """Every call but zero_grad() refuses; then all goes on."""
    for call in (run.optimizer.step, run.optimizer.accumulate, run.optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
            call()
    run.optimizer.zero_grad()
    for prepare, call, _ in run.calls():
        prepare()
        call()


def test_real_signals(request: pytest.FixtureRequest) -> None:
    """A timer's, at random moments: thousands of parameters make kernels take most of the time."""
    draw = random.Random(0)
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2000)]
    optimizer = af.SGD(params, lr=1.0, backend="cpu", max_grad_norm=1e9)
    came = 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def make(call: Call, is_to_do: Callable[[], bool]) -> None:
        """Interrupts a call until it is made, but at most five times."""
        nonlocal came
        for tries in itertools.count():
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3) if tries < 5 else 0)
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
            if not is_to_do():
                return

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # others' callbacks run in a collection, and Python drops what a signal raises there
    try:
        for steps in range(1, 60):
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones(64)
                make(optimizer.accumulate, lambda: params[0].grad is not None)
            make(optimizer.step, lambda steps=steps: float(params[0].detach()[0]) > -2 * steps)
            assert all(float(param.detach().sum()) == -128 * steps for param in params[::97])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
        torch.set_grad_enabled(True)  # a signal within torch's own no_grad() leaves it off
    assert came > 10


@pytest.mark.parametrize("kind", ["optimizers", "a group"])
def test_no_call_enters_torchs_no_grad(kind: str) -> None:
    """A signal that comes within its __enter__ would leave autograd off for good."""
    model = torch.nn.ParameterList([torch.ones(8), torch.ones(8)])
    optimizers = [kind_of([param]) for kind_of, param in zip((af.AdamW, af.AdamWScheduleFree), model, strict=True)]
    group = af.ClipGroup(optimizers, max_grad_norm=1.0) if kind == "a group" else None
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is torch.no_grad.__enter__.__code__:
            callers = [each.frame for each in inspect.getouterframes(frame)[1:3]]
            if callers[0].f_code.co_name == "decorate_context":  # @torch.no_grad()
                del callers[0]
            entered.extend([str(callers[0])] if callers[0].f_code.co_filename.startswith(OURS) else [])

    for is_measured in (False, True):  # the first calls make plans and states
        for param in model:
            param.grad = torch.ones(8)
        sys.setprofile(note if is_measured else None)
        try:
            for optimizer in optimizers:
                optimizer.accumulate()
            for stepping in optimizers if group is None else [group]:
                stepping.step()
            for optimizer in optimizers:
                optimizer.load_full_precision_state_dict(model, optimizer.full_precision_state_dict(model))
            optimizers[1].eval()
            optimizers[1].train()
        finally:
            sys.setprofile(None)
    assert entered == []
