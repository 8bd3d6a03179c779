"""Fabric and Lightning's manual optimization: windows by hand, through the object that wraps the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from lightning_loops import KINDS, PRECISIONS, Loop, by_hand
from peers import assert_same
from regression import (
    MAX_NORM,
    OPTIONS,
    K,
    assert_trained,
    batches,
    clipping,
    cut,
    mean_gradients,
    ours,
    truth,
    with_an_infinity,
)
from torch import nn


def windows() -> list[Any]:
    return cut(batches())


every_kind = pytest.mark.parametrize("kind", KINDS)


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise(
    kind=tuple(KINDS), name=PRECISIONS, clips=("never", "in the step", "by the framework"), closes=(False, True),
    folds=("wrapper", "optimizer"), steps=("wrapper", "optimizer"),
)  # fmt: skip
def test_weighted_windows_are_exact_through_the_wrapper_and_beside_it(
    kind: str, name: str, clips: str, closes: bool, folds: str, steps: str
) -> None:
    if clips == "by the framework" and kind != "fabric":
        name = "32-true"  # in manual optimization Lightning clips what the scaler has scaled
    if name == "16-mixed":
        steps = "wrapper"  # which knows of the scaler
    closes |= name == "16-mixed" or clips == "by the framework"

    def body(loop: Loop) -> None:
        for window in windows():
            loop.window(window, by=folds, closes=closes)
            if clips == "by the framework":
                loop.clip()
            getattr(loop, steps).step()
            loop.wrapper.zero_grad()

    loop = by_hand(kind, body, clipping if clips == "in the step" else ours, name)
    assert_trained(loop.net, truth(windows(), clips != "never"), name)


# ---- a scaler ------------------------------------------------------------------------------------------------------


@every_kind
def test_an_open_window_is_refused_where_there_is_a_scaler(kind: str) -> None:
    def body(loop: Loop) -> None:
        loop.window(windows()[0], closes=False)
        for call in (loop.wrapper.step, *([loop.clip] if kind == "fabric" else [])):
            with pytest.raises(RuntimeError, match=r"close it with accumulate\(\.\.\., last=True\)"):
                call()

    by_hand(kind, body, name="16-mixed")


@every_kind
def test_an_overflow_drops_the_window_and_nothing_else(kind: str) -> None:
    loop = by_hand(kind, lambda loop: loop.train(cut(with_an_infinity())), clipping, "16-mixed")
    assert_trained(loop.net, truth(windows()[1:]), "16-mixed")
    assert loop.scaler.get_scale() == 2.0**6  # halved, and doubled after two good steps
    assert {float(state["step"]) for state in loop.optimizer.state.values()} == {2}


# ---- the wrapper ---------------------------------------------------------------------------------------------------


@every_kind
def test_calls_through_the_wrapper_are_the_optimizers_and_leave_nothing_on_it(kind: str) -> None:
    def body(loop: Loop) -> None:
        # Lightning keeps what is loaded on the wrapper, for a stock optimizer too, and the window is still the one.
        loop.wrapper.load_state_dict(loop.optimizer.state_dict())
        before = dict(vars(loop.wrapper))
        loop.wrapper.max_grad_norm = MAX_NORM
        assert loop.optimizer.max_grad_norm == MAX_NORM
        loop.window(windows()[1], closes=False)
        loop.wrapper.zero_grad()  # drops it
        loop.train(windows())
        assert_trained(loop.net, truth(windows()))
        assert not loop.wrapper.step_was_skipped
        norm = nn.utils.get_total_norm(mean_gradients(truth(windows()[:-1]), windows()[-1]))
        assert_close(loop.wrapper.grad_norm, norm, "model")
        loop.train([with_an_infinity()[1:2]])
        assert loop.wrapper.step_was_skipped
        assert int(loop.wrapper.skipped_steps) == 1
        loop.wrapper.state_dict()
        loop.wrapper.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert vars(loop.wrapper) == before
        loop.wrapper.backward(loop.model(torch.ones(1, 6)).sum(), 2.0, last=True)
        assert loop.net[0].weight.grad is not None

    by_hand(kind, body)


@pytest.mark.pairwise(kind=tuple(KINDS), over=("wrapper", "optimizer"))
def test_a_scheduler_sees_the_steps(kind: str, over: str) -> None:
    """Out of order it would warn, and warnings are errors here."""

    def body(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(getattr(loop, over), step_size=1, gamma=0.5)
        loop.train(windows()[:1])
        scheduler.step()
        assert loop.optimizer.param_groups[0]["lr"] == OPTIONS["lr"] * 0.5

    by_hand(kind, body)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [K, 2], ids=["after a window", "within a window"])
def test_fabric_resumes_bit_for_bit(tmp_path: Path, saved_after: int) -> None:
    def train(loop: Loop, indices: range) -> None:
        for index in indices:
            loop.window(batches()[index : index + 1], closes=False)
            if (index + 1) % K == 0:
                loop.wrapper.step()

    whole, first, second = (
        by_hand("fabric", lambda loop, end=end: train(loop, range(end)), clipping) for end in (2 * K, saved_after, 0)
    )
    first.fabric.save(tmp_path / "run.ckpt", {"model": first.model, "optimizer": first.wrapper})
    second.fabric.load(tmp_path / "run.ckpt", {"model": second.model, "optimizer": second.wrapper})
    train(second, range(saved_after, 2 * K))
    assert_same(second.optimizer, whole.optimizer)
