"""Accelerate's loops with accumfused's optimizers: unchanged, and with windows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accumfused as af

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration  # noqa: E402

SAMPLES, EPOCHS, WINDOW = 22, 2, 4  # micro-batches of 2: windows of 4, a remainder of 3
MAX_NORM = 0.3  # of gradients whose norm is around 1
# A large eps: without it AdamW hardly sees by how much a gradient was scaled.
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_accelerator_at_a_time() -> Iterator[None]:
    """All Accelerators of a process share their state."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  # not the package's
    GradientState._reset_state()  # noqa: SLF001  # not the package's
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  # not the package's
    GradientState._reset_state()  # noqa: SLF001  # not the package's


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)), batch_size=2)


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()


class Run:
    """One prepared training. `norms` and `rates`: one an update."""

    def __init__(self, optimizer_of: Callable[..., torch.optim.Optimizer], accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        model = net()
        optimizer = optimizer_of(model.parameters(), **ADAMW)
        scheduler = LambdaLR(optimizer, lambda update: 0.9**update)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader(), scheduler
        )
        self.norms: list[float] = []
        self.rates: list[float] = []

    def train(self, epochs: int = EPOCHS, *, clip: bool = True, fold: bool = False) -> Run:
        """The loop of Accelerate's manual; `fold`: and one line more."""
        accelerator, optimizer = self.accelerator, self.optimizer
        for _ in range(epochs):
            for batch in self.loader:
                with accelerator.accumulate(self.model):
                    with accelerator.autocast():
                        loss = loss_of(self.model, batch)
                    accelerator.backward(loss)
                    if fold:
                        needs_grads = accelerator.sync_gradients and accelerator.scaler is not None
                        optimizer.optimizer.accumulate(last=needs_grads)
                    if accelerator.sync_gradients and clip:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
                    optimizer.step()
                    if accelerator.sync_gradients and not clip:
                        skipped = accelerator.optimizer_step_was_skipped
                        self.norms.append(math.inf if skipped else float(optimizer.optimizer.grad_norm))
                    self.scheduler.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        self.rates.append(self.scheduler.get_last_lr()[0])
        return self

    def check(self, stock: Run) -> None:
        assert self.rates == stock.rates
        assert self.norms == pytest.approx(stock.norms, rel=1e-5)
        for (name, mine), theirs in zip(self.model.named_parameters(), stock.model.parameters(), strict=True):
            assert_close(mine, theirs, "model", name)


def adamw(backend: str = "auto", **settings: Any) -> Callable[..., af.AdamW]:
    return lambda params, **options: af.AdamW(params, backend=backend, **settings, **options)


def fused(backend: str = "auto", **settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, **options: af.fuse(torch.optim.AdamW(params, **options), backend=backend, **settings)


# ---- the loop as it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", [adamw, fused])
def test_the_unchanged_loop_equals_the_stock_run(backend: str, kind: Any, precision: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, mixed_precision=precision)
    stock = Run(torch.optim.AdamW, accelerator).train()
    assert len(stock.norms) == 2 * 3
    assert max(stock.norms) > MAX_NORM
    Run(kind(backend), accelerator).train().check(stock)


def test_clipping_inside_the_step_equals_accelerates(backend: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    stock = Run(torch.optim.AdamW, accelerator).train()
    Run(adamw(backend, max_grad_norm=MAX_NORM), accelerator).train(clip=False).check(stock)


# ---- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across_epochs", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_folding_inside_accelerates_own_windows_equals_the_stock_run(
    backend: str, precision: str, across_epochs: bool
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, sync_with_dataloader=not across_epochs)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, mixed_precision=precision)
    stock = Run(torch.optim.AdamW, accelerator).train(epochs=4)
    accelerator.step = 0
    assert len(stock.norms) == (11 if across_epochs else 12)
    ours = Run(adamw(backend, max_grad_norm=MAX_NORM), accelerator)
    ours.train(epochs=4, clip=False, fold=True).check(stock)


