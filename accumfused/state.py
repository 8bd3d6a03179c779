"""Making an optimizer's state of a parameter, and converting one that a checkpoint brought in another format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accumfused import codecs
from accumfused.formats import SEED, STATE_DTYPES, Format, States, Weights, counts_steps, names, scale_name, storage_of
from accumfused.numeric import ieee, memory_order
from accumfused.rule import Rule

_NEAREST = -(1 << 31)  # as noise, half of what is dropped: rounds to nearest


def make_state(rule: type[Rule], form: Format, tensor: Tensor, entries: dict[str, Any], seed: int) -> None:
    """Completes the state of a (dense) parameter in place: torch's names and shapes, on its device, in its format.

    A state in another format, dtype or layout (a checkpoint's, say) is converted, to nearest. What is not of this format
    is taken out.
    """
    if storage_of(rule, form, tensor, entries) is not None:
        return
    with ieee():
        weights = full_precision(tensor, entries)
        values = {name: _full_state(rule, name, tensor, entries) for name in rule.states}
        fresh = all(entries.get(name) is None for name in rule.states)
        if counts_steps(rule, form):
            # torch's SGD counts no steps: where it left a buffer, the first step is over.
            step = entries.get("step", 0.0 if fresh else 1.0)
            if isinstance(step, Tensor):
                entries["step"] = step.to(tensor.device, torch.float32).reshape(())
            else:
                entries["step"] = torch.full((), float(step), dtype=torch.float32, device=tensor.device)
        if form.needs_noise:
            known = entries.get(SEED)
            number = seed if known is None else int(known)
            entries[SEED] = torch.full((), number, dtype=torch.int64, device=tensor.device)
        if form.master is not None:
            entries[form.master[0]] = _master(form, tensor, weights)
        for name, value in values.items():
            _put_state(rule, form, name, tensor, value, entries)
    wanted = names(rule, form)
    formats = ("master_weight", "master_remainder", SEED, *map(scale_name, rule.states))
    for name in [name for name in formats if name in entries and name not in wanted]:
        del entries[name]


def full_precision(tensor: Tensor, entries: dict[str, Any]) -> Tensor:
    """The fp32 value of a parameter: with what the state holds of it, if that is there and of its shape."""
    remainder, master = entries.get("master_remainder"), entries.get("master_weight")
    if isinstance(master, Tensor) and master.shape == tensor.shape:
        return torch.empty_like(tensor, dtype=torch.float32, requires_grad=False).copy_(master)
    if tensor.dtype == torch.bfloat16 and isinstance(remainder, Tensor) and remainder.shape == tensor.shape:
        high = tensor.detach().view(torch.int16).to(torch.int32)
        low = remainder.to(tensor.device, torch.int32)
        if remainder.dtype == torch.int16:
            return codecs.join(high, low)
        if remainder.dtype == torch.int8:
            return codecs.join_short(high, low)
    return tensor.detach().float()


def store_full_precision(form: Format, tensor: Tensor, entries: dict[str, Any], weights: Tensor) -> None:
    """Sets a parameter, and what the state holds of it, from fp32 values: to nearest where that is not all of them."""
    with torch.no_grad(), ieee():
        tensor.copy_(weights)
        if form.master is not None:
            entries[form.master[0]] = _master(form, tensor, weights)


def _master(form: Format, tensor: Tensor, weights: Tensor) -> Tensor:
    """What the parameter lacks of its fp32 value. A split one is set to its part of it."""
    assert form.master is not None
    weights = torch.empty_like(tensor, dtype=torch.float32, requires_grad=False).copy_(weights)
    if form.weights in (Weights.BFLOAT16_MASTER, Weights.FLOAT16_MASTER):
        return weights
    if form.weights is Weights.BFLOAT16_SPLIT16:
        high, remainder = codecs.split(weights)
    else:
        high, remainder = codecs.split_short(weights, torch.full_like(weights, _NEAREST, dtype=torch.int32))
    if not torch.equal(high.to(torch.int16), tensor.detach().view(torch.int16)):
        tensor.detach().view(torch.int16).copy_(high.to(torch.int16))
    return remainder.to(form.master[1])


def _full_state(rule: type[Rule], name: str, tensor: Tensor, entries: dict[str, Any]) -> Tensor | None:
    """A state's values in fp32, laid out as the parameter; None where there is none yet."""
    value = entries.get(name)
    if value is None:
        return None
    if value.shape != tensor.shape:
        raise RuntimeError(
            f"state {name!r} has shape {list(value.shape)}, its parameter {list(tensor.shape)}; "
            "load a checkpoint of the same model"
        )
    full = torch.empty_like(tensor, dtype=torch.float32, requires_grad=False)
    if value.dtype != torch.uint8:
        return full.copy_(value)
    codes = torch.empty_like(tensor, dtype=torch.uint8, requires_grad=False).copy_(value)
    scale = entries[scale_name(name)].to(tensor.device)
    memory_order(full).copy_(codecs.decode(memory_order(codes), scale, second_moment=name in rule.second_moments))
    return full


def _put_state(
    rule: type[Rule], form: Format, name: str, tensor: Tensor, value: Tensor | None, entries: dict[str, Any]
) -> None:
    """Stores a state's fp32 values, or zeros, in the format."""
    stored = torch.zeros_like(tensor, dtype=STATE_DTYPES[form.states], requires_grad=False)
    entries[name] = stored
    if form.states is States.INT8:
        entries[scale_name(name)] = stored.new_zeros(codecs.block_count(tensor.numel()))
    if value is None:
        return
    if form.states is not States.INT8:
        stored.copy_(value)
        return
    flat = memory_order(value)
    scale = codecs.scale_of(flat)
    noise = torch.full_like(flat, _NEAREST, dtype=torch.int32)
    second = name in rule.second_moments
    memory_order(stored).copy_(codecs.encode(flat, scale, noise, second_moment=second))
    entries[scale_name(name)].copy_(scale)
