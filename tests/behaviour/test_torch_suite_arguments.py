"""Our constructors beside torch's: the same arguments, group keys, printed form and errors, for torch's own inputs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from snapshot import refused
from table import random_params
from torch.nn import Parameter
from torch_infos import (
    ERROR_INPUTS,
    INFOS,
    assert_same,
    copies,
    every_input,
    every_optimizer,
    make,
    on_each_device,
    options_of,
    params_of,
    train,
)

from accumfused.rules import ALL
from accumfused.settings import Settings

OF_TORCH = [info for info in INFOS if info.optim_cls._torch_class is not None]
of_torch = pytest.mark.parametrize("info", OF_TORCH, ids=lambda info: info.name)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def outcome(make: Callable[[], torch.optim.Optimizer]) -> Any:
    """What a constructor makes, or its error."""
    try:
        optimizer = make()
    except Exception as error:
        return type(error), str(error)
    return optimizer.defaults, groups_of(optimizer)


# ---- arguments -----------------------------------------------------------------------------------------------------


@of_torch
def test_every_argument_of_torch_has_its_place_and_its_default(info: Any) -> None:
    theirs = inspect.signature(info.optim_cls._torch_class).parameters
    ours = inspect.signature(info.optim_cls).parameters
    assert [(p.name, p.kind, repr(p.default)) for p in ours.values() if p.name in theirs] == [
        (p.name, p.kind, repr(p.default)) for p in theirs.values()
    ]
    assert {name for name in ours if name not in theirs} == {setting.name for setting in fields(Settings)}


@every_input
def test_defaults_groups_and_the_printed_form_are_torchs(info: Any, given: Any) -> None:
    params = random_params([(3,), (2,)])
    ours = make(info, given, params, max_grad_norm=1.0)
    assert groups_of(ours) == [ours.defaults]
    assert "max_grad_norm" not in ours.defaults
    if info in OF_TORCH:
        theirs = info.optim_cls._torch_class(params, **options_of(given))
        assert (ours.defaults, groups_of(ours)) == (theirs.defaults, groups_of(theirs))
        assert list(ours.defaults) == list(theirs.defaults)
        assert repr(ours).startswith(f"{theirs!r}\naccumfused.{info.name} (\n    max_grad_norm: 1.0\n")
    else:
        assert repr(ours).startswith(f"{info.name} (\nParameter Group 0\n    betas: {ours.defaults['betas']}\n    lr: ")


FLAGS = ("foreach", "fused", "capturable", "differentiable")


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@of_torch
def test_flags_are_stored_or_refused_as_in_torch(info: Any, tensor_lr: bool) -> None:
    flags = [flag for flag in FLAGS if flag in inspect.signature(info.optim_cls._torch_class).parameters]
    stored = errors = 0
    for values in itertools.product((None, False, True), repeat=len(flags)):
        options = {flag: value for flag, value in zip(flags, values, strict=True) if value is not None}
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        ours = outcome(lambda o=options, lr=lr: info.optim_cls([Parameter(torch.ones(3))], lr, **o))
        theirs = outcome(lambda o=options, lr=lr: info.optim_cls._torch_class([Parameter(torch.ones(3))], lr, **o))
        if options.get("differentiable") and isinstance(theirs[0], dict):  # ours is not recorded by autograd
            text = "differentiable=True is not supported: the step is not recorded by autograd"
            assert ours == (ValueError, text)
            continue
        assert ours == theirs, options
        stored, errors = stored + isinstance(ours[0], dict), errors + isinstance(ours[0], type)
    assert stored > 9
    assert errors > 3


@of_torch
def test_a_group_has_flags_of_its_own(info: Any) -> None:
    def build(module_class: Any) -> list[dict[str, Any]]:
        groups = [
            {"params": [Parameter(torch.ones(3))], "foreach": True},
            {"params": [Parameter(torch.ones(3))], "fused": False, "maximize": True},
        ]
        return groups_of(module_class(groups, fused=True))

    assert build(info.optim_cls) == build(info.optim_cls._torch_class)


@of_torch
def test_fused_does_not_make_a_scaler_leave_the_unscaling_to_the_step(info: Any) -> None:
    # torch's fused optimizers say that they do: the scaler then hides from accumulate() and clipping what it skips.
    optimizer = info.optim_cls([Parameter(torch.ones(3))], fused=True)
    assert optimizer._step_supports_amp_scaling is False
    assert "_step_supports_amp_scaling" not in vars(optimizer)


@every_optimizer
def test_a_users_subclass_is_the_same_optimizer(info: Any) -> None:
    class Mine(info.optim_cls):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    params = random_params([(5, 3), (4,)])
    mine, plain = Mine(params), info.optim_cls(copies(params), lr=0.1)
    train(mine, plain, steps=3)
    assert mine.steps == 3
    assert_same(mine, plain)


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "given"),
    ERROR_INPUTS,
    ids=[f"{info.name}, {given.optimizer_error_input.desc}" for info, given in ERROR_INPUTS],
)
def test_what_torch_refuses_is_refused_with_its_text(info: Any, given: Any) -> None:
    params, options = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
    params = [Parameter(torch.ones(2))] if params is None else params
    error, text = given.error_type, given.error_regex
    if error is UserWarning:  # torch warns that this will be an error, and updates the parameter twice
        error, text = ValueError, "a parameter group holds the same parameter twice; remove one of them"
    with pytest.raises(error, match=text):
        info.optim_cls(params, **options)


BAD_PARAMS: dict[str, Callable[[], Any]] = {
    "none at all": lambda: [],
    "a number": lambda: 5,
    "numbers": lambda: [3.0],
    "not a leaf": lambda: [torch.ones(3, requires_grad=True) * 2],
    "a set in a group": lambda: [{"params": {torch.ones(3)}}],
    "a group without params": lambda: [{"lr": 0.1}],
    "a list among groups": lambda: [{"params": [torch.ones(3)]}, [torch.ones(3)]],
    "a tensor in two groups": lambda: [{"params": [tensor]} for tensor in [torch.ones(3)] * 2],
}


@pytest.mark.parametrize("kind", BAD_PARAMS)
@of_torch
def test_bad_params_give_torchs_error(info: Any, kind: str) -> None:
    theirs = outcome(lambda: info.optim_cls._torch_class(BAD_PARAMS[kind]()))
    assert outcome(lambda: info.optim_cls(BAD_PARAMS[kind]())) == theirs
    assert issubclass(theirs[0], Exception)


@pytest.mark.parametrize("group", [[Parameter(torch.ones(3))], {"params": {torch.ones(3)}}, {"params": [3.0]}])
@of_torch
def test_a_bad_late_group_gives_torchs_error(info: Any, group: Any) -> None:
    def add(optimizer: torch.optim.Optimizer) -> tuple[type[Exception], str]:
        with pytest.raises(TypeError) as caught:
            optimizer.add_param_group(group)
        return caught.type, str(caught.value)

    ours, theirs = (each([Parameter(torch.ones(3))]) for each in (info.optim_cls, info.optim_cls._torch_class))
    assert add(ours) == add(theirs)
    assert len(ours.param_groups) == 1


# ---- other dtypes and devices --------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
@every_optimizer
def test_parameters_of_other_dtypes_are_refused(backend: str, info: Any, dtype: torch.dtype) -> None:
    # torch takes them all, also mixed.
    mixed = [Parameter(torch.ones(3)), Parameter(torch.ones(3).to(dtype))]
    with pytest.raises(TypeError, match=f"a parameter is {dtype}; supported are torch.float32, torch.float16"):
        info.optim_cls(mixed, backend=backend)
    optimizer = info.optim_cls(mixed[:1], backend=backend)
    with refused(optimizer, TypeError, f"a parameter is {dtype}; supported are torch.float32, torch.float16"):
        optimizer.add_param_group({"params": mixed[1:]})
    mixed[1].requires_grad_(False)
    optimizer.add_param_group({"params": mixed[1:]})  # nobody updates it


@every_optimizer
def test_complex_parameters_are_refused_as_by_torchs_fused_step(info: Any) -> None:
    param = Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"complex parameters are not supported; optimize torch\.view_as_real"):
        info.optim_cls([param])
    if "fused" in info.supported_impls:  # torch refuses at the step
        stock = info.optim_cls._torch_class([param], fused=True)
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"requires all the params to be floating point Tensors"):
            stock.step()


@on_each_device
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "among others"])
@every_optimizer
def test_parameters_on_meta_are_refused_at_the_step_as_by_torchs_fused_step(
    backend: str, info: Any, alone: bool
) -> None:
    params = [Parameter(torch.ones(3, device="meta")), *([] if alone else [Parameter(torch.ones(3))])]
    optimizer = info.optim_cls(params, backend=backend)  # a model may get its memory later
    for param in params:
        param.grad = torch.ones_like(param)
    with refused(optimizer, RuntimeError, "has no memory to update .*meta.*; materialize it first"):
        optimizer.step()
    if "fused" in info.supported_impls:
        stock = info.optim_cls._torch_class(params, fused=True)
        with pytest.raises(RuntimeError, match=r"but torch\.float32 and meta"):
            stock.step()


@every_optimizer
def test_parameters_that_get_memory_later_are_trained(info: Any) -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = info.optim_cls(model.parameters(), lr=0.1)
    peer = info.optim_cls([Parameter(torch.ones(2, 3)), Parameter(torch.ones(2))], lr=0.1)
    for param in model.parameters():
        torch.utils.swap_tensors(param, Parameter(torch.ones(param.shape)))
    train(optimizer, peer)
    assert all(map(torch.equal, model.parameters(), params_of(peer)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_optimizer
def test_parameters_on_two_devices_are_updated_as_on_one(info: Any) -> None:
    params = random_params([(5, 3), (4,), (6,)])
    mixed = info.optim_cls([p.detach().to("cuda" if i == 1 else "cpu").requires_grad_() for i, p in enumerate(params)])
    plain = info.optim_cls(params)
    train(mixed, plain)
    assert_same(mixed, plain)


def test_the_list_of_optimizers_is_complete() -> None:
    assert {info.optim_cls for info in INFOS} == set(ALL)
