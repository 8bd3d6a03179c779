"""One training in the loops of Accelerate, Lightning, Fabric and Hugging Face's Trainer, and what each must equal.

Without weights that is the framework's own run with torch's optimizer; with weights the mean over all samples of each
window, in float64; after a checkpoint the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_loops
import pytest
import regression
import trainers
from compare import assert_same
from harness import pairwise
from lightning_loops import Linears, Manual, ManualWindowed, ReleasedLinears, Stock, Weighted, Windowed, fit, precision
from regression import OVERFLOW, PRECISIONS, ROUNDING, Case, K, Trained, batches, cut, fused, loss_of, network, ours
from torch import nn
from trainers import Accelerated, accelerated, by_trainer, forget_processes, weighted_by_accelerate

import accumfused as af
from accumfused.loop import linears


@pytest.fixture(autouse=True)
def one_accelerator_at_a_time() -> Iterator[None]:
    forget_processes()
    yield
    forget_processes()


LOOPS: dict[str, Callable[[Case], Trained]] = {
    **{f"accelerate{which}": functools.partial(accelerated, bool(which)) for which in ("", ", folds")},
    "accelerate, weights": functools.partial(weighted_by_accelerate, False),
    "accelerate, in the loss": functools.partial(weighted_by_accelerate, True),
    **{
        f"lightning, {kind.__name__}": functools.partial(lightning_loops.by_lightning, kind)
        for kind in (Stock, Windowed, Weighted, Linears, ReleasedLinears, Manual, ManualWindowed)
    },
    "fabric": lightning_loops.by_fabric, "trainer": by_trainer,
}  # fmt: skip


@functools.cache
def stock_run(framework: str, case: Case) -> Trained:
    clip = "norm" if case.clip == "in the step" else case.clip
    run = LOOPS[{"lightning": "lightning, Stock"}.get(framework, framework)](
        replace(case, make=regression.stock, clip=clip)
    )
    assert regression.difference(run.net, network()) > 0.1
    assert len({*run.rates}) > 1
    return run


def rows(loops: Sequence[Any], **axes: Sequence[Any]) -> list[Any]:
    """Loops and cases, in which every two values of two axes meet."""
    return [
        pytest.param(loop, Case(**dict(zip(axes, values, strict=True))), id=f"{loop}-{'-'.join(map(name_of, values))}")
        for loop, *values in pairwise({"loop": loops, **axes})
    ]


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("loop", "case"), rows(
    ("accelerate", "accelerate, folds", "lightning, Stock", "lightning, Windowed", "trainer"), make=(ours, fused),
    name=PRECISIONS, k=(1, K), clip=tuple(lightning_loops.CLIPS), by_epoch=(False, True),
))  # fmt: skip
def test_without_weights_the_run_is_the_stock_one(loop: str, case: Case) -> None:
    framework, *_ = loop.split(",")
    if (framework, case.clip) == ("trainer", "value"):
        case = replace(case, clip="norm")  # it has no other
    expected, run = stock_run(framework, case), LOOPS[loop](case)
    regression.assert_trained(run.net, expected.net)
    assert (run.updates, run.steps, run.scale) == (expected.updates, expected.steps, expected.scale)
    assert run.rates == expected.rates
    if case.clip in ("norm", "in the step"):
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert (case.name == "16-mixed") == (run.steps < run.updates) or framework == "lightning"
    never = stock_run(framework, replace(case, clip="never"))
    assert case.clip == "never" or regression.difference(expected.net, never.net) > 0.01


AXES: dict[str, tuple[Any, ...]] = {
    "make": (ours, fused), "name": (*PRECISIONS, OVERFLOW), "k": (1, K), "clip": ("never", "in the step", "norm"),
}  # fmt: skip
PLAIN: dict[str, tuple[Any, ...]] = {"make": (ours, fused), "clip": ("never", "in the step")}
WEIGHTED = [
    *rows(["lightning, Weighted"], **AXES | {"name": (*ROUNDING, OVERFLOW)}),
    # The stock mean is exact of one micro-batch: the masters of bf16-true keep what it rounds away.
    *rows(["lightning, Stock"], **AXES | {"name": (*ROUNDING, OVERFLOW), "k": (1,)}),
    *rows(["lightning, Linears", "lightning, ReleasedLinears"], **AXES),
    *rows(["lightning, Manual", "lightning, ManualWindowed"], **AXES | {"k": (K,), "clip": ("never", "in the step")}),
    *rows(["fabric"], **AXES | {"k": (K,)}),
    # Its own clip needs gradients, which an open window has not.
    *rows(["accelerate, weights", "accelerate, in the loss"], **PLAIN, k=(1, K)),
    *rows(["trainer"], **PLAIN, name=("32-true", "bf16-mixed"), k=(1, K)),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "case"), WEIGHTED)
def test_with_weights_a_window_is_the_mean_over_its_samples(
    loop: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    run, windows = LOOPS[loop](case), cut(case.data, case.k)
    assert run.updates in (0, len(windows))
    if case.name == OVERFLOW:
        del windows[1 // case.k]
        assert run.scale == (2.0**8 if case.k == 1 else 2.0**6)  # halved, and doubled after two good steps, and two
    regression.assert_trained(run.net, regression.truth(windows, case.clip != "never"), case.precision)
    assert run.steps == len(windows)


def resumed_by_accelerate(folder: Path, saved_after: int, case: Case) -> tuple[Any, Any]:
    def go_on(run: Accelerated, indices: range) -> None:
        for index in indices:
            run.accelerator.backward(loss_of(run.model, batches()[index]))
            run.optimizer.accumulate(index + 1)
            if (index + 1) % K == 0:
                run.wrapped.step()
                run.scheduler.step()

    whole, resumed = Accelerated(case), Accelerated(case)
    go_on(whole, range(saved_after))
    whole.accelerator.save_state(str(folder))
    resumed.accelerator.load_state(str(folder))
    for run in (whole, resumed):
        go_on(run, range(saved_after, 2 * K))
    assert len({*resumed.scheduler.get_last_lr(), *whole.scheduler.get_last_lr()}) == 1
    return resumed.optimizer, whole.optimizer


def resumed_by_lightning(folder: Path, kind: Any, case: Case) -> tuple[Any, Any]:
    whole, first, second = (kind(case.optimizer_of, "step") for _ in range(3))
    options = {"accumulate_grad_batches": K}
    expected = fit(whole, max_epochs=2, **options, **precision(case.precision))
    fit(first, max_epochs=1, **options, **precision(case.precision)).save_checkpoint(folder / "epoch.ckpt")
    resumed = fit(second, max_epochs=2, ckpt_path=folder / "epoch.ckpt", **options, **precision(case.precision))
    assert first.rates + second.rates == whole.rates
    assert resumed.global_step == expected.global_step == 6
    return resumed.optimizers[0], expected.optimizers[0]


def resumed_by_fabric(folder: Path, case: Case) -> tuple[Any, Any]:
    """Within a window."""
    (fabric, model, wrapper, _), (other, fresh, unwrapped, _) = (lightning_loops.fabric_of(case) for _ in range(2))
    lightning_loops.train(model, wrapper, fabric.backward, batches())
    fabric.backward(loss_of(model, batches()[0]))
    wrapper.accumulate(2.0)
    fabric.save(folder / "run.ckpt", {"model": model, "optimizer": wrapper})
    other.load(folder / "run.ckpt", {"model": fresh, "optimizer": unwrapped})
    for each_model, each in ((model, wrapper), (fresh, unwrapped)):
        fabric.backward(loss_of(each_model, batches()[1]))
        each.accumulate(3.0)
        each.step()
    return unwrapped.optimizer, wrapper.optimizer


RESUMED: dict[str, Callable[..., tuple[Any, Any]]] = {
    "accelerate": functools.partial(resumed_by_accelerate, saved_after=K),
    "accelerate, within a window": functools.partial(resumed_by_accelerate, saved_after=1),
    "fabric, within a window": resumed_by_fabric, "lightning": functools.partial(resumed_by_lightning, kind=Stock),
    "lightning, Weighted": functools.partial(resumed_by_lightning, kind=Weighted),
}  # fmt: skip


@pytest.mark.parametrize(("loop", "case"), [
    *rows([*RESUMED][:3], **PLAIN), *rows([*RESUMED][3:], **PLAIN, name=PRECISIONS)
])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, loop: str, case: Case) -> None:
    resumed, whole = RESUMED[loop](tmp_path, case=case)
    assert_same(resumed, whole)


@pytest.mark.parametrize("loop", ["lightning, Windowed", "trainer"])
@pytest.mark.parametrize("k", [1, K])
def test_batch_norm_is_warned_of_once_where_windows_have_several_micro_batches(
    loop: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_norm() -> nn.Module:
        net = network()
        net[0].add_module("norm", nn.BatchNorm1d(4))
        return net

    for module in (lightning_loops, trainers):
        monkeypatch.setattr(module, "network", with_norm)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        LOOPS[loop](Case(regression.clipping, k=k, by_epoch=True))
    found = [str(each.message) for each in seen if each.category is af.BatchNormWarning]
    assert ["norm (BatchNorm1d)" in text for text in found] == [True] * (k > 1)
