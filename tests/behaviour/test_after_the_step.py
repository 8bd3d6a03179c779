"""What follows an update never raises: it warns, and as an error the warning says that the step is made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from faults import Fault
from torch.nn import Parameter

import accumfused as af
from accumfused.core.skips import Skips

SETTINGS: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": True},
    "noise": {"noise_scale": True},
    "histories": {"clip": af.ZScore(warmup=2), "skip_above": af.RunningMean(3.0, warmup=2)},
    "16 bits": {"metrics": True, "master_weights": "split16"},
}
KINDS = ["alone", "group", "scaler", "scaler of a group"]


class Run:
    """A step is to come, of `p.grad` or of a window: SGD moves each weight by 1."""

    def __init__(self, backend: str, kind: str, setting: str, window: str) -> None:
        dtype = torch.bfloat16 if setting == "16 bits" else torch.float32
        self.params = [Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]
        policies = ("clip", "skip_above") if "group" in kind else ()  # a group has none
        options = {name: value for name, value in SETTINGS[setting].items() if name not in policies}
        self.members = [af.SGD([param], lr=1.0, backend=backend, **options) for param in self.params]
        self.window = window
        self.stepper: Any = self.members[0]
        if "group" in kind:
            self.stepper = af.ClipGroup(self.members, max_grad_norm=1e9)
        else:
            self.members, self.params = self.members[:1], self.params[:1]
        self.scaler = af.GradScaler("cpu", init_scale=4.0) if "scaler" in kind else None
        self.prepare()

    def prepare(self) -> None:
        for _ in range(1 if self.window == "p.grad" else 2):
            for param, member in zip(self.params, self.members, strict=True):
                param.grad = torch.full_like(param, 4.0 if self.scaler else 1.0)
                if self.window == "open":
                    member.accumulate(1.0)
        if self.scaler is not None:
            self.scaler.scale(torch.ones(()))  # makes the scale

    def step(self) -> None:
        if self.scaler is None:
            self.stepper.step()
        else:
            self.scaler.step(self.stepper)

    @property
    def moves(self) -> list[float]:
        return [-param.sum().item() / 3 for param in self.params]


@pytest.mark.pairwise(kind=KINDS, setting=[*SETTINGS], window=["p.grad", "open"], is_strict=[False, True])
def test_a_step_that_raises_was_not_made_unless_the_error_says_so(
    backend: str, kind: str, setting: str, window: str, is_strict: bool, request: pytest.FixtureRequest
) -> None:
    """Every second call fails, others where warnings are errors; with --full each of them."""
    whole = Run(backend, kind, setting, window)
    with Fault(None) as counted:
        whole.step()
    assert whole.moves == [1.0] * len(whole.params)
    outcomes = set[str]()
    every = request.config.getoption("--full")
    for at in range(1, counted.seen + 1) if every else range(1 + is_strict, counted.seen + 1, 2):
        run = Run(backend, kind, setting, window)
        with warnings.catch_warnings(record=not is_strict) as warned:
            warnings.simplefilter("error" if is_strict else "always", af.AccumulationWarning)
            try:
                with Fault(at):
                    run.step()
            except MemoryError:
                outcomes.add("raised")
                if any("window: broken" in repr(member) for member in run.members):
                    with pytest.raises(RuntimeError, match="zero_grad"):
                        run.step()
                    continue
                assert run.moves == [0.0] * len(run.params)
                run.step()
                assert run.moves == [1.0] * len(run.params)
                continue
            except af.AfterStepWarning:
                outcomes.add("warned")
            else:
                assert warned is not None
                assert all("the step is made: do not repeat it" in str(warning.message) for warning in warned)
                outcomes |= {"warned"} if warned else set()
        assert run.moves == [1.0] * len(run.params)
        if run.scaler is not None:
            with pytest.raises(RuntimeError, match="already been called"):
                run.step()
            run.scaler.update()
        assert run.moves == [1.0] * len(run.params)
    assert "raised" in outcomes
    assert "warned" in outcomes or (setting != "metrics" and "scaler" not in kind)


def test_a_warning_of_skips_says_that_the_step_is_over(backend: str) -> None:
    param = Parameter(torch.zeros(3))
    optimizer = af.SGD([param], lr=1.0, backend=backend, nonfinite="skip")
    with warnings.catch_warnings():
        af.strict()
        for _ in range(Skips.WATCH_EVERY - 1):
            param.grad = torch.full((3,), torch.inf)
            optimizer.step()
        param.grad = torch.ones(3)
        with pytest.raises(af.AfterStepWarning, match=r"steps were skipped .* the step is made: do not repeat it"):
            optimizer.step()
    assert param.tolist() == [-1.0] * 3


def test_ctrl_c_after_the_step_is_not_swallowed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    param = Parameter(torch.zeros(3))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    param.grad = torch.ones(3)
    monkeypatch.setattr(Skips, "stepped", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert param.tolist() == [-1.0] * 3


def test_an_error_in_a_members_hook_finds_the_steps_of_all_made(backend: str) -> None:
    run = Run(backend, "group", "noise", "open")

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    run.members[0].register_step_post_hook(fails)
    with pytest.raises(ZeroDivisionError):
        run.step()
    assert run.moves == [1.0, 1.0]
