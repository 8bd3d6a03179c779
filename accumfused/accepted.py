"""The settings, parameter groups and parameters that an optimizer accepts; each check stands before any change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused import backends
from accumfused.clip import group_limits
from accumfused.core.rows import check_parameter
from accumfused.distributed import groups
from accumfused.formats import kinds, shards
from accumfused.rules import Rule
from accumfused.settings import Settings, refuse_settings_of_groups


def check_settings(
    settings: Settings,
    rules: Sequence[type[Rule]],
    param_groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Refuses settings that this machine, this process or the parameter groups cannot serve."""
    backends.check(settings.backend)
    check_groups(settings, rules, param_groups, defaults)
    for name in ("process_group", "norm_group"):
        groups.check_group(getattr(settings, name), name)


def check_groups(
    settings: Settings,
    rules: Sequence[type[Rule]],
    param_groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Refuses options of parameter groups that do nothing, and limits that are wrong, missing, or out of place.

    Args:
        rules, defaults: those of the optimizer's class, and its options: see `refuse_settings_of_groups`.
    """
    if any(group.get("differentiable") for group in param_groups):
        raise ValueError("differentiable=True is not supported: the step is not recorded by autograd")
    refuse_settings_of_groups(rules, param_groups, defaults)
    limits = group_limits(settings.clip, settings.max_grad_norm, param_groups)
    if limits is not None and settings.norm_group is not None:
        raise ValueError("norm_group= has one norm over all processes; leave the groups' own max_grad_norm out")


def check_formats(rule: type[Rule], group: Mapping[str, Any], params: Sequence[Tensor], settings: Settings) -> None:
    """Refuses parameters and states of a group that the settings cannot keep, and an eps too small for them."""
    kinds.check_states(rule, settings)
    for param in params:
        if isinstance(param, Tensor) and param.dtype in (torch.float16, torch.bfloat16):
            kinds.check_master_weights(param.dtype, settings.master_weights)
        if isinstance(param, Tensor) and param.dtype == torch.float64 and param.requires_grad:
            backends.check(settings.backend, dtype=torch.float64)
    if rule.eps_beside:
        forms = {kinds.format_of(rule, param, settings) for param in params if isinstance(param, Tensor)}
        kinds.check_eps(group["eps"], max((kinds.least_eps(rule, form) for form in forms), default=0.0))


def check_parameters(params: list[Tensor]) -> None:
    """Refuses parameters that require a gradient and cannot be updated, and duplicates."""
    for param in params:
        if isinstance(param, Tensor) and param.requires_grad and param.device.type != "meta":
            check_parameter(shards.local(param))
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter group holds the same parameter twice; remove one of them")
