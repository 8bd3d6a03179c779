"""Accelerate's loops with accumfused's optimizers: unchanged, and with windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from regression import (
    MAX_NORM,
    K,
    MakeOptimizer,
    assert_trained,
    batches,
    clipping,
    cut,
    fused,
    loss_of,
    network,
    ours,
    stock,
    truth,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accumfused as af

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin


@pytest.fixture(autouse=True)
def one_accelerator_at_a_time() -> Iterator[None]:
    """All Accelerators of a process share their state."""
    reset_state()
    yield
    reset_state()


def reset_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  # not the package's
    GradientState._reset_state()  # noqa: SLF001  # not the package's


class Run:
    """One prepared training. `norms` and `rates`: one an update; the norm of an update that is skipped is inf."""

    def __init__(self, make: MakeOptimizer, accelerator: Any = None) -> None:
        self.accelerator = accelerator or Accelerator(cpu=True)
        optimizer, model = make((net := network()).parameters()), net
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, DataLoader(batches(), batch_size=None), LambdaLR(optimizer, lambda update: 0.9**update)
        )
        self.norms, self.rates = list[float](), list[float]()

    def train(self, epochs: int, *, clips: bool, folds: bool = False) -> Run:
        """The loop of Accelerate's manual. Args: clips: as there, or in the step; folds: and one line more."""
        accelerator, optimizer = self.accelerator, self.optimizer
        for batch in (batch for _ in range(epochs) for batch in self.loader):
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    loss = loss_of(self.model, batch)
                accelerator.backward(loss)
                if folds:
                    needs_grads = accelerator.sync_gradients and accelerator.scaler is not None
                    optimizer.optimizer.accumulate(last=needs_grads)
                if accelerator.sync_gradients and clips:
                    norm = float(accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM))
                optimizer.step()
                if accelerator.sync_gradients and not clips:
                    norm = math.inf if accelerator.optimizer_step_was_skipped else float(optimizer.optimizer.grad_norm)
                self.scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    self.norms.append(norm if math.isfinite(norm) else math.inf)
                    self.rates.append(self.scheduler.get_last_lr()[0])
        return self

    def scale(self) -> float:
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0


def prepared(precision: str, across_epochs: bool) -> Any:
    plugin = GradientAccumulationPlugin(num_steps=K, sync_with_dataloader=not across_epochs)
    given = "no" if precision == "scaler" else precision
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, mixed_precision=given)
    if precision == "scaler":
        # What Accelerate makes on a GPU. 2^127 overflows at first, and again when it has grown.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        optimizers = accelerator._optimizers  # noqa: SLF001  # not the package's
        accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(optimizers[0].optimizer)
    return accelerator


@pytest.mark.pairwise(
    loop=("unchanged", "clips in the step", "folds"), make=(ours, fused), precision=("no", "bf16", "scaler"),
    across_epochs=(False, True),
)  # fmt: skip
def test_its_loop_and_its_windows_give_the_stock_run(loop: str, make: Any, precision: str, across_epochs: bool) -> None:
    expected = Run(stock, prepared(precision, across_epochs)).train(4, clips=True)
    clips = loop == "unchanged"
    run = Run(make if clips else clipping, prepared(precision, across_epochs))
    run.train(4, clips=clips, folds=loop == "folds")
    assert len(expected.norms) == (10 if across_epochs else 12)
    assert max(expected.norms) > MAX_NORM
    assert (precision == "scaler") == (3 <= expected.norms.count(math.inf) <= 8)
    assert run.rates == expected.rates
    assert run.scale() == expected.scale()
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert_trained(run.model, expected.model)


@pytest.mark.parametrize("in_loss", [False, True], ids=["accumulate", "backward"])
def test_weighted_windows_are_the_exact_mean_over_all_samples(in_loss: bool) -> None:
    run = Run(clipping)  # without gradient_accumulation_steps: Accelerate would divide by it too
    for batch, last in af.windows(run.loader, K):
        loss = loss_of(run.model, batch)
        if in_loss:
            run.optimizer.optimizer.backward(loss, weight=len(batch[0]))
        else:
            run.accelerator.backward(loss)
            run.optimizer.optimizer.accumulate(weight=len(batch[0]))
        if last:
            run.optimizer.step()
    assert_trained(run.model, truth(cut(batches())))


@pytest.mark.parametrize("saved_after", [K, 1], ids=["after a step", "within a window"])
def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path, saved_after: int) -> None:
    def train(run: Run, indices: range) -> None:
        for index in indices:
            run.accelerator.backward(loss_of(run.model, batches()[index]))
            run.optimizer.optimizer.accumulate(index + 1)
            if (index + 1) % K == 0:
                run.optimizer.step()
                run.scheduler.step()

    whole, resumed = Run(clipping), Run(clipping)
    train(whole, range(saved_after))
    whole.accelerator.save_state(str(tmp_path))
    resumed.accelerator.load_state(str(tmp_path))
    for run in (whole, resumed):
        train(run, range(saved_after, 2 * K))
    assert len({*resumed.scheduler.get_last_lr(), *whole.scheduler.get_last_lr()}) == 1
    assert_same(resumed.optimizer.optimizer, whole.optimizer.optimizer)
