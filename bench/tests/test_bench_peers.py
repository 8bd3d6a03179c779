"""The benchmark's peers: nobody is timed who does not come out at the same step as fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import exact, stock
from bench.peers import FUSED, KNOWN, TRICK, Recipe, peers
from bench.workload import Workload

SMALL = [(40, 30), (64,), (1,)]
FAKE = "somebody's AdamW"


def install(monkeypatch: pytest.MonkeyPatch, step: Callable[[Workload, Any], object]) -> None:
    """Makes a recipe known that clips, and then calls this with the workload and torch's AdamW over it."""

    def make(work: Workload) -> Recipe:
        optimizer = work.stock(foreach=True)
        clipped = stock.clip_and_step(work.params, optimizer)
        return lambda: step(work, optimizer) or clipped()

    monkeypatch.setitem(KNOWN, FAKE, (make, None))


def bits(work: Workload) -> list[Tensor]:
    states = [tensor for state in work.states for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*work.params, *work.grads, *states)]


def test_a_peer_that_is_right_is_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda work, optimizer: None)
    found = peers(Workload(SMALL), [FAKE])
    assert [variant.name for variant in found.variants] == [*found.errors] == [FUSED, TRICK, FAKE]
    assert found.errors[FAKE] < 1e-8
    assert not found.gaps


def test_a_peer_that_is_one_percent_off_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda work, optimizer: optimizer.param_groups[0].update(lr=1.01 * exact.LR))
    found = peers(Workload(SMALL), [FAKE])
    assert [*found.errors] == [FUSED, TRICK]
    (gap,) = found.gaps
    assert gap["name"] == FAKE
    assert 0.5e-6 < gap["error"] < 5e-6  # a hundredth of updates of about lr
    assert gap["cannot"].startswith("wrong, so not timed: a parameter is")


def test_a_peer_that_fails_is_left_out_with_its_reason_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Workload, optimizer: Any) -> None:
        work.params[0].data.zero_()
        raise ValueError("this machine is too old\nfor several reasons")

    install(monkeypatch, fails)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, [FAKE])
    assert found.gaps == [{"name": FAKE, "cannot": "ValueError: this machine is too old"}]
    assert [*found.errors] == [FUSED, TRICK]
    assert all(torch.equal(a, b) for a, b in zip(before, bits(work), strict=True))


def test_a_reference_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PARAM_TOLERANCE", 0.0)
    with pytest.raises(exact.WrongError, match="off"):
        peers(Workload(SMALL))


def test_deviation_sees_settings_that_differ_and_forgives_rounding() -> None:
    """Two steps from the beginning: each of the settings shows."""

    def after(**settings: Any) -> float:
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(500) * 0.02)]
        before = [params[0].detach().clone()]
        optimizer = torch.optim.AdamW(params, **{"lr": exact.LR, "weight_decay": exact.WEIGHT_DECAY, **settings})
        sets = [[torch.randn(500)], [torch.randn(500)]]
        for (grad,) in sets:
            params[0].grad = grad.clone()
            torch.nn.utils.clip_grad_norm_(params, exact.MAX_GRAD_NORM)
            optimizer.step()
        return exact.deviation(before, params, sets)

    assert after() < 1e-4
    for wrong in ({"lr": 1.01 * exact.LR}, {"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}, {"weight_decay": 20.0}):
        assert after(**wrong) > 5e-3, wrong
