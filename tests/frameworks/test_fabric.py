"""An accumfused optimizer that Fabric has wrapped: `fabric.setup(model, af.AdamW(...))`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", minversion="2.4")
from compare import assert_close, assert_same_bits, everything
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning_loops import (
    LIGHTNING_WARNINGS,
    MAX_NORM,
    OPTIONS,
    ROUNDING,
    Batch,
    K,
    assert_trained,
    batches,
    cut,
    loss_of,
    mean_gradients,
    network,
    ours,
    ours_clipping,
    stock,
    truth,
)

import accumfused as af

pytestmark = [pytest.mark.filterwarnings(text) for text in LIGHTNING_WARNINGS]

every_precision = pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])


class Run:
    """A Fabric with the network and the optimizer that it has set up.

    Attributes:
        wrapper, optimizer: what Fabric returns, and what it wraps.
    """

    def __init__(self, name: str = "32-true", make: Any = ours, init_scale: float = 2.0**6) -> None:
        settings: dict[str, Any] = {"precision": name}
        if name == "16-mixed":  # on a CPU it would become "bf16-mixed" without a scaler
            self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
            settings = {"plugins": MixedPrecision(name, "cpu", scaler=self.scaler)}
        self.fabric = Fabric(accelerator="cpu", devices=1, **settings)
        self.net = network()
        self.optimizer = make(self.net.parameters())
        self.model, self.wrapper = self.fabric.setup(self.net, self.optimizer)

    def backward(self, batch: Batch) -> None:
        self.fabric.backward(loss_of(self.model, batch))

    def window(self, window: list[Batch], *, accumulates: Any = None, closes: bool = True) -> None:
        """Everything before the step; the window may stay open where there is no scaler."""
        for batch in window:
            self.backward(batch)
            last = closes and batch is window[-1]
            (accumulates or self.wrapper).accumulate(len(batch[0]), last=last)


@every_precision
@pytest.mark.parametrize("clip", [None, MAX_NORM])
@pytest.mark.parametrize("make", [ours, lambda params: af.fuse(stock(params))])
def test_a_loop_without_windows_is_the_stock_one(name: str, clip: float | None, make: Any) -> None:
    runs = [Run(name, optimizer, 2.0**10) for optimizer in (stock, make)]
    for run in runs:
        for window in cut(batches() * 2):
            for batch in window:
                run.backward(batch)
            if clip is not None:
                run.fabric.clip_gradients(run.model, run.wrapper, max_norm=clip)
            run.wrapper.step()
            run.wrapper.zero_grad()
    assert_trained(runs[1].net, runs[0].net)


@pytest.mark.parametrize("name", ["16-mixed"])
def test_where_a_stock_fused_optimizer_cannot_be_clipped(name: str) -> None:
    run = Run(name, lambda params: torch.optim.AdamW(params, fused=True, **OPTIONS))
    run.backward(batches()[0])
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
        run.fabric.clip_gradients(run.model, run.wrapper, max_norm=MAX_NORM)


@every_precision
@pytest.mark.parametrize("clips", ["never", "ours", "fabric's"])
def test_weighted_windows_are_exact_with_every_precision(name: str, clips: str) -> None:
    run = Run(name, ours_clipping if clips == "ours" else ours)
    for window in cut(batches()):
        run.window(window)
        if clips == "fabric's":
            run.fabric.clip_gradients(run.model, run.wrapper, max_norm=MAX_NORM)
        run.wrapper.step()
        run.wrapper.zero_grad()
    assert_trained(run.net, truth(cut(batches()), None if clips == "never" else MAX_NORM), ROUNDING[name])


@pytest.mark.parametrize("accumulates", ["wrapper", "optimizer"])
@pytest.mark.parametrize("steps", ["wrapper", "optimizer"])
@pytest.mark.parametrize("closes", [False, True])
def test_the_wrapper_and_the_optimizer_share_the_window(accumulates: str, steps: str, closes: bool) -> None:
    run = Run(make=ours_clipping)
    for window in cut(batches()):
        run.window(window, accumulates=getattr(run, accumulates), closes=closes)
        getattr(run, steps).step()
    assert_trained(run.net, truth(cut(batches()), MAX_NORM))


def test_an_open_window_is_refused_where_there_is_a_scaler() -> None:
    run = Run("16-mixed")
    run.window(batches()[:K], closes=False)
    for call in (run.wrapper.step, lambda: run.fabric.clip_gradients(run.model, run.wrapper, max_norm=MAX_NORM)):
        with pytest.raises(RuntimeError, match=r"close it with accumulate\(\.\.\., last=True\)"):
            call()


def test_an_overflow_drops_the_window_and_nothing_else() -> None:
    data = batches()
    data[1][1].fill_(torch.inf)
    run = Run("16-mixed", ours_clipping)
    for window in cut(data):
        run.window(window)
        run.wrapper.step()
        run.wrapper.zero_grad()
    assert_trained(run.net, truth(cut(data)[1:], MAX_NORM), ROUNDING["16-mixed"])
    assert run.scaler.get_scale() == 2.0**6  # halved, and doubled after two good steps
    assert float(everything(run.optimizer)["step 0"]) == 2


def test_the_normalizer_goes_to_the_optimizer_because_the_wrapper_takes_none() -> None:
    run = Run()
    for window in cut(batches()):
        for batch in window:
            run.fabric.backward(loss_of(run.model, batch) * len(batch[0]))  # a sum
            run.wrapper.accumulate()
        with pytest.raises(TypeError, match="unexpected keyword argument 'normalizer'"):
            run.wrapper.step(normalizer=2)
        run.wrapper.optimizer.step(normalizer=sum(len(x) for x, _ in window))
    assert_trained(run.net, truth(cut(batches())))


def test_what_is_known_after_a_step_is_read_through_the_wrapper() -> None:
    run = Run()
    gradients = mean_gradients(network().double(), batches()[:K])
    run.window(batches()[:K])
    run.wrapper.step()
    assert_close(run.wrapper.grad_norm, torch.cat([grad.flatten() for grad in gradients]).norm(), "model")
    assert not run.wrapper.step_was_skipped
    run.window(batches()[:1], closes=False)
    x, y = batches()[1]
    run.backward((x, torch.full_like(y, torch.inf)))
    run.wrapper.accumulate(1)
    run.wrapper.step()
    assert run.wrapper.step_was_skipped
    assert int(run.wrapper.skipped_steps) == 1


def test_zero_grad_through_the_wrapper_drops_the_window() -> None:
    run = Run(make=ours_clipping)
    run.window(cut(batches())[1], closes=False)
    run.wrapper.zero_grad()
    for window in cut(batches()):
        run.window(window)
        run.wrapper.step()
    assert_trained(run.net, truth(cut(batches()), MAX_NORM))


def test_a_setting_made_through_the_wrapper_is_the_optimizers() -> None:
    run = Run()
    run.wrapper.max_grad_norm = MAX_NORM
    assert run.optimizer.max_grad_norm == MAX_NORM
    for batch in batches():
        run.backward(batch)
        run.wrapper.step()
        run.wrapper.zero_grad()
    assert_trained(run.net, truth(cut(batches(), 1), MAX_NORM))


def test_nothing_is_left_on_the_wrapper() -> None:
    run = Run()
    before = dict(vars(run.wrapper))
    run.window(batches()[:K], closes=False)
    run.wrapper.backward(loss_of(run.model, batches()[0]), 2.0, last=True)
    run.wrapper.step()
    run.wrapper.zero_grad()
    run.wrapper.max_grad_norm = MAX_NORM
    run.wrapper.load_state_dict(run.wrapper.state_dict())
    run.wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert vars(run.wrapper) == before


@pytest.mark.parametrize("over", ["wrapper", "optimizer"])
def test_a_scheduler_sees_the_steps(over: str) -> None:
    """Out of order it would warn, and warnings are errors here."""
    run = Run()
    scheduler = torch.optim.lr_scheduler.StepLR(getattr(run, over), step_size=1, gamma=0.5)
    for n, window in enumerate(cut(batches()), start=1):
        run.window(window)
        run.wrapper.step()
        scheduler.step()
        assert run.optimizer.param_groups[0]["lr"] == OPTIONS["lr"] * 0.5**n


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    def train(run: Run, windows: list[list[Batch]]) -> None:
        for window in windows:
            run.window(window)
            run.wrapper.step()

    whole, first, second = (Run(make=ours_clipping) for _ in range(3))
    train(whole, cut(batches()))
    train(first, cut(batches())[:2])
    first.fabric.save(tmp_path / "run.ckpt", {"model": first.model, "optimizer": first.wrapper})
    second.fabric.load(tmp_path / "run.ckpt", {"model": second.model, "optimizer": second.wrapper})
    train(second, cut(batches())[2:])
    states = everything(second.optimizer)
    for key, value in everything(whole.optimizer).items():
        assert_same_bits(states[key], value, key)


def test_a_checkpoint_within_a_window_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    first, second = (Run(make=ours_clipping) for _ in range(2))
    first.window(batches()[:2], closes=False)
    first.fabric.save(tmp_path / "run.ckpt", {"model": first.model, "optimizer": first.wrapper})
    second.fabric.load(tmp_path / "run.ckpt", {"model": second.model, "optimizer": second.wrapper})
    for run in (first, second):
        run.window(batches()[2:K])
        run.wrapper.step()
    states = everything(second.optimizer)
    for key, value in everything(first.optimizer).items():
        assert_same_bits(states[key], value, key)
