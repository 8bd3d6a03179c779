"""The settings, parameter groups and parameters that an optimizer accepts; each check stands before any change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused import backends
from accumfused.clipping import group_limits
from accumfused.core.rows import check_parameter
from accumfused.distributed import groups
from accumfused.formats import kinds, shards
from accumfused.rule import Rule
from accumfused.settings import Settings


def refuse_differentiable(options: Mapping[str, Any]) -> None:
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not supported: the step is not recorded by autograd")


def check_settings(settings: Settings, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses settings that this machine, this process or the parameter groups cannot serve."""
    backends.check(settings.backend)
    check_limits(settings, param_groups)
    if settings.process_group is not None:
        groups.check_group(settings.process_group)


def check_limits(settings: Settings, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses parameter groups whose limits are wrong, missing, or not for these settings."""
    group_limits(settings.clip, settings.max_grad_norm, param_groups)


def check_formats(rule: type[Rule], params: list[Tensor], settings: Settings) -> None:
    """Refuses parameters and states that the settings cannot keep."""
    kinds.check_states(rule, settings)
    for param in params:
        if isinstance(param, Tensor) and param.dtype in (torch.float16, torch.bfloat16):
            kinds.check_master_weights(param.dtype, settings.master_weights)


def check_parameters(params: list[Tensor]) -> None:
    """Refuses parameters that require a gradient and cannot be updated, and duplicates."""
    for param in params:
        if isinstance(param, Tensor) and param.requires_grad and param.device.type != "meta":
            check_parameter(shards.local(param))
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter group holds the same parameter twice; remove one of them")
