"""What an optimizer remembers of earlier steps, norms and the noise scale, is saved, copied, and not counted twice."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import inside
import pytest
import torch
from compare import assert_same, assert_same_bits, differences, refused, snapshot
from models import ROUTES, grads_of, through_a_file
from torch import nn

import accumfused as af

ZSCORE: dict[str, Any] = {"clip": af.ZScore(1.0, 0.9, 2)}
NOISE: dict[str, Any] = {"noise_scale": 0.5}
SETTINGS = {
    "norms that clip": ZSCORE, "norms that skip": {"max_grad_norm": 1.0, "skip_above": af.RunningMean(2.0, 0.9, 1)},
    "norms beside a limit": {**ZSCORE, "skip_above": 50.0}, "noise": NOISE,
}  # fmt: skip


def made(settings: dict[str, Any], kind: Any = af.AdamW, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    model = nn.Linear(6, 10).to(dtype)
    return model, kind(model.parameters(), lr=0.1, **settings)


def accumulate(optimizer: Any, seed: int, weight: float, factor: float = 1.0) -> None:
    grads_of(optimizer, seed)
    for param in optimizer.param_groups[0]["params"]:
        param.grad.mul_(factor)
    optimizer.accumulate(weight)


def train(optimizer: Any, *seeds: int) -> None:
    """Windows of two micro-batches; some of their norms are spikes."""
    for seed in seeds:
        for weight in (2.0, 1.0):
            accumulate(optimizer, int(10 * seed + weight), weight, 30.0 if seed % 4 == 3 else 1.0)
        optimizer.step()


def memory(optimizer: Any) -> Any:
    """The one of both that it has."""
    return next((value for value in inside.memories(optimizer).values() if value is not None), None)


@pytest.mark.pairwise(
    settings=[*SETTINGS.values()], opens=[False, True],
    route=[name for name in ROUTES if name != "flat names"],  # by which torch takes what the optimizer has already
)  # fmt: skip
def test_whoever_resumes_goes_on_bit_for_bit(settings: dict[str, Any], route: str, opens: bool) -> None:
    opens = opens and settings is not NOISE  # which leaves a resumed window out
    old, new = made(settings), made(settings)
    train(old[1], 0, 1, 2, 3, 4)
    if opens:
        accumulate(old[1], 9, 2.0)
    pair = old[1], ROUTES[route](old, new)[1]
    for seeds in ((), (5, 6, 7, 8)):
        for each in pair if seeds and opens else ():
            each.step()
        for each in pair:
            train(each, *seeds)
        assert memory(pair[0]) is not memory(pair[1])
        assert_same_bits(memory(pair[1]), memory(pair[0]))
    assert_same(*pair)


@pytest.mark.parametrize(
    ("settings", "dtype"), [(ZSCORE, torch.float32), (NOISE, torch.float32), (NOISE, torch.float16)]
)
def test_a_stock_optimizer_brings_it_back_in_its_dtype_unless_it_has_overflowed(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    (model, optimizer), (_, resumed) = (made(settings, dtype=dtype) for _ in range(2))
    train(optimizer, 0, 1)
    memory(optimizer).mul_(1e6)
    stock = torch.optim.AdamW(model.parameters())
    stock.load_state_dict(optimizer.state_dict())
    is_half = dtype is torch.float16  # the masters of its parameters come back in 16 bits, too
    with pytest.warns(UserWarning, match="so its bits are lost") if is_half else contextlib.nullcontext():
        resumed.load_state_dict(stock.state_dict())
    if is_half:
        assert memory(resumed) is None
    else:
        assert_same_bits(memory(resumed), memory(optimizer).float().double())
    train(resumed, 2)


@pytest.mark.parametrize("kind", [af.AdamW, af.SGD])
@pytest.mark.parametrize("settings", [ZSCORE, NOISE])
def test_a_checkpoint_without_it_begins_it_and_who_has_no_use_for_it_drops_it(
    settings: dict[str, Any], kind: Any
) -> None:
    (_, optimizer), (_, plain) = made(settings, kind), made({}, kind)
    train(optimizer, 0, 1, 2)
    saved, known = through_a_file(optimizer.state_dict()), memory(optimizer).clone()
    plain.load_state_dict(saved)
    train(plain, 3)
    assert {"clip_history", "noise_scale"}.isdisjoint(plain.state_dict()["state"][0])
    optimizer.load_state_dict(plain.state_dict())
    assert memory(optimizer) is None
    optimizer.load_state_dict(saved)
    assert_same_bits(memory(optimizer), known)


def test_a_norm_of_zero_is_not_remembered() -> None:
    """torch.distributed.checkpoint makes states by a step with zeros."""
    model, optimizer = made(ZSCORE)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert memory(optimizer).count_nonzero() == 0
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_fails_behind_its_norm_is_none_and_can_be_made_again(settings: dict[str, Any], bad: bool) -> None:
    """Nothing has advanced: the step that is made in the end has the bits of one that never failed."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        _, optimizer = made(settings)
        train(optimizer, 0, 1, 2)
        for seed in (4, 5):
            for micro in (0, 1):
                accumulate(optimizer, 10 * seed + micro, 2.0, math.inf if bad and seed == 4 else 1.0)
            for _ in range(2 if fails else 0):
                with inside.fails(optimizer, "step"), refused(optimizer, RuntimeError, "out of memory"):
                    optimizer.step()
            optimizer.step()
        assert int(optimizer.skipped_steps) == bad
        found.append(snapshot(optimizer))
    assert differences(*found) == []


