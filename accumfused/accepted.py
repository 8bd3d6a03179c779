"""The settings, parameter groups and parameters that an optimizer accepts; each check stands before any change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused import backends, compiled
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
    if settings.offload:
        _check_offload(settings, rules)


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
    for param in params if settings.offload else ():
        _check_offloaded(param)
    for param in params:
        if isinstance(param, Tensor) and param.dtype in (torch.float16, torch.bfloat16):
            kinds.check_master_weights(param.dtype, settings.master_weights)
        if isinstance(param, Tensor) and param.dtype == torch.float64 and param.requires_grad:
            backends.check(settings.backend, dtype=torch.float64)
    if rule.eps_beside:
        forms = {kinds.format_of(rule, param, settings) for param in params if isinstance(param, Tensor)}
        kinds.check_eps(group["eps"], max((kinds.least_eps(rule, form) for form in forms), default=0.0))


def _check_offload(settings: Settings, rules: Sequence[type[Rule]]) -> None:
    """Refuses what does not work on the host."""
    if compiled.unavailable is not None:
        raise RuntimeError(f"offload=True steps by the native CPU kernels: {compiled.unavailable}; leave it out")
    if settings.backend not in ("auto", "cpu"):
        raise ValueError(f"offload=True steps on the host, by backend='cpu', got {settings.backend!r}; leave it out")
    if settings.nonfinite == "drop":
        raise ValueError(
            "nonfinite='drop' waits for the norm of each micro-batch, and offload=True folds while the loop goes on; "
            "leave one of them out, or use nonfinite='skip', which skips the window"
        )
    for name in ("process_group", "norm_group"):
        group = getattr(settings, name)
        if group is not None and not groups.sends_from_host(group):
            raise ValueError(
                f"offload=True sends the host's sums and norms, and {name} has no backend for the host; make the group "
                "with backend='cpu:gloo,cuda:nccl', or with 'gloo'"
            )
    for rule in rules:
        if rule.is_foreign or not rule.is_elementwise:
            what = "Muon multiplies matrices" if rule.name else "the optimizer keeps its own step, and states"
            raise ValueError(f"offload=True steps element by element on the host, and {what}; leave it out")


def _check_offloaded(param: Tensor) -> None:
    """Refuses a parameter that cannot travel."""
    if not isinstance(param, Tensor) or not param.requires_grad:
        return
    if param.dtype == torch.float64:
        raise ValueError("offload=True takes fp32, fp16 and bf16 parameters, and one is torch.float64; leave it out")
    if shards.is_dtensor(param) or groups.is_sharded(param):
        raise ValueError("offload=True takes whole parameters, and one is spread over processes; leave it out")
    if param.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"offload=True copies from and to CUDA devices, and a parameter is on {param.device}; leave it out"
        )


def check_parameters(params: list[Tensor]) -> None:
    """Refuses parameters that require a gradient and cannot be updated, and duplicates."""
    for param in params:
        if isinstance(param, Tensor) and param.requires_grad and param.device.type != "meta":
            check_parameter(shards.local(param))
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter group holds the same parameter twice; remove one of them")
