"""Numbers and settings that cannot be used: on the host an error and nothing written, on the device a skipped step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshot import differences, refused, snapshot, trained
from torch.nn import Parameter

import accumfused as af

# ---- numbers -------------------------------------------------------------------------------------------------------

BAD_NUMBERS = [-1, -0.5, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("weight", BAD_NUMBERS)
@pytest.mark.parametrize("last", [False, True])
def test_a_host_weight_that_is_no_weight_is_refused(backend: str, weight: float, last: bool) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    param.grad = torch.randn(4)
    with refused(optimizer, ValueError, f"weight must be finite and >= 0, got {weight}"):
        optimizer.accumulate(weight, last=last)
    param.grad = None
    with refused(optimizer, ValueError, f"weight must be finite and >= 0, got {weight}"):
        optimizer.backward(param.sum(), weight, last)


@pytest.mark.parametrize("weight", ["8 tokens", [1], object()])
def test_a_weight_of_a_wrong_type_is_refused(backend: str, weight: Any) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    param.grad = torch.randn(4)
    with refused(optimizer, TypeError, "weight must be a number or a tensor of one element"):
        optimizer.accumulate(weight)


@pytest.mark.parametrize("numbers", [[1.0, 1.0], [], 1j], ids=str)
def test_a_tensor_that_is_not_one_real_number_is_refused(backend: str, numbers: Any) -> None:
    weight = torch.tensor(numbers)
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    param.grad = torch.randn(4)
    with refused(optimizer, ValueError, "weight must be one real number"):
        optimizer.accumulate(weight)
    with refused(optimizer, ValueError, "normalizer must be one real number"):
        optimizer.step(normalizer=weight)


def test_weights_that_are_all_zero_are_refused(backend: str) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    remedy = r"all zero, so it has no mean; call zero_grad\(\) in place of the step"
    param.grad = torch.randn(4)
    with refused(optimizer, ValueError, remedy):
        optimizer.accumulate(0, last=True)
    optimizer.accumulate(0)
    with refused(optimizer, ValueError, remedy):
        optimizer.step()
    with refused(optimizer, ValueError, remedy):
        optimizer.backward(param.sum(), 0.0, last=True)


@pytest.mark.parametrize("normalizer", [0, 0.0, *BAD_NUMBERS])
@pytest.mark.parametrize("window", [False, True])
def test_a_host_normalizer_that_cannot_divide_is_refused(backend: str, normalizer: float, window: bool) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    param.grad = torch.randn(4)
    if window:
        optimizer.accumulate(3)
    with refused(optimizer, ValueError, f"normalizer must be finite and > 0, got {normalizer}"):
        optimizer.step(normalizer=normalizer)


def test_two_device_divisors_below_zero_do_not_make_a_good_one(backend: str) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    param.grad, before = torch.randn(4), param.detach().clone()
    optimizer.grad_scale = torch.tensor(-1.0)
    optimizer.step(normalizer=torch.tensor(-1.0))
    assert optimizer.step_was_skipped
    assert torch.equal(param.detach(), before)


@pytest.mark.parametrize("nonfinite", [None, "skip"])
@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["normalizer", "grad_scale", "weight", "weight, closed", "second weight"])
def test_a_bad_number_on_the_device_skips_the_step_and_is_counted(
    backend: str, where: str, bad: float, nonfinite: str | None
) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend, nonfinite=nonfinite)
    param.grad = torch.randn(4)
    value = torch.tensor(bad)
    if where == "second weight":
        optimizer.accumulate(2)
        param.grad = torch.randn(4)
    if "weight" in where:
        optimizer.accumulate(value, last="closed" in where)
    if where == "grad_scale":
        optimizer.grad_scale = value
    kept = {name: bits for name, bits in snapshot(optimizer).items() if name.startswith(("param", "state"))}
    optimizer.step(normalizer=value if where == "normalizer" else None)
    after = snapshot(optimizer)
    fine = where == "second weight" and bad == 0.0  # it leaves its micro-batch out, as it should
    assert (differences(kept, {name: after[name] for name in kept}) == []) is not fine
    assert bool(optimizer.step_was_skipped) is not fine
    assert int(optimizer.skipped_steps) == (not fine)

    if where == "grad_scale":
        del optimizer.grad_scale
    param.grad = torch.randn(4)
    optimizer.step()  # and training goes on
    assert differences(kept, {name: snapshot(optimizer)[name] for name in kept})
    assert not optimizer.step_was_skipped
    assert int(optimizer.skipped_steps) == (not fine)


# ---- settings ------------------------------------------------------------------------------------------------------


def test_raise_raises_before_anything_is_written(backend: str) -> None:
    params = [Parameter(torch.randn(4)) for _ in range(2)]
    optimizer = trained(params, backend, nonfinite="raise")
    params[0].grad, params[1].grad = torch.randn(4), torch.tensor([1.0, math.nan, 0.0, 2.0])
    with refused(optimizer, RuntimeError, "norm of the gradients is nan, nothing was updated; look for"):
        optimizer.step()
    params[1].grad = torch.randn(4)
    with refused(optimizer, RuntimeError, "nothing was updated"):
        optimizer.step(normalizer=torch.tensor(0.0))
    for param in params:
        param.grad = torch.full((4,), math.inf)
    optimizer.accumulate(2)
    with refused(optimizer, RuntimeError, "norm of the gradients is inf, nothing was updated"):
        optimizer.step()


def test_a_first_step_that_raises_leaves_an_optimizer_that_has_not_stepped(backend: str) -> None:
    param, twin = (Parameter(torch.ones(4)) for _ in range(2))
    ours, fresh = (af.AdamW([p], nonfinite="raise", backend=backend) for p in (param, twin))
    param.grad = torch.full((4,), math.nan)
    with pytest.raises(RuntimeError, match="nothing was updated"):
        ours.step()
    for optimizer, p in ((ours, param), (fresh, twin)):
        p.grad = torch.full((4,), 2.0)
        optimizer.step()
    assert differences(snapshot(fresh), snapshot(ours)) == []


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_backend_that_cannot_run_says_why_before_anything_is_written(name: str) -> None:
    param = Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run: .*; use backend='auto' or 'torch'"):
        af.SGD([param], lr=0.1, backend=name).step()
    stock = torch.optim.SGD([param], lr=0.1)
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run: .*; use backend='auto' or 'torch'"):
        af.fuse(stock, backend=name).step()
    assert param.tolist() == [1.0] * 4


BAD_SETTINGS = [
    ({"backend": "gpu"}, "backend must be one of auto, cuda, triton, cpu, foreach, torch, got 'gpu'"),
    ({"backend": None}, "backend must be one of auto"),
    ({"nonfinite": "ignore"}, "nonfinite must be one of skip, propagate, raise or None, got 'ignore'"),
    ({"max_grad_norm": 0}, r"max_grad_norm must be > 0, got 0; None is off \(elsewhere 0 often is\)"),
    ({"max_grad_norm": -1.0}, "max_grad_norm must be > 0, got -1.0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm must be > 0, got nan"),
]


@pytest.mark.parametrize(("setting", "text"), BAD_SETTINGS)
def test_wrong_settings_are_refused(setting: dict[str, Any], text: str) -> None:
    param = Parameter(torch.ones(4))
    for make in (af.SGD, af.Adam, af.AdamW, af.Lion):
        with pytest.raises(ValueError, match=text):
            make([param], **setting)
    stock = torch.optim.SGD([param])
    with pytest.raises(ValueError, match=text):
        af.fuse(stock, **setting)
    assert type(stock) is torch.optim.SGD


@pytest.mark.parametrize("make", [af.SGD, af.Adam, af.AdamW])
def test_differentiable_is_refused(make: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        make([Parameter(torch.ones(4))], differentiable=True)


BAD_ADAM: list[dict[str, Any]] = [
    {"lr": -1.0}, {"lr": math.nan}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1},
    {"lr": torch.ones(2)}, {"betas": (0.9, torch.tensor(0.9))},
]  # fmt: skip
BAD_SGD: list[dict[str, Any]] = [
    {"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}, {"lr": torch.ones(2)},
    {"nesterov": True, "momentum": 0.9, "dampening": 0.5},
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [*[("Adam", bad) for bad in BAD_ADAM], *[("AdamW", bad) for bad in BAD_ADAM], *[("SGD", bad) for bad in BAD_SGD]],
)
def test_wrong_hyper_parameters_are_refused_in_torchs_words(name: str, options: dict[str, Any]) -> None:
    def outcome(module: Any) -> str:
        try:
            getattr(module, name)([Parameter(torch.ones(4))], **options)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    assert outcome(af) == outcome(torch.optim) != "accepted"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ],
)
def test_lion_speaks_torchs_language(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        af.Lion([Parameter(torch.ones(4))], **options)


def not_a_leaf() -> Any:
    return [torch.ones(3, requires_grad=True) * 2]


@pytest.mark.parametrize(
    "params", [list, lambda: [1], lambda: [{"params": {torch.ones(3)}}], lambda: torch.ones(3), not_a_leaf]
)
def test_wrong_parameters_are_refused_in_torchs_words(params: Callable[[], Any]) -> None:
    def outcome(module: Any) -> str:
        try:
            module.AdamW(params())
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    assert outcome(af) == outcome(torch.optim) != "accepted"
