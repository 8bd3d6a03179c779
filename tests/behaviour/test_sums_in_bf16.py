"""Sums in bf16: what they are beside everything else that a window meets."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compare import bits
from torch import Tensor, nn

import accumfused as af
from accumfused.core.window import Window
from accumfused.loop import linears

BF16 = torch.bfloat16
SHAPES = [(70, 30), (513,), (3,)]


def made(backend: str = "cpu", dtype: torch.dtype = BF16, **settings: Any) -> af.AdamW:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    given = {"lr": 0.1, "backend": backend, "rounding_seed": 5, "sum_dtype": BF16, **settings}
    return af.AdamW(params, **given)


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give(optimizer: Any, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(dtype or param.dtype)


def sums_of(optimizer: Any) -> list[Tensor]:
    return [accumulator for accumulator in optimizer._engine.window.sums if accumulator is not None]


def window(optimizer: Any, number: int, weights: Any = (None,) * 4, **last: Any) -> None:
    for index, weight in enumerate(weights):
        give(optimizer, 10 * number + index)
        optimizer.accumulate(weight, last=bool(last) and index == len(weights) - 1)


def everything(optimizer: Any) -> list[Any]:
    return [bits(p.detach()).tolist() for p in params_of(optimizer)] + [bits(s).tolist() for s in sums_of(optimizer)]


# ---- what is in bf16 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(BF16, BF16), (torch.float32, BF16), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_of_fp16_and_fp64_parameters_stay_wide(dtype: torch.dtype, wanted: torch.dtype) -> None:
    optimizer = made(
        "auto" if dtype is torch.float64 else "cpu", dtype, master_weights=None if dtype is BF16 else "auto"
    )
    window(optimizer, 0)
    assert {accumulator.dtype for accumulator in sums_of(optimizer)} == {wanted}
    optimizer.step()
    text = str(optimizer)
    assert ("sums: bfloat16 of 3 parameters" in text) is (wanted is BF16)


def test_a_sum_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sum_dtype must be torch.bfloat16, torch.float32 or None, got torch.float16"):
        made(sum_dtype=torch.float16)


def test_a_first_gradient_is_adopted_and_sums_take_two_bytes() -> None:
    optimizer = made()
    give(optimizer, 0)
    places = [param.grad.data_ptr() for param in params_of(optimizer) if param.grad is not None]
    optimizer.accumulate()
    assert [accumulator.data_ptr() for accumulator in sums_of(optimizer)] == places
    numel = sum(math.prod(shape) for shape in SHAPES)
    assert af.memory_report(optimizer).total.parts["accumulators"] == 2 * numel
    optimizer.zero_grad()
    window(optimizer, 0, (2.0, 3.0))  # a copy of another dtype goes to the arena, in two bytes, too
    assert af.memory_report(optimizer).total.parts["accumulators"] == 2 * numel


def test_a_copied_first_gradient_has_the_noise_of_an_adopted_one() -> None:
    adopting, copying = made(), made()
    for index in range(4):
        for optimizer in (adopting, copying):
            give(optimizer, index)
        held = [param.grad for param in params_of(copying)]
        adopting.accumulate()
        copying.accumulate()
        del held
    assert everything(adopting) == everything(copying)


def test_the_noise_of_windows_differs_also_of_dropped_ones() -> None:
    seen = set()
    optimizer = made()
    for end in ("step", "zero_grad", "step", "zero_grad"):
        window(optimizer, 0)
        seen.add(str(everything(optimizer)[3:]))
        with mock.patch("accumfused.core.habits.warn"):
            getattr(optimizer, end)()
    assert len(seen) == 4


def test_one_seed_gives_the_same_sums_and_another_others() -> None:
    def sums(seed: int) -> list[Any]:
        optimizer = made(rounding_seed=seed)
        window(optimizer, 0)
        return everything(optimizer)[3:]

    assert sums(1) == sums(1) != sums(2)


# ---- beside the rest of a window -----------------------------------------------------------------------------------


def near(optimizer: Any, truth: list[Tensor], within: float = 8e-3) -> None:
    for accumulator, wanted in zip(sums_of(optimizer), truth, strict=True):
        error = (accumulator.double() - wanted).norm() / wanted.norm()
        assert error < within


def true_sums(factors: list[float], number: int = 0) -> list[Tensor]:
    other = made()
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for index, factor in enumerate(factors):
        give(other, 10 * number + index)
        for total, param in zip(sums, params_of(other), strict=True):
            assert param.grad is not None
            total += factor * param.grad.double()
    return sums


@pytest.mark.parametrize("on_device", [False, True])
def test_weights_of_host_and_device(on_device: bool, backend: str) -> None:
    optimizer = made(backend)
    weights = [2.0, 0.0, 6.0, 1.0]
    window(optimizer, 0, [torch.tensor(weight) for weight in weights] if on_device else weights)
    near(optimizer, true_sums([1.0, 0.0, 3.0, 0.5]))
    optimizer.step()
    assert not bool(optimizer.step_was_skipped)


def test_a_dropped_micro_batch_leaves_the_sum_as_it_was(backend: str) -> None:
    optimizer = made(backend, nonfinite="drop")
    for index in range(4):
        give(optimizer, index, math.inf if index in (0, 2) else 1.0)
        before = everything(optimizer)[3:]
        optimizer.accumulate()
        assert (everything(optimizer)[3:] == before) == (index == 2)
    near(optimizer, true_sums([0.0, 1.0, 0.0, 1.0]))


def test_the_norm_is_that_of_the_rounded_sums(backend: str) -> None:
    optimizer = made(backend, max_grad_norm=1.0)
    window(optimizer, 0)
    norm = torch.cat([accumulator.double().flatten() for accumulator in sums_of(optimizer)]).norm()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)


def test_the_closed_window_is_divided_to_the_nearest(backend: str) -> None:
    optimizer, other = made(backend), made(backend)
    window(optimizer, 0, [1.0, 1.0, 1.0], last=True)
    window(other, 0, [1.0, 1.0, 1.0])
    for param, accumulator in zip(params_of(optimizer), sums_of(other), strict=True):
        assert param.grad is not None
        assert param.grad.dtype is BF16
        assert torch.equal(param.grad, (accumulator.float() * torch.tensor(1 / 3).double().float()).bfloat16())
    optimizer.step()


def test_fp32_parameters_show_bf16_sums_in_p_grad_while_a_window_is_closed() -> None:
    optimizer = made(dtype=torch.float32)
    window(optimizer, 0, last=True)
    assert {param.grad.dtype for param in params_of(optimizer) if param.grad is not None} == {BF16}
    optimizer.step()
    give(optimizer, 1)
    optimizer.step()  # a plain step reads fp32


def test_clip_groups_metrics_and_noise_scale_read_them(backend: str) -> None:
    one, other = made(backend, metrics=True), made(backend, noise_scale=True)
    group = af.ClipGroup([one, other], max_grad_norm=0.5)
    for number in range(2):
        for index in range(4):
            for optimizer in (one, other):
                give(optimizer, 10 * number + index)
                optimizer.accumulate()
        sums = [accumulator.double().flatten() for each in (one, other) for accumulator in sums_of(each)]
        group.step()
        torch.testing.assert_close(group.grad_norm.double(), torch.cat(sums).norm(), rtol=1e-6, atol=0)
    assert math.isfinite(float(other.noise_scale().noise))
    assert one.metrics().as_dict()["grad_norm"] > 0


@pytest.mark.parametrize("bucket", [1, 2000, 2**30])
def test_released_gradients_have_the_bits_of_others_in_buckets_of_any_size(bucket: int, backend: str) -> None:
    def train(releases: bool) -> list[Any]:
        optimizer = made(backend)
        if releases:
            af.release_gradients(optimizer, bucket)
        for number in range(2):
            for index in range(3):
                generator = torch.Generator().manual_seed(10 * number + index)
                coefficients = [torch.randn(p.shape, generator=generator).bfloat16() for p in params_of(optimizer)]
                loss = sum((p * c).float().sum() for p, c in zip(params_of(optimizer), coefficients, strict=True))
                assert isinstance(loss, Tensor)
                optimizer.backward(loss, weight=2.0)
            sums = everything(optimizer)[3:]
            optimizer.step()
        return everything(optimizer) + sums

    assert train(True) == train(False)


def test_the_sums_of_fused_linears_stay_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    optimizer = af.AdamW(model.parameters(), lr=0.1, sum_dtype=BF16)
    with mock.patch.object(linears, "SMALLEST", 1), af.fuse_linears(model, optimizer):
        for _ in range(3):
            optimizer.backward(model(torch.randn(8, 40)).square().mean())
        dtypes = {name: s.dtype for (name, _), s in zip(model.named_parameters(), sums_of(optimizer), strict=True)}
        assert {name: dtype for name, dtype in dtypes.items() if name.endswith("weight")} == {
            "0.weight": torch.float32,
            "2.weight": torch.float32,
        }
        assert {dtype for name, dtype in dtypes.items() if name.endswith("bias")} == {BF16}
        assert "float32 of 2 parameters" in str(optimizer)
        optimizer.step()
    give(optimizer, 0)
    optimizer.accumulate()
    assert {accumulator.dtype for accumulator in sums_of(optimizer)} == {BF16}, "the handle was removed"


# ---- copies and checkpoints ----------------------------------------------------------------------------------------


def by_pickle(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def by_checkpoint(optimizer: Any, **settings: Any) -> Any:
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in params_of(optimizer)]), file)
    file.seek(0)
    state, params = torch.load(file, weights_only=True)
    other = made(**{"rounding_seed": 99, **settings})
    with torch.no_grad():
        for param, saved in zip(params_of(other), params, strict=True):
            param.copy_(saved)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("within", [0, 2])
@pytest.mark.parametrize("way", [copy.deepcopy, by_pickle, by_checkpoint])
def test_what_goes_on_from_a_copy_has_the_bits_of_what_was_not_interrupted(
    way: Callable[[Any], Any], within: int
) -> None:
    """Between windows, too: the noise goes on, whatever the seed of the new optimizer."""
    optimizer = made()
    window(optimizer, 0)
    optimizer.step()
    for index in range(within):
        give(optimizer, 20 + index)
        optimizer.accumulate()
    other = way(optimizer)
    assert everything(other) == everything(optimizer)
    for number in range(2):
        for each in (optimizer, other):
            window(each, 3 + number)
            sums = everything(each)[3:]
            each.step()
        assert everything(other) + sums == everything(optimizer) + sums


@pytest.mark.parametrize("narrow_first", [True, False])
def test_an_open_window_goes_on_in_its_own_dtype(narrow_first: bool) -> None:
    first, second = (BF16, None) if narrow_first else (None, BF16)
    optimizer = made(sum_dtype=first)
    window(optimizer, 0)
    other = by_checkpoint(optimizer, sum_dtype=second)
    wanted = BF16 if narrow_first else torch.float32
    assert everything(other) == everything(optimizer)
    window(other, 1)
    assert {accumulator.dtype for accumulator in sums_of(other)} == {wanted}
    other.step()
    window(other, 2)
    assert {accumulator.dtype for accumulator in sums_of(other)} == {BF16 if second else torch.float32}


def test_torch_takes_a_checkpoint_between_windows() -> None:
    optimizer = made(dtype=torch.float32)
    window(optimizer, 0)
    optimizer.step()
    params = [param.detach().clone().requires_grad_() for param in params_of(optimizer)]
    theirs = torch.optim.AdamW(params, lr=0.1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = made(dtype=torch.float32)
    back.load_state_dict(theirs.state_dict())
    window(back, 1)
    back.step()


def test_added_parameters_leave_the_noise_of_others_alone() -> None:
    optimizer, other = made(), made()
    for each in (optimizer, other):
        window(each, 0)
        each.step()
    added = nn.Parameter(torch.zeros(40000, dtype=BF16))
    other.add_param_group({"params": [added]})
    for each in (optimizer, other):
        window(each, 1)
    assert everything(other)[4:7] == everything(optimizer)[3:6]


def test_release_memory_keeps_the_noise() -> None:
    optimizer, other = made(), made()
    for each in (optimizer, other):
        window(each, 0)
        each.step()
    other.release_memory()
    for each in (optimizer, other):
        window(each, 1)
    assert everything(other) == everything(optimizer)


def test_no_sum_in_fp32_asks_for_noise() -> None:
    optimizer = made(sum_dtype=None)
    with mock.patch.object(Window, "noise", None, create=True):
        window(optimizer, 0)
        optimizer.step()
    assert optimizer._engine.window.noise.of_rows() is None