@pytest.mark.parametrize("in_loss", [False, True], ids=["accumulate", "backward"])
def test_weighted_windows_are_the_exact_mean_over_all_tokens(backend: str, in_loss: bool) -> None:
    """Micro-batches of 1 to 4 samples, and a remainder: against float64."""
    batches = list(torch.randn(26, 6).split([4, 1, 3, 2, 2, 4, 1, 1, 3, 4, 1]))
    accelerator = Accelerator(cpu=True)  # no gradient_accumulation_steps: Accelerate would divide by it too
    model = net()
    truth = copy.deepcopy(model).double()
    stock = torch.optim.AdamW(truth.parameters(), **ADAMW)
    data = DataLoader(batches, batch_size=None)
    model, optimizer, data = accelerator.prepare(
        model, adamw(backend, max_grad_norm=MAX_NORM)(model.parameters(), **ADAMW), data
    )
    window = []
    for batch, last in af.windows(data, WINDOW):
        loss = loss_of(model, batch)
        if in_loss:
            optimizer.optimizer.backward(loss, weight=len(batch))
        else:
            accelerator.backward(loss)
            optimizer.optimizer.accumulate(weight=len(batch))
        window.append(batch.double())
        if last:
            optimizer.step()
            stock.zero_grad()
            loss_of(truth, torch.cat(window)).backward()
            torch.nn.utils.clip_grad_norm_(truth.parameters(), MAX_NORM)
            stock.step()
            window = []
    assert not window
    for mine, exact in zip(model.parameters(), truth.parameters(), strict=True):
        assert_close(mine, exact, "model")


# ---- a scaler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["unchanged", "clips in the step", "folds"])
def test_a_scaler_skips_and_backs_off_as_in_the_stock_run(backend: str, loop: str) -> None:
    def accelerator_with_scaler() -> Accelerator:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
        # What Accelerate makes on a GPU. 2^127 overflows at first, and again when it has grown.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(accelerator._optimizers[0].optimizer)  # noqa: SLF001  # not the package's
        return accelerator

    stock = Run(torch.optim.AdamW, accelerator_with_scaler()).train(epochs=4)
    stock.norms = [norm if math.isfinite(norm) else math.inf for norm in stock.norms]
    clip = loop == "unchanged"
    ours = Run(adamw(backend, max_grad_norm=None if clip else MAX_NORM), accelerator_with_scaler())
    ours.train(epochs=4, clip=clip, fold=loop == "folds")
    ours.norms = [norm if math.isfinite(norm) else math.inf for norm in ours.norms]
    ours.check(stock)
    assert 3 <= ours.norms.count(math.inf) <= 8
    assert ours.accelerator.scaler.get_scale() == stock.accelerator.scaler.get_scale()


# ---- checkpoints and the wrapper -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path, backend: str, fold: bool) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, project_config=project)
    whole = Run(adamw(backend, max_grad_norm=MAX_NORM), accelerator).train(epochs=1, clip=False, fold=fold)
    accelerator.save_state(str(tmp_path / "state"))
    whole.train(epochs=1, clip=False, fold=fold)

    one_accelerator_again = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    resumed = Run(adamw(backend, max_grad_norm=MAX_NORM), one_accelerator_again)
    one_accelerator_again.load_state(str(tmp_path / "state"))
    resumed.train(epochs=1, clip=False, fold=fold)
    assert resumed.rates == whole.rates[3:]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert_same_bits(mine, theirs)


def test_a_state_that_is_saved_within_a_window_goes_on_bit_for_bit(tmp_path: Path) -> None:
    runs = [Run(adamw(), Accelerator(cpu=True)) for _ in range(2)]
    batches = list(runs[0].loader)[:2]

    def fold(run: Run, batch: Any, weight: float) -> None:
        run.accelerator.backward(loss_of(run.model, batch))
        run.optimizer.optimizer.accumulate(weight)

    fold(runs[0], batches[0], 3.0)
    runs[0].accelerator.save_state(str(tmp_path / "state"))
    runs[1].accelerator.load_state(str(tmp_path / "state"))
    for run in runs:
        fold(run, batches[1], 0.7)
        run.optimizer.step()
    for mine, theirs in zip(runs[1].model.parameters(), runs[0].model.parameters(), strict=True):
        assert_same_bits(mine, theirs)


def test_accelerates_wrapper_hides_what_torch_does_not_have() -> None:
    run = Run(adamw(), Accelerator(cpu=True))
    for name in ("accumulate", "backward", "grad_norm", "max_grad_norm"):
        assert not hasattr(run.optimizer, name)
        assert hasattr(run.optimizer.optimizer, name)
