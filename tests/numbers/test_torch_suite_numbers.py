"""What torch asks of the steps of its own optimizers, for every input that it tests them with.

torch compares its faster implementations with its plain loop over tensors; so is ours here. Which behaviours there are
follows `TestOptimRenewed`, torch's test of all its optimizers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_close, everything
from table import random_grads, random_params, set_grads
from torch import Tensor
from torch_infos import (
    INFOS,
    INPUTS,
    STOCK,
    assert_like_stock,
    assert_same,
    copies,
    every_input,
    every_optimizer,
    make,
    make_stock,
    on_each_device,
    options_of,
    params_of,
    train,
)

pytestmark = on_each_device
SHAPES = [(5, 3), (7,), (), (2, 3, 4), (0,)]  # the last one is empty: apex and others forgot what came after it


class Regression:
    """The loss (W x + b)^2 of fixed x, contiguous W and b or not."""

    def __init__(self, *, contiguous: bool) -> None:
        weight, bias, self.x = random_params([(10, 5), (10,), (5,)])
        if not contiguous:
            weight, bias = (torch.stack([p.detach()] * 2, -1)[..., 0].requires_grad_() for p in (weight, bias))
            assert not weight.is_contiguous()
            assert not bias.is_contiguous()
        self.params = [weight, bias]

    def loss(self) -> Tensor:
        weight, bias = self.params
        return (weight.mv(self.x.detach()) + bias).pow(2).sum()


# ---- direction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "not contiguous"])
@every_input
def test_the_loss_goes_in_the_right_direction(backend: str, info: Any, given: Any, contiguous: bool) -> None:
    model = Regression(contiguous=contiguous)
    optimizer = make(info, given, model.params, backend=backend)
    before = model.loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        model.loss().backward()
        assert optimizer.step() is None
    after = model.loss().item()
    assert after != before
    assert (after > before) == given.kwargs.get("maximize", False)


SCHEDULES = [(info, index) for info in INFOS for index in range(len(info.scheduler_inputs))]


@pytest.mark.parametrize("dimensions", [None, 0, 1, 2], ids=["number", "0-dim", "1-dim", "2-dim"])
@pytest.mark.parametrize(
    ("info", "index"), SCHEDULES, ids=[f"{info.name}, schedule {index}" for info, index in SCHEDULES]
)
def test_schedulers_lead_both_to_the_same_place(backend: str, info: Any, index: int, dimensions: int | None) -> None:
    runs = []
    for optimizer_class, settings in ((info.optim_cls, {"backend": backend}), (STOCK[info.optim_cls], {})):
        model = Regression(contiguous=True)
        rate = 0.002 if dimensions is None else torch.tensor(0.002).reshape([1] * dimensions)
        optimizer = optimizer_class(model.params, lr=rate, **settings)
        schedulers = [scheduler(optimizer) for scheduler in info.scheduler_inputs[index]]
        group, learning_rates, losses = optimizer.param_groups[0], [], []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model.loss()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([losses[-1]] if plateau else []))
            learning_rates.append(float(group["lr"]))
        assert losses == sorted(losses, reverse=True)
        assert dimensions is None or group["lr"] is rate  # written in place: a CUDA graph may hold it
        runs.append((optimizer, learning_rates))
    (ours, mine), (stock, theirs) = runs
    assert mine == theirs
    assert len(set(mine)) > 1
    assert_like_stock(ours, stock)


@pytest.mark.parametrize("dimensions", [0, 1, 2])
@every_input
def test_the_lr_may_be_a_tensor_of_any_number_of_dimensions(
    backend: str, info: Any, given: Any, dimensions: int
) -> None:
    lr = float(given.kwargs.get("lr", 1e-3))
    params = random_params(SHAPES)
    in_tensor = make(info, given, params, lr=torch.tensor(lr).reshape([1] * dimensions), backend=backend)
    # The tensor holds lr in float32, which is another number.
    in_number = make(info, given, copies(params), lr=torch.tensor(lr).item(), backend=backend)
    train(in_tensor, in_number)
    assert_same(in_tensor, in_number)


# ---- the same numbers as torch's plain loop ------------------------------------------------------------------------


@every_input
def test_the_plain_loop_of_torch_gives_the_same_numbers(backend: str, info: Any, given: Any) -> None:
    params = random_params(SHAPES)
    ours, stock = make(info, given, params, backend=backend), make_stock(info, given, copies(params))
    for seed in range(7):
        if seed == 3:  # nothing happens in a step without gradients
            before = everything(ours)
            ours.zero_grad()
            ours.step()
            assert all(torch.equal(value, before[name]) for name, value in everything(ours).items())
            continue
        train(ours, stock, steps=1, seed=seed)
        assert_like_stock(ours, stock)
    moved = params_of(ours)[0] - random_params(SHAPES)[0]
    assert moved.abs().max() > 2e-4  # far above the tolerance


@every_optimizer
def test_large_tensors_give_the_same_numbers(backend: str, info: Any) -> None:
    sizes = [(40_000,), (33, 1000)]  # several chunks, the last one with a tail
    params = random_params(sizes)
    ours, stock = info.optim_cls(params, backend=backend), STOCK[info.optim_cls](copies(params))
    train(ours, stock, steps=2)
    assert_like_stock(ours, stock)


@every_input
def test_flags_that_choose_torchs_implementation_change_no_bit(backend: str, info: Any, given: Any) -> None:
    # torch wants foreach=True to be capturable where something is a tensor
    capturable = {"capturable": True} if info.has_capturable_arg else {}
    flags = {"foreach": {"foreach": True, **capturable}, "fused": {"fused": True}, "differentiable": {}}
    params = random_params(SHAPES)
    trained: list[torch.optim.Optimizer] = []
    for chosen in ({}, capturable, *(flags[implementation] for implementation in info.supported_impls)):
        optimizer = make(info, given, copies(params), **chosen, backend=backend)
        train(optimizer, steps=2)
        trained.append(optimizer)
    for optimizer in trained[1:]:
        assert_same(optimizer, trained[0])


@every_input
def test_groups_have_an_lr_and_a_weight_decay_of_their_own(backend: str, info: Any, given: Any) -> None:
    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [
            {"params": params[:1], "lr": 0.03, "weight_decay": 0.5},
            {"params": params[1:2], "weight_decay": 0.0},
            {"params": params[2], "lr": torch.tensor(0.02)},
            {"params": params[3:]},
        ]

    params = random_params(SHAPES)
    ours = make(info, given, groups(params), backend=backend)
    stock = make_stock(info, given, groups(copies(params)))
    train(ours, stock)
    assert_like_stock(ours, stock)


@every_input
def test_another_default_dtype_changes_no_bit(backend: str, info: Any, given: Any) -> None:
    params = random_params(SHAPES)
    plain, under_double = (make(info, given, copies(params), backend=backend) for _ in range(2))
    train(plain)
    under_double.register_step_pre_hook(lambda *args: torch.set_default_dtype(torch.float64))
    under_double.register_step_post_hook(lambda *args: torch.set_default_dtype(torch.float32))
    try:
        train(under_double)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(under_double, plain)


@every_input
def test_states_are_float32_beside_their_parameter_and_steps_are_scalars(backend: str, info: Any, given: Any) -> None:
    params = random_params(SHAPES)
    optimizer = make(info, given, params, backend=backend)
    train(optimizer)
    for param in params:
        for name, value in optimizer.state[param].items():
            assert (value.dtype, value.device) == (torch.float32, param.device)
            assert value.shape == (torch.Size() if name == "step" else param.shape)
            assert name != "step" or value.item() == 3.0


# ---- steps that do nothing -----------------------------------------------------------------------------------------


@every_input
def test_gradients_of_zero_do_what_they_do_in_torch(backend: str, info: Any, given: Any) -> None:
    params = random_params(SHAPES)
    ours, stock = make(info, given, params, backend=backend), make_stock(info, given, copies(params))
    still = make(info, given, copies(params), weight_decay=0.0, backend=backend)
    frozen = make(info, given, copies(params), lr=0.0, backend=backend)
    for _ in range(3):
        for optimizer in (ours, stock, still, frozen):
            set_grads(params_of(optimizer), [torch.zeros_like(param) for param in params])
            optimizer.step()
    assert_like_stock(ours, stock)
    for param, without_decay, without_lr in zip(
        random_params(SHAPES), params_of(still), params_of(frozen), strict=True
    ):
        assert torch.equal(param, without_decay)
        assert torch.equal(param, without_lr)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@every_input
def test_a_found_inf_keeps_everything_as_it_is(backend: str, info: Any, given: Any, first: bool) -> None:
    params = random_params(SHAPES)
    optimizer = make(info, given, params, backend=backend)
    if not first:
        train(optimizer, steps=1)
    before = everything(optimizer)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.grad_scale = torch.tensor(4.0)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    after = everything(optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(not value.any() for name, value in after.items() if name not in before)  # new states
    assert optimizer.step_was_skipped


@every_input
def test_a_grad_scale_divides_as_in_torchs_fused_step(backend: str, info: Any, given: Any) -> None:
    params = random_params(SHAPES)
    ours, stock = make(info, given, params, backend=backend), make_stock(info, given, copies(params))
    if "fused" in info.supported_impls:
        stock = info.optim_cls._torch_class(copies(params), **options_of(given, fused=True))
        stock.grad_scale, stock.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    for seed in range(3):
        grads = random_grads(params, seed)
        set_grads(params, [grad * 8 for grad in grads])
        set_grads(params_of(stock), [grad * 8 if "fused" in info.supported_impls else grad for grad in grads])
        ours.step()
        stock.step()
    assert_like_stock(ours, stock)


# ---- complex -------------------------------------------------------------------------------------------------------


COMPLEX = [(info, given) for info, given in INPUTS if info.supports_complex]


@pytest.mark.parametrize(("info", "given"), COMPLEX, ids=[f"{info.name}, {given.desc}" for info, given in COMPLEX])
def test_complex_parameters_are_optimized_through_view_as_real(backend: str, info: Any, given: Any) -> None:
    numbers = [torch.complex(*(p.detach() for p in random_params([(4, 3), (4, 3)], seed))) for seed in (1, 2)]
    stock = make_stock(info, given, [z.clone().requires_grad_() for z in numbers])
    ours = make(info, given, [torch.view_as_real(z).clone().requires_grad_() for z in numbers], backend=backend)
    for seed in range(4):
        grads = random_grads(params_of(ours), seed)
        set_grads(params_of(ours), grads)
        set_grads(params_of(stock), [torch.view_as_complex(grad) for grad in grads])
        ours.step()
        stock.step()
    for param, truth in zip(params_of(ours), params_of(stock), strict=True):
        assert_close(param, torch.view_as_real(truth.detach()), "torch.optim")
