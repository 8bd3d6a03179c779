"""Manual optimization: windows by hand, through the object that Lightning wraps around the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning", minversion="2.4")
from compare import assert_close
from lightning_loops import (
    LIGHTNING_WARNINGS,
    MAX_NORM,
    OPTIONS,
    ROUNDING,
    Batch,
    K,
    Stock,
    assert_trained,
    batches,
    cut,
    fit,
    loss_of,
    ours,
    ours_clipping,
    precision,
    truth,
)

pytestmark = [pytest.mark.filterwarnings(text) for text in LIGHTNING_WARNINGS]


def ends_window(model: Stock, batch_idx: int) -> bool:
    return (batch_idx + 1) % K == 0 or model.trainer.is_last_batch


class Manual(Stock):
    """Windows of K micro-batches, the last one shorter.

    Args:
        accumulates, steps: "wrapper" or "optimizer": whom these calls go to.
        closes: the window before the step; needed with a scaler.
    """

    def __init__(self, make: Any, *, accumulates: str = "wrapper", steps: str = "wrapper", closes: bool = True) -> None:
        super().__init__(make)
        self.automatic_optimization = False
        self.accumulates, self.steps, self.closes = accumulates, steps, closes

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        wrapper = self.optimizers()
        known = {"wrapper": wrapper, "optimizer": wrapper.optimizer}
        last = ends_window(self, batch_idx)
        self.manual_backward(loss_of(self.net, batch))
        known[self.accumulates].accumulate(len(batch[0]), last=last and self.closes)
        if last:
            self.before_step(wrapper)
            known[self.steps].step()
            known[self.steps].zero_grad()

    def before_step(self, wrapper: Any) -> None:
        """For a clip."""


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_weighted_windows_are_exact_with_every_precision(name: str, clip: float | None) -> None:
    model = Manual(ours if clip is None else ours_clipping)
    trainer = fit(model, **precision(name))
    assert_trained(model.net, truth(cut(batches()), clip), ROUNDING[name])
    assert trainer.global_step == 3


@pytest.mark.parametrize("accumulates", ["wrapper", "optimizer"])
@pytest.mark.parametrize("steps", ["wrapper", "optimizer"])
@pytest.mark.parametrize("closes", [False, True])
def test_the_wrapper_and_the_optimizer_share_the_window(accumulates: str, steps: str, closes: bool) -> None:
    model = Manual(ours_clipping, accumulates=accumulates, steps=steps, closes=closes)
    fit(model)
    assert_trained(model.net, truth(cut(batches()), MAX_NORM))


def test_lightnings_own_clip_sees_a_closed_window() -> None:
    class Clips(Manual):
        def before_step(self, wrapper: Any) -> None:
            self.clip_gradients(wrapper, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")

    model = Clips(ours)
    fit(model)
    assert_trained(model.net, truth(cut(batches()), MAX_NORM))


def test_an_open_window_is_refused_where_there_is_a_scaler() -> None:
    with pytest.raises(RuntimeError, match=r"close it with accumulate\(\.\.\., last=True\)"):
        fit(Manual(ours, closes=False), **precision("16-mixed"))


def test_an_overflow_drops_the_window_and_nothing_else() -> None:
    data = batches()
    data[1][1].fill_(torch.inf)
    model, settings = Manual(ours_clipping), precision("16-mixed")
    trainer = fit(model, data, **settings)
    assert_trained(model.net, truth(cut(data)[1:], MAX_NORM), ROUNDING["16-mixed"])
    assert settings["plugins"].scaler.get_scale() == 2.0**10  # halved, and doubled after two good steps
    assert float(next(iter(trainer.optimizers[0].state.values()))["step"]) == 2


# ---- the wrapper ---------------------------------------------------------------------------------------------------


class Calls(Stock):
    """The training step is a function of the module, the wrapper, the batch and its index."""

    def __init__(self, call: Any, make: Any = ours) -> None:
        super().__init__(make)
        self.automatic_optimization = False
        self.call = call

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.call(self, self.optimizers(), batch, batch_idx)


def test_the_normalizer_goes_through_the_wrapper() -> None:
    sizes: list[int] = []

    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        model.manual_backward(loss_of(model.net, batch) * len(batch[0]))  # a sum
        wrapper.accumulate()
        sizes.append(len(batch[0]))
        if ends_window(model, batch_idx):
            wrapper.step(normalizer=sum(sizes))
            sizes.clear()

    model = Calls(call)
    fit(model)
    assert_trained(model.net, truth(cut(batches())))


@pytest.mark.parametrize("finite", [True, False])
def test_what_is_known_after_a_step_is_read_through_the_wrapper(finite: bool) -> None:
    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        model.manual_backward(loss_of(model.net, batch))
        norm = torch.cat([param.grad.flatten() for param in model.net.parameters()]).double().norm()
        if not finite:
            model.net[0].bias.grad.fill_(torch.nan)
        wrapper.accumulate()
        wrapper.step()
        if finite:
            assert_close(wrapper.grad_norm, norm, "norm")
        assert bool(wrapper.step_was_skipped) == (not finite)
        assert int(wrapper.skipped_steps) == (0 if finite else batch_idx + 1)
        seen.append(batch_idx)

    seen: list[int] = []
    fit(Calls(call), batches()[:3])
    assert seen == [0, 1, 2]


def test_zero_grad_through_the_wrapper_drops_the_window() -> None:
    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        for factor in (100, 1):
            wrapper.zero_grad()
            model.manual_backward(loss_of(model.net, batch) * factor)
            wrapper.accumulate()
        wrapper.step()

    model = Calls(call, ours_clipping)
    with pytest.warns(UserWarning, match="dropped before each of the last steps"):
        fit(model)
    assert_trained(model.net, truth(cut(batches(), 1), MAX_NORM))


def test_a_setting_made_through_the_wrapper_is_the_optimizers() -> None:
    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        wrapper.max_grad_norm = MAX_NORM
        assert wrapper.optimizer.max_grad_norm == MAX_NORM
        model.manual_backward(loss_of(model.net, batch))
        wrapper.step()
        wrapper.zero_grad()

    model = Calls(call)
    fit(model)
    assert_trained(model.net, truth(cut(batches(), 1), MAX_NORM))


def test_a_load_through_the_wrapper_does_not_part_it_from_the_window() -> None:
    """Lightning keeps what is loaded on the wrapper, for a stock optimizer too: load into `wrapper.optimizer`."""

    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        wrapper.load_state_dict(wrapper.optimizer.state_dict())
        model.manual_backward(loss_of(model.net, batch))
        wrapper.accumulate()
        wrapper.step()

    model = Calls(call)
    fit(model)
    assert_trained(model.net, truth(cut(batches(), 1)))


def test_nothing_is_left_on_the_wrapper() -> None:
    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        before = dict(vars(wrapper))
        model.manual_backward(loss_of(model.net, batch))
        wrapper.accumulate()
        wrapper.backward(loss_of(model.net, batch), last=True)
        wrapper.step()
        wrapper.zero_grad()
        wrapper.max_grad_norm = MAX_NORM
        wrapper.state_dict()
        wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert vars(wrapper) == before

    fit(Calls(call), batches()[:2])


def test_a_scheduler_over_the_wrapped_optimizer_sees_its_steps() -> None:
    """Out of order it would warn, and warnings are errors here."""

    def call(model: Stock, wrapper: Any, batch: Batch, batch_idx: int) -> None:
        schedulers.setdefault(wrapper, torch.optim.lr_scheduler.StepLR(wrapper, step_size=1, gamma=0.5))
        model.manual_backward(loss_of(model.net, batch))
        wrapper.accumulate()
        wrapper.step()
        schedulers[wrapper].step()
        assert wrapper.optimizer.param_groups[0]["lr"] == OPTIONS["lr"] * 0.5 ** (batch_idx + 1)

    schedulers: dict[Any, Any] = {}
    fit(Calls(call))
    assert len(schedulers) == 1
