"""A model's weights in fp32, from any format of the optimizer: to save, to evaluate, to change formats.

Callers take autograd off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accumfused.core.protocol import Owner, run
from accumfused.formats import codecs
from accumfused.formats.convert import full_precision, storing
from accumfused.formats.kinds import REMAINDER, TORCH_DTYPES
from accumfused.formats.numeric import ieee
from accumfused.formats.shards import owned, shard_of


def state_dict(optimizer: Owner, model: Module) -> dict[str, Any]:
    """Makes the result of `FusedOptimizer.full_precision_state_dict`."""
    _check_model(optimizer, model)
    saved: dict[str, Any] = model.state_dict(keep_vars=True)  # the parameters themselves, under all their names
    whole: dict[int, Tensor] = {}
    for name, value in saved.items():
        if isinstance(value, Parameter) and (
            value.dtype in (torch.float16, torch.bfloat16) or REMAINDER in optimizer.state.get(value, {})
        ):
            if id(value) not in whole:
                whole[id(value)] = _full_precision(optimizer, value)
            saved[name] = whole[id(value)]
        elif isinstance(value, Tensor):
            saved[name] = value.detach()
    return saved


def load_state_dict(optimizer: Owner, model: Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Loads weights as `FusedOptimizer.load_full_precision_state_dict` says."""
    engine = optimizer._engine
    engine.refuse_open("load_full_precision_state_dict()", ", and its gradients are not those of the loaded weights")
    _check_model(optimizer, model)
    tensors: dict[str, Any] = model.state_dict(keep_vars=True)
    _check_names(tensors, state_dict, strict)
    values = {
        id(tensors[name]): value for name, value in state_dict.items() if isinstance(tensors.get(name), Parameter)
    }

    plan = engine.plans.current()
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}
    others = {
        name
        for name, value in state_dict.items()
        if id(tensors.get(name)) not in members and _has(tensors.get(name), value)
    }
    loaded = OrderedDict((name, value) for name, value in state_dict.items() if name not in others)
    loaded._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
    result = model.load_state_dict(loaded, strict and not others)  # names are checked
    result.missing_keys[:] = [name for name in result.missing_keys if name not in others]
    for row in plan.rows:
        if id(row.param) in values and (row.form.master is None or row.form.master[0] != REMAINDER):
            optimizer.state.get(row.param, {}).pop(REMAINDER, None)  # of another format; these weights replace it
    wanted = [row.form.master is not None and id(row.param) in values for row in plan.rows]
    plan = engine.plans.with_states(plan, [p if w else None for p, w in zip(plan.params, wanted, strict=True)])
    for row in [row for row, is_wanted in zip(plan.rows, wanted, strict=True) if is_wanted]:
        shard, entries, value = row.shard, optimizer.state[row.param], values[id(row.param)]
        if shard is not None:
            entries, value = shard.parts(entries), shard.part("weights", value)
        run([storing(row.form, row.owned, entries, value)])
    return result


def rewrite(
    optimizer: Owner,
    params: Container[int],
    change: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    note: Callable[[int], None],
) -> None:
    """Replaces parameters by `change(weights, states)`, in full precision, one after the other.

    Args:
        params: ids of parameters; those without states stay.
        change: gets the weights in fp32 and the states by name, which must not be codes, and returns the new weights.
        note: a C function that is given the id of each replaced parameter. A parameter is replaced and noted, or
            neither, if this fails or is interrupted.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    engine, state = optimizer._engine, optimizer.state
    window, plan = engine.window, engine.plans.current()
    if window.is_open:
        window = engine.window = window.following(plan)
        window.habits.watch_writes(plan)
    ids = {id(row.param) for row in plan.rows if id(row.param) in params and state.get(row.param)}
    plan = engine.plans.with_states(plan, [param if id(param) in ids else None for param in plan.params])
    for row in [row for row in plan.rows if id(row.param) in ids]:
        entries = state[row.param] if row.shard is None else row.shard.parts(state[row.param])
        there = {name: value.to(row.owned.device) for name, value in entries.items() if isinstance(value, Tensor)}
        with ieee():
            weights = change(full_precision(row.owned, entries), there)
        written = partial(torch._C._increment_version, [row.param])  # noqa: SLF001
        run([storing(row.form, row.owned, entries, weights), written, partial(note, id(row.param))])
    if window.is_open:
        window.habits.see(plan)


def _full_precision(optimizer: Owner, param: Tensor) -> Tensor:
    entries, shard = optimizer.state.get(param, {}), shard_of(param)
    if shard is None:
        return full_precision(param, entries)
    return shard.whole(full_precision(owned(param, shard), shard.parts(entries)))


@ieee()
def _has(param: Any, values: Tensor) -> bool:
    """Tells whether a parameter has these (rounded) values: written again, a tie could be rounded the other way."""
    if not isinstance(param, Parameter) or param.dtype not in TORCH_DTYPES:
        return False
    shard = shard_of(param)
    tensor = owned(param, shard).detach()
    values = (values if shard is None else shard.part("weights", values)).to(
        tensor.device, torch.promote_types(tensor.dtype, torch.float32)
    )
    halves = [values.to(tensor.dtype)]
    if tensor.dtype == torch.bfloat16:  # a split master rounds so
        halves.append(codecs.split(values)[0])
    same = [(half == tensor) | (half.isnan() & tensor.isnan()) for half in halves]
    return bool(torch.stack(same).any(0).all())


def _check_model(optimizer: Owner, model: Module) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"this takes the model first, a torch.nn.Module, got {type(model).__name__}")
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if members.isdisjoint(map(id, model.parameters())):
        raise ValueError("none of the model's parameters is in this optimizer; give the model that it was made for")


def _check_names(tensors: Mapping[str, Any], state_dict: Any, strict: bool) -> None:
    """Refuses names and shapes that torch would refuse after it has loaded some."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state_dict is a dictionary of names and tensors, got {type(state_dict).__name__}")
    missing, unexpected = sorted(tensors.keys() - state_dict.keys()), sorted(state_dict.keys() - tensors.keys())
    if strict and missing:
        raise ValueError(f"the state_dict has no {missing[0]!r} ({len(missing)} are missing), which the model needs")
    if strict and unexpected:
        raise ValueError(f"the state_dict has {unexpected[0]!r} ({len(unexpected)} too many), which the model has not")
    for name, tensor in tensors.items():
        value = state_dict.get(name, tensor)
        if isinstance(tensor, Tensor) and not isinstance(value, Tensor):
            raise TypeError(f"{name!r} in the state_dict is a {type(value).__name__}, not a tensor")
        if isinstance(tensor, Tensor) and value.shape != tensor.shape:
            raise ValueError(
                f"{name!r} has shape {list(value.shape)}, that of the model {list(tensor.shape)}; load the same model's"
            )
