"""What an optimizer tells of its steps, under the names of training logs: `grad_norm/group0`, `noise_scale`."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
from torch.nn import Module

from accumfused.core.window import DROPS_AND_SCALER
from accumfused.loop.grad_scaler import GradScaler
from accumfused.optimizer import FusedOptimizer

Logged = Literal["groups", "tensors"]


def check_logged(logged: Logged | None) -> None:
    """Raises a ValueError for another choice."""
    if logged not in (None, "groups", "tensors"):
        raise ValueError(f'metrics must be "groups", "tensors" or None, got {logged!r}')


def check_measured(optimizer: FusedOptimizer, *, metrics: bool, noise_scale: bool) -> None:
    """Raises a ValueError if the optimizer, made by the user, does not measure this."""
    for name, is_asked in (("metrics", metrics), ("noise_scale", noise_scale)):
        if is_asked and not optimizer.settings[name]:
            raise ValueError(
                f"{name} is asked for, but the optimizer of accumfused does not measure it; make it with {name}=True"
            )


def check_scaler(optimizer: FusedOptimizer, scaler: Any, *, is_float16: bool = False) -> None:
    """Raises a ValueError if torch's scaler is to step an optimizer that leaves out overflows.

    Args:
        scaler: None: there is none, or (with `is_float16`) none yet.
    """
    is_torchs = is_float16 if scaler is None else scaler.is_enabled() and not isinstance(scaler, GradScaler)
    if is_torchs and optimizer.settings["nonfinite"] == "drop":
        raise ValueError(DROPS_AND_SCALER)


def readings(optimizer: FusedOptimizer, model: Module, logged: Logged | None) -> dict[str, float]:
    """Reads the metrics of the last measured step, and the noise scale, as far as the optimizer measures them.

    One copy from the device; none where nothing is measured.

    Args:
        model: names the parameters of an optimizer that has no names for them.
        logged: "tensors": those of each tensor, too.
    """
    names, parts = list[str](), list[torch.Tensor]()
    with contextlib.suppress(RuntimeError):  # not measured, or no step was yet
        metrics = optimizer.metrics()
        names += _names(metrics.names, optimizer, model, logged == "tensors")
        parts.append(metrics.values)
    with contextlib.suppress(RuntimeError):  # not measured, or no window of two micro-batches was stepped yet
        parts.append(optimizer.noise_scale().noise_scale.view(1))
        names.append("noise_scale")
    if not parts:
        return {}
    values = torch.cat([part.to(parts[0].device) for part in parts]).tolist()
    return {name: value for name, value in zip(names, values, strict=True) if name}


def _names(names: tuple[str, ...], optimizer: FusedOptimizer, model: Module, with_tensors: bool) -> list[str]:
    """Makes `grad_norm/layer.weight` of `layer.weight/grad_norm`; "" of those to leave out."""
    groups = {f"group{index}" for index in range(len(optimizer.param_groups))}
    columns = {name.rpartition("/")[2] for name in names if "/" in name}
    param_names: dict[str, str] = {}
    if any("param_names" not in group for group in optimizer.param_groups):
        of_model = {id(param): name for name, param in model.named_parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        param_names = {f"param{index}": of_model.get(id(param), f"param{index}") for index, param in enumerate(params)}
    log_names = []
    for name in names:
        owner, _, column = name.rpartition("/")
        if not owner:
            log_names.append(f"{column}/all" if column in columns else column)
        else:
            owner_name = param_names.get(owner, owner)
            log_names.append(f"{column}/{owner_name}" if owner in groups or with_tensors else "")
    return log_names
