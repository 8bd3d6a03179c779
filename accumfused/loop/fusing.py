"""Converts an existing optimizer in place."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, overload

import torch
from typing_extensions import Unpack

from accumfused.accepted import check_formats, check_parameters, check_settings
from accumfused.core.protocol import OwnStep
from accumfused.loop.own_step import step_by_itself
from accumfused.loop.report import growth_of
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers import (
    PEERS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    RAdam,
    RMSprop,
)
from accumfused.rules import Rule
from accumfused.saving.checkpoint import refuse_cast
from accumfused.settings import SettingArguments, Settings, chosen, takes_settings
from accumfused.warn import say_once


@overload
def fuse(optimizer: torch.optim.AdamW, **settings: Unpack[SettingArguments]) -> AdamW: ...
@overload
def fuse(optimizer: torch.optim.Adam, **settings: Unpack[SettingArguments]) -> Adam: ...
@overload
def fuse(optimizer: torch.optim.SGD, **settings: Unpack[SettingArguments]) -> SGD: ...
@overload
def fuse(optimizer: torch.optim.RAdam, **settings: Unpack[SettingArguments]) -> RAdam: ...
@overload
def fuse(optimizer: torch.optim.Adamax, **settings: Unpack[SettingArguments]) -> Adamax: ...
@overload
def fuse(optimizer: torch.optim.Adagrad, **settings: Unpack[SettingArguments]) -> Adagrad: ...
@overload
def fuse(optimizer: torch.optim.Adadelta, **settings: Unpack[SettingArguments]) -> Adadelta: ...
@overload
def fuse(optimizer: torch.optim.RMSprop, **settings: Unpack[SettingArguments]) -> RMSprop: ...
@overload
def fuse(optimizer: torch.optim.Muon, **settings: Unpack[SettingArguments]) -> Muon: ...
@overload
def fuse(optimizer: torch.optim.Optimizer, **settings: Unpack[SettingArguments]) -> FusedOptimizer: ...


@takes_settings
def fuse(optimizer: torch.optim.Optimizer, **settings: Unpack[SettingArguments]) -> FusedOptimizer:
    """Turns a torch optimizer into a fused one, in place: the object keeps its groups, state, hooks and schedulers.

    A torch optimizer that accumfused has too (SGD, Adam, AdamW, RMSprop...: docs/guide/optimizers.md) becomes
    accumfused's. Any other optimizer keeps its own step, and accumfused does the work before it: accumulation,
    normalization, unscaling, norm and clipping. Such a step needs the coefficient on the host (one synchronization),
    and finds scaled copies in `p.grad`: 4 bytes per fp32 parameter, 2 per 16-bit one, freed after the step. There are
    none where the coefficient is 1, unless a window's sums have another dtype. After a plain step `p.grad` is as it was
    before, after one of a window it is None.

    16-bit parameters get master weights and fp32 states, which take more memory than torch's. The logger "accumfused"
    warns how much, and names settings that take less, unless `master_weights` is given.

    Args:
        optimizer: the optimizer. Its class becomes a subclass of its old class and of `accumfused.FusedOptimizer`.
        **settings: those of `accumfused.settings.Settings`.

    Returns:
        The optimizer.

    Raises:
        TypeError: `optimizer` is none, wraps another one, or is fused already; its step needs a closure (LBFGS) or
            sparse gradients (SparseAdam); a parameter is not fp32, fp16, bf16 or fp64; an unknown setting.
        ValueError: a wrong setting; a state that the optimizer has loaded from a checkpoint of this package, and has
            cast; masters, metrics, or formats of states or accumulators, for an optimizer that keeps its own step.
        RuntimeError: the backend cannot run; something other than a scheduler has replaced `optimizer.step`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"fuse() takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"the optimizer is fused already ({type(optimizer).__name__}): settings go to its constructor")
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        raise TypeError(f"{type(optimizer).__name__} wraps another optimizer; fuse that one, before it is wrapped")
    all_settings = chosen("fuse", **settings)
    fused: Any = PEERS.get(type(optimizer)) or _foreign(type(optimizer))  # type: ignore[arg-type]
    check_settings(all_settings, fused.rules, optimizer.param_groups, optimizer.defaults)
    for group in optimizer.param_groups:
        check_parameters(group["params"])
        check_formats(fused._rule_of(group), group, group["params"], all_settings)
        refuse_cast(optimizer.state, fused._rule_of(group), group["params"])
    if issubclass(fused, ForeignStep):
        _refuse_formats(type(optimizer).__name__, all_settings)
        if all_settings.metrics:
            raise ValueError(
                f"{type(optimizer).__name__} keeps its own step, whose update cannot be measured; leave metrics= out"
            )

    # An LR scheduler binds the old class's step to the object: that step would silently go on running.
    bound = vars(optimizer).get("step")
    if bound is not None and not hasattr(bound, "_wrapped_by_lr_sched"):
        raise RuntimeError("optimizer.step was replaced; call fuse() before whatever wraps it")
    optimizer.__class__ = fused
    vars(optimizer).pop("step", None)
    vars(optimizer).pop("_step_supports_amp_scaling", None)
    assert isinstance(optimizer, FusedOptimizer)
    optimizer._configure(all_settings)
    optimizer._patch_step_function()  # its hooks
    growth = growth_of(optimizer)
    if growth is not None:
        say_once(growth)
    return optimizer


class NoRule(Rule):
    """Has no state and no arithmetic: the optimizer keeps its own."""

    name = ""
    states = ()
    counts_steps = False
    hypers = ()


class ForeignStep(FusedOptimizer):
    """Fuses everything up to the clip, then runs the optimizer's own step."""

    rules = (NoRule,)
    torch_class: ClassVar[type[torch.optim.Optimizer]]
    _own_step: ClassVar[OwnStep | None] = staticmethod(step_by_itself)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.torch_class,), self.__getstate__()


def _refuse_formats(name: str, settings: Settings) -> None:
    """Refuses formats that only our kernels write: a foreign step knows neither masters nor rounding seeds."""
    for setting, plain in (("master_weights", (None, "auto")), ("state_dtype", (torch.float32,))):
        value = getattr(settings, setting)
        if value not in plain:
            raise ValueError(
                f"{name} keeps its own step, parameters and states, so {setting}={value!r} is not for it; "
                "leave it out, or take an optimizer of accumfused"
            )


@functools.cache
def _foreign(torch_class: type[torch.optim.Optimizer]) -> type[FusedOptimizer]:
    if issubclass(torch_class, torch.optim.SparseAdam):
        raise TypeError(
            f"{torch_class.__name__} takes sparse gradients only, which cannot be fused; keep it as it is for its "
            "parameters, next to a fused optimizer for the others"
        )
    closure = inspect.signature(torch_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"{torch_class.__name__} evaluates a closure within its step, which cannot be fused")
    name = f"Fused{torch_class.__name__}"
    return type(name, (ForeignStep, torch_class), {"torch_class": torch_class, "__doc__": ForeignStep.__doc__})


def _rebuild(torch_class: type[torch.optim.Optimizer]) -> FusedOptimizer:
    fused = _foreign(torch_class)  # type: ignore[arg-type]
    return fused.__new__(fused)
