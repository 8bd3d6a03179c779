"""Policies of clipping: whom they serve, what is refused, and what skips and checkpoints leave."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import inside
import pytest
import torch
from compare import assert_same_bits, differences, refused, snapshot
from models import through_a_file
from table import Own
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import accumfused as af

POLICIES: list[dict[str, Any]] = [
    {"clip": af.PerGroup(0.5)}, {"clip": af.PerTensor(0.5)}, {"clip": af.Adaptive(0.1)},
    {"clip": af.ZScore(1.0, 0.9, 2)}, {"max_grad_norm": 1.0, "skip_above": af.RunningMean(2.0, 0.9, 1)},
    {"clip": af.ZScore(1.0, 0.9, 2), "skip_above": 50.0},
]  # fmt: skip
HISTORIES = POLICIES[3:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.linspace(-1, 1, 60).view(10, 6)), nn.Parameter(torch.ones(6))


def optimizer_of(model: Model, kind: Any = af.AdamW, **settings: Any) -> Any:
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    return kind(groups, lr=0.1, backend=settings.pop("backend", "cpu"), **settings)


def set_grads(optimizer: Any, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator) * factor


def train(optimizer: Any, *seeds: int, windows: bool = False) -> None:
    for seed in seeds:
        set_grads(optimizer, seed, 30.0 if seed % 4 == 3 else 1.0)
        if windows:
            optimizer.accumulate()
        optimizer.step()


@contextlib.contextmanager
def writes_nothing_but_skips(optimizer: Any) -> Iterator[None]:
    before = snapshot(optimizer)
    yield
    assert optimizer.step_was_skipped
    assert differences(before, snapshot(optimizer)) == ["skipped steps"]


# ---- whom they serve ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [af.PerTensor(1.0), af.PerGroup(1.0)])
def test_an_optimizer_with_its_own_step_sees_gradients_clipped_by_themselves(clip: Any) -> None:
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(3))]
    optimizer: Any = af.fuse(Own([{"params": [param]} for param in params], lr=1.0), clip=clip)
    for param, slope in zip(params, (3.0, 0.1, 7.0), strict=True):
        param.grad = torch.full_like(param, slope)
    params[2].grad = None
    optimizer.step()
    assert params[0].grad.tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    assert params[1].grad.tolist() == pytest.approx([0.1] * 9)
    assert params[2].tolist() == [0.0] * 3


def test_a_global_norm_is_max_grad_norm() -> None:
    optimizer = optimizer_of(Model(), clip=af.GlobalNorm(0.5))
    assert optimizer.max_grad_norm == 0.5
    optimizer.max_grad_norm = 0.25
    assert "max_grad_norm: 0.25" in repr(optimizer)


def test_released_gradients_are_clipped_by_themselves(backend: str) -> None:
    found = []
    for releases in (False, True):
        model = Model()
        optimizer = optimizer_of(model, backend=backend, clip=af.PerTensor(0.1))
        if releases:
            af.release_gradients(optimizer)
        for scale in (1.0, 2.0):
            optimizer.backward(((model.weight * scale).sin().sum() + model.bias.square().sum()), weight=3.0)
        optimizer.step()
        found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert_same_bits(found[1], found[0])


# ---- skips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, "int8"])
def test_a_skipped_step_leaves_every_bit_and_the_history(policy: dict[str, Any], state_dtype: Any) -> None:
    optimizer = optimizer_of(Model(), state_dtype=state_dtype, state_dtype_min_numel=0, **policy)
    train(optimizer, 0, 1, 2)
    set_grads(optimizer, 5)
    optimizer.param_groups[0]["params"][0].grad[3, 3] = torch.nan
    with writes_nothing_but_skips(optimizer):
        optimizer.step()


def test_a_tensor_whose_norm_is_lost_skips_the_step() -> None:
    """Its squares vanish in fp32, and the divisor makes it large all the same."""
    optimizer = optimizer_of(Model(), clip=af.PerTensor(1.0))
    train(optimizer, 0)
    for (param,), slope in zip((group["params"] for group in optimizer.param_groups), (1e-30, 1e-12), strict=True):
        param.grad = torch.full_like(param, slope)
    with writes_nothing_but_skips(optimizer):
        optimizer.step(normalizer=torch.tensor(1e-20))
    assert math.isfinite(float(optimizer.grad_norm))


@pytest.mark.parametrize("policy", [{"clip": af.PerTensor(1.0)}, {"clip": af.Adaptive()}, {"clip": af.PerGroup(1.0)}])
def test_a_tiny_divisor_beside_several_norms_is_refused_because_zeros_would_skip(policy: dict[str, Any]) -> None:
    optimizer = optimizer_of(Model(), **policy)
    train(optimizer, 0)
    set_grads(optimizer, 1, 1e-12)
    optimizer.param_groups[0]["params"][0].grad.zero_()
    with refused(optimizer, ValueError, r"divided by 1e-20, which is below 2\^-50"):
        optimizer.step(normalizer=1e-20)
    optimizer.grad_scale = 1e-10
    with refused(optimizer, ValueError, "below 2"):
        optimizer.step(normalizer=1e-10)
    optimizer.step(normalizer=1e-5)
    assert not optimizer.step_was_skipped
    globally = optimizer_of(Model(), max_grad_norm=1.0)
    set_grads(globally, 1)
    globally.param_groups[0]["params"][0].grad.zero_()
    globally.step(normalizer=1e-20)
    assert not globally.step_was_skipped


@pytest.mark.parametrize("limit", [10.0, af.RunningMean(2.0, 0.9, 2)])
def test_a_norm_above_the_limit_skips_and_counts_and_later_ones_do_not(limit: Any, backend: str) -> None:
    optimizer = optimizer_of(Model(), backend=backend, skip_above=limit, max_grad_norm=1.0)
    train(optimizer, 0, 1, 2)
    for seed, factor, is_skipped in ((3, 30.0, True), (4, 1.0, False)):
        set_grads(optimizer, seed, factor)
        with writes_nothing_but_skips(optimizer) if is_skipped else contextlib.nullcontext():
            optimizer.step()
        assert bool(optimizer.step_was_skipped) is is_skipped
    assert int(optimizer.skipped_steps) == 1


def test_a_loss_scale_backs_off_for_overflows_and_not_for_norms_above_the_limit() -> None:
    optimizer, scaler = optimizer_of(Model(), skip_above=10.0), af.GradScaler("cpu", init_scale=4.0)
    for factor, scale in ((4.0, 4.0), (1e3, 4.0), (math.inf, 2.0)):
        set_grads(optimizer, 0, factor)
        scaler.scale(torch.ones(()))  # makes its scale
        scaler.step(optimizer)
        assert bool(optimizer.step_was_skipped) is (factor > 4.0)
        scaler.update()
        assert scaler.get_scale() == scale


def test_a_norm_of_zero_is_not_remembered() -> None:
    """torch.distributed.checkpoint makes states by a step with zeros."""
    optimizer = optimizer_of(Model(), **HISTORIES[0])
    set_grads(optimizer, 0, 0.0)
    optimizer.step()
    assert optimizer.engine.clipping.history.count_nonzero() == 0
    assert not optimizer.step_was_skipped


def test_many_skips_above_the_limit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = optimizer_of(Model(), skip_above=1e-3)
    with pytest.warns(UserWarning, match="non-finite gradients or norms above skip_above"):
        train(optimizer, *range(3 * 32))


# ---- steps that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*HISTORIES, {"noise_scale": 0.5, "metrics": True}], ids=str)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.filterwarnings("ignore:noise_scale= measures nothing")  # in the first steps, which have no windows
def test_a_step_that_fails_behind_its_norm_is_none_and_can_be_made_again(policy: dict[str, Any], bad: bool) -> None:
    """Nothing has advanced: the step that is made in the end has the bits of one that never failed."""
    found = []
    for fails in (False, True):
        model = Model()
        optimizer = optimizer_of(model, **policy)
        train(optimizer, 0, 1, 2)
        for seed in (3, 4):
            for micro in (0, 1):
                set_grads(optimizer, 10 * seed + micro, math.inf if bad and seed == 3 else 1.0)
                optimizer.accumulate(2.0)
            for _ in range(2 if fails else 0):
                with inside.step_fails(optimizer), refused(optimizer, RuntimeError, "out of memory"):
                    optimizer.step()
            optimizer.step()
        assert int(optimizer.skipped_steps) == bad
        found.append(snapshot(optimizer))
    assert differences(*found) == []


@pytest.mark.parametrize("bad", [1.0, math.inf])
def test_members_of_a_clip_group_count_only_the_skips_of_their_steps(bad: float) -> None:
    members = [optimizer_of(Model()), optimizer_of(Model())]
    together = af.ClipGroup(members, 1.0)
    for member in members:
        set_grads(member, 0, bad)
    with inside.step_fails(members[1]), pytest.raises(RuntimeError, match="out of memory"):
        together.step()
    assert [int(member.skipped_steps) for member in members] == [bad == math.inf, 0]


def test_a_warning_that_is_an_error_does_not_repeat_the_step() -> None:
    """af.strict() makes one of the warning of many skips, which comes after a step."""
    optimizer = optimizer_of(Model(), skip_above=1e-3)
    with pytest.raises(UserWarning, match="steps were skipped"):
        train(optimizer, *range(3 * 32), windows=True)
    assert not inside.open_window(optimizer)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

Route = Callable[[Model, Any, dict[str, Any]], tuple[Model, Any]]


def by_file(model: Model, optimizer: Any, policy: dict[str, Any]) -> tuple[Model, Any]:
    other = Model()
    other.load_state_dict(model.state_dict())
    resumed = optimizer_of(other, **policy)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    return other, resumed


def by_torch(model: Model, optimizer: Any, policy: dict[str, Any]) -> tuple[Model, Any]:
    """torch's AdamW carries the history, in the parameter's dtype."""
    stock = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    stock.load_state_dict(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = optimizer_of(other, **policy)
    resumed.load_state_dict(stock.state_dict())
    return other, resumed


def by_names(model: Model, optimizer: Any, policy: dict[str, Any]) -> tuple[Model, Any]:
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    resumed = optimizer_of(other, **policy)
    dcp.set_optimizer_state_dict(other, resumed, saved)
    return other, resumed


def by_copy(model: Model, optimizer: Any, _: dict[str, Any]) -> tuple[Model, Any]:
    return copy.deepcopy((model, optimizer))


def by_pickle(model: Model, optimizer: Any, _: dict[str, Any]) -> tuple[Model, Any]:
    pair: tuple[Model, Any] = pickle.loads(pickle.dumps((model, optimizer)))
    return pair


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("policy", HISTORIES, ids=str)
@pytest.mark.parametrize("route", [by_file, by_names, by_copy, by_pickle])
def test_who_resumes_goes_on_bit_for_bit(route: Route, policy: dict[str, Any], opens: bool) -> None:
    model = Model()
    optimizer = optimizer_of(model, **policy)
    train(optimizer, 0, 1, 2, 3, 4)
    optimizer.zero_grad()
    if opens:
        set_grads(optimizer, 9)
        optimizer.accumulate(2.0)
    other, resumed = route(model, optimizer, policy)
    history = optimizer.engine.clipping.history
    assert resumed.engine.clipping.history is not None
    assert_same_bits(resumed.engine.clipping.history, history)
    assert resumed.engine.clipping.history is not history
    for each in (optimizer, resumed):
        if opens:
            each.step()
        train(each, 5, 6, 7, 8)
    assert_same_bits(resumed.engine.clipping.history, history)
    for param, own in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_bits(param.detach(), own.detach())


def test_a_stock_optimizer_brings_the_history_back_in_fp32() -> None:
    model = Model()
    optimizer = optimizer_of(model, **HISTORIES[0])
    train(optimizer, 0, 1, 2)
    _, resumed = by_torch(model, optimizer, HISTORIES[0])
    assert_same_bits(resumed.engine.clipping.history, optimizer.engine.clipping.history.float().double())


@pytest.mark.parametrize("kind", [af.AdamW, af.SGD])
def test_a_checkpoint_without_a_history_begins_one_and_a_stranger_drops_it(kind: Any) -> None:
    optimizer = optimizer_of(Model(), kind, **HISTORIES[0])
    train(optimizer, 0, 1, 2)
    with_one = through_a_file(optimizer.state_dict())
    plain = optimizer_of(Model(), kind)
    plain.load_state_dict(with_one)
    train(plain, 3)
    assert "clip_history" not in str(plain.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.engine.clipping.history is None
    optimizer.load_state_dict(with_one)
    assert float(optimizer.engine.clipping.history[0, 0]) == 3


def limits_of(optimizer: Any) -> list[Any]:
    return [group.get("max_grad_norm", "none") for group in optimizer.param_groups]


@pytest.mark.parametrize("route", [by_file, by_names, by_torch, by_copy, by_pickle])
def test_checkpoints_bring_the_limits_of_groups_as_any_option_of_a_group(route: Route) -> None:
    model = Model()
    optimizer = optimizer_of(model, max_grad_norm=1.0)
    optimizer.param_groups[0]["max_grad_norm"], optimizer.param_groups[1]["max_grad_norm"] = 0.5, None
    train(optimizer, 0)
    _, resumed = route(model, optimizer, {"max_grad_norm": 1.0})
    assert limits_of(resumed) == [0.5, None]


def test_a_checkpoint_without_limits_leaves_those_that_are_there() -> None:
    limited, plain = optimizer_of(Model()), optimizer_of(Model())
    limited.param_groups[0]["max_grad_norm"] = limited.param_groups[1]["max_grad_norm"] = 0.5
    train(plain, 0)
    limited.load_state_dict(plain.state_dict())
    assert limits_of(limited) == [0.5, 0.5]


# ---- refusals -------------------------------------------------------------------------------------------------------

BAD = {
    "a negative limit": (lambda: af.PerTensor(-1.0), "max_norm must be > 0"),
    "no number": (lambda: af.PerTensor("1"), "max_norm must be a number"),  # type: ignore[arg-type]
    "a limit of 0": (lambda: af.PerGroup(0), "max_norm must be > 0"),
    "NaN": (lambda: af.GlobalNorm(math.nan), "max_norm must be > 0"),
    "a factor of 0": (lambda: af.Adaptive(0.0), "factor must be > 0"),
    "no eps": (lambda: af.Adaptive(0.1, 0.0), "eps must be > 0"),
    "one norm": (lambda: af.ZScore(warmup=1), "warmup must be a whole number >= 2"),
    "no history": (lambda: af.RunningMean(warmup=0), "warmup must be a whole number >= 1"),
    "a decay of 1": (lambda: af.ZScore(decay=1.0), "decay must be a number between 0 and 1"),
    "no threshold": (lambda: af.ZScore(0.0), "threshold must be > 0"),
    "below the mean": (lambda: af.RunningMean(1.0), "times must be a number > 1"),
    "both": (lambda: optimizer_of(Model(), clip=af.PerTensor(1.0), max_grad_norm=1.0), "give one of them"),
    "no policy": (lambda: optimizer_of(Model(), clip=1.0), "clip must be a policy"),
    "a negative norm": (lambda: optimizer_of(Model(), skip_above=-1.0), "skip_above must be > 0"),
    "no skips": (lambda: optimizer_of(Model(), skip_above=1.0, nonfinite="propagate"), "nonfinite='propagate'"),
    "errors": (lambda: optimizer_of(Model(), skip_above=1.0, nonfinite="raise"), "use nonfinite='skip'"),
    "groups without a limit": (lambda: optimizer_of(Model(), clip=af.PerGroup()), "group 0 has no max_grad_norm"),
}


@pytest.mark.parametrize("name", BAD)
def test_policies_that_cannot_be_are_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


def test_max_grad_norm_cannot_be_set_beside_another_policy() -> None:
    optimizer = optimizer_of(Model(), clip=af.PerTensor(1.0))
    with pytest.raises(ValueError, match="give one of them"):
        optimizer.max_grad_norm = 1.0
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize("policy", [{"clip": af.PerTensor(1.0)}, {"skip_above": 3.0}, {}])
def test_a_clip_group_takes_no_member_with_a_policy(policy: dict[str, Any]) -> None:
    first, second = Model(), Model()
    members = [optimizer_of(first, **policy), optimizer_of(second)]
    for group in [] if policy else members[0].param_groups:
        group["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="a ClipGroup clips by one norm"):
        af.ClipGroup(members, 1.0)
    if not policy:
        limits = [group.pop("max_grad_norm") for group in members[0].param_groups]
        together = af.ClipGroup(members, 1.0)
        for group, limit in zip(members[0].param_groups, limits, strict=True):
            group["max_grad_norm"] = limit
        with refused(members[1], ValueError, "a ClipGroup clips by one norm"):
            together.step()


@pytest.mark.parametrize("bad", [lambda: torch.zeros(3), lambda: 4.0])
def test_a_damaged_history_is_refused(bad: Callable[[], float | Tensor]) -> None:
    optimizer = optimizer_of(Model(), **HISTORIES[0])
    train(optimizer, 0)
    saved = optimizer.state_dict()
    saved["state"][0]["clip_history"] = bad()
    with refused(optimizer, ValueError, "'clip_history' of parameter 0 is not a tensor"):
        optimizer.load_state_dict(saved)