def test_squares_of_a_dropped_window_do_not_enter_a_loaded_one() -> None:
    _, other = made(NOISE)
    for seed in (1, 2):
        accumulate(other, seed, 1.0)
    saved = through_a_file(other.state_dict())
    _, optimizer = made(NOISE)
    for seed in (3, 4):
        accumulate(optimizer, seed, 1.0, factor=100.0)
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    optimizer.step()
    with pytest.raises(RuntimeError, match="no window of two or more micro-batches"):
        optimizer.noise_scale()


OTHER = {
    "ZScore": ({"clip": af.ZScore(1.0, 0.9, 2)}, {"skip_above": af.RunningMean(2.0, 0.9, 1)}, "RunningMean"),
    "RunningMean": ({"skip_above": af.RunningMean(2.0, 0.9, 1)}, {"clip": af.ZScore(1.0, 0.9, 2)}, "ZScore"),
}


@pytest.mark.parametrize("policy", OTHER)
def test_norms_of_another_policy_are_dropped_with_a_warning_and_do_not_come_back(policy: str) -> None:
    settings, others, other = OTHER[policy]
    (_, optimizer), (_, loading), (_, fresh), (_, third) = map(made, (settings, others, others, settings))
    train(optimizer, 0, 1, 2)
    with pytest.warns(af.AccumulationWarning, match=f"are those of .*{policy}, .* {other} goes on from its own"):
        loading.load_state_dict(through_a_file(optimizer.state_dict()))
    saved = through_a_file(loading.state_dict())
    assert memory(loading).count_nonzero() == 0
    fresh.load_state_dict(optimizer.state_dict() | {"state": {}})
    for each in (loading, fresh):
        train(each, 3, 4)
    assert_same_bits(memory(loading)[:, :1], memory(fresh)[:, :1])  # their numbers: the weights differ by then
    third.load_state_dict(saved)
    assert memory(third) is None or memory(third).count_nonzero() == 0


def test_both_policies_go_on_and_one_of_them_alone_goes_on_with_its_own() -> None:
    both = {**ZSCORE, "skip_above": af.RunningMean(50.0, 0.9, 1)}
    (_, optimizer), (_, twin), (_, one) = map(made, (both, both, ZSCORE))
    train(optimizer, 0, 1, 2)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_bits(memory(twin), memory(optimizer))
    with pytest.warns(af.AccumulationWarning, match="of skip_above=af.clip.RunningMean, which this optimizer has not"):
        one.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_bits(memory(one)[0], memory(optimizer)[0])
    assert memory(one)[1].count_nonzero() == 0
