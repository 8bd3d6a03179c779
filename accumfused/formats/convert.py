"""Converts weights and states to fp32 and back: in a step, for new states, and from a checkpoint's format."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.formats import codecs
from accumfused.formats.kinds import (
    IN_CODES,
    MASTER,
    REMAINDER,
    SEED,
    Format,
    States,
    codes_name,
    counts_steps,
    scale_name,
    scale_shape,
    state_in,
)
from accumfused.formats.numeric import flush_subnormal, full, ieee, layout, memory_order
from accumfused.rules import Rule
from accumfused.warn import warn

# ---- in a step ------------------------------------------------------------------------------------------------------


def load_weights(form: Format, param: Tensor, master: Tensor | None) -> Tensor:
    """Joins a parameter and its master to fp32."""
    return form.weights.join(param, master)


def store_weights(form: Format, weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
    """Splits fp32 into a parameter and its master, in their dtypes."""
    return form.weights.split(weights, noise)


def load_state(value: Tensor, scale: Tensor | None, second_moment: bool) -> Tensor:
    return full(value) if scale is None else codecs.decode(value, scale, second_moment=second_moment)


def store_state(form: Format, state: Tensor, noise: Tensor, second_moment: bool) -> tuple[Tensor, Tensor | None]:
    """Encodes fp32 as a state and its scales, in their dtypes."""
    if form.states is States.INT8:
        scale = codecs.scale_of(state)
        return codecs.encode(state, scale, noise, second_moment=second_moment), scale
    state = flush_subnormal(state)
    if form.states is States.FLOAT32:
        return state, None
    return codecs.to_bfloat16_stochastic(state, noise), None


# ---- in an optimizer's state ----------------------------------------------------------------------------------------


def state_of(
    rule: type[Rule], form: Format, tensor: Tensor, entries: Mapping[str, Any], seed: int, group: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor | None]:
    """Makes the state of a (dense) parameter: torch's names and shapes, on its device, in its format. Writes nothing.

    It converts a state of another format, dtype or layout (a checkpoint's, say) to nearest, and leaves out entries of
    other formats. A state in the rule's `starts` begins at the group's number, others at 0.

    Returns:
        The whole state; and values for the parameter, in its dtype, where a loaded master has others, or None.
    """
    fresh = all(state_in(entries, name) is None for name in rule.states)
    has_master = MASTER in entries or REMAINDER in entries
    made, weights = dict[str, Any](), None
    with contextlib.nullcontext() if fresh and form.master is None else ieee():  # zeros need no arithmetic
        values = {name: _full_state(rule, name, tensor, entries) for name in rule.states}
        for name in [name for name in rule.starts if values.get(name, tensor) is None]:
            first = _number(rule.start(group, name), tensor.device, form.dtype)
            values[name] = torch.empty_like(tensor, dtype=form.dtype, requires_grad=False).copy_(first)
        if counts_steps(rule, form):
            # torch's SGD counts no steps. A buffer shows that the first step is over; without one it is still to come,
            # even where a format has counted steps for their noise.
            step = 0.0 if fresh and rule.states else entries.get("step", 0.0 if fresh else 1.0)
            made["step"] = _number(step, tensor.device)
        if form.needs_noise:
            entry = entries.get(SEED)
            is_cast = isinstance(entry, Tensor) and entry.is_floating_point()  # by an optimizer of torch
            number = seed if entry is None or is_cast else int(entry)
            made[SEED] = torch.full((), number, dtype=torch.int64, device=tensor.device)
        if form.master is not None and form.master[0] == REMAINDER and not has_master:
            # 0, without a pass through fp32: its tensors would be ten times the parameter, which may be an embedding.
            made[REMAINDER] = torch.zeros_like(tensor, dtype=form.master[1], requires_grad=False)
        elif form.master is not None:
            half, made[form.master[0]] = _halves(form, tensor, full_precision(tensor, entries))
            # (A master that comes from the parameter has it as its half; a comparison would wait for a GPU.)
            if has_master and not torch.equal(half.view(torch.int16), tensor.detach().view(torch.int16)):
                weights = half
        if tensor.dtype in (torch.float32, torch.float64) and REMAINDER in entries:
            weights = full_precision(tensor, entries)
        for name, value in values.items():
            made |= _stored(rule, form, name, tensor, value)
    formats = {MASTER, REMAINDER, SEED, *rule.states, *map(codes_name, rule.states), *map(scale_name, rule.states)}
    return {name: value for name, value in entries.items() if name not in formats} | made, weights


def _number(value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Copies the number, which may be a hyper-parameter, into a tensor of shape []."""
    if isinstance(value, Tensor):
        return torch.empty((), dtype=dtype, device=device).copy_(value.detach().reshape(()))
    return torch.full((), float(value), dtype=dtype, device=device)


def full_precision(tensor: Tensor, entries: Mapping[str, Any]) -> Tensor:
    """Returns a parameter in fp32 (fp64 stays), from the state's master or remainder if that has the parameter's shape.

    A checkpoint may load a remainder for a parameter of another dtype: it counts if the values are bfloat16 numbers.
    """
    tensor, remainder, master = tensor.detach(), entries.get(REMAINDER), entries.get(MASTER)
    with ieee():
        if isinstance(master, Tensor) and master.shape == tensor.shape:
            return codecs.join_master(tensor, _laid_out(master, tensor))
        if isinstance(remainder, Tensor) and remainder.shape == tensor.shape:
            values = tensor.float()
            bits, low = values.view(torch.int32), remainder.to(tensor.device, torch.int32)
            low = low << 8 if remainder.dtype == torch.int8 else low  # (torch's own optimizers cast it to other dtypes)
            if tensor.dtype == torch.bfloat16 or not bool((bits & 0xFFFF).any()):
                return codecs.join(codecs.bfloat16_of(bits >> 16), low)
            if not torch.equal(codecs.split(values)[1].int(), low):  # otherwise the parameter holds it already
                warn(
                    f"the checkpoint's {REMAINDER!r} of a {tensor.dtype} parameter of shape {list(tensor.shape)} is "
                    "dropped: it belongs to bfloat16 numbers, and the parameter has others. Load the model's own "
                    "checkpoint, or its full_precision_state_dict()"
                )
        return full(tensor)


def storing(form: Format, tensor: Tensor, entries: Mapping[str, Any], weights: Tensor) -> partial[Any]:
    """Makes the call that sets a parameter and its existing master from fp32 values, both or none.

    It rounds to nearest where the format has fewer bits.
    """
    with ieee():
        half, master = _halves(form, tensor, weights)
    if form.master is None or master is None:
        return partial(tensor.detach().copy_, half)
    return partial(torch._foreach_copy_, [tensor.detach(), entries[form.master[0]]], [half, master])


def _halves(form: Format, tensor: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Splits fp32 weights into a parameter's values and its master, to nearest."""
    return store_weights(form, _laid_out(weights, tensor), _nearest(tensor))


def _nearest(tensor: Tensor) -> Tensor:
    """Returns noise that rounds to nearest: half of the dropped range."""
    return torch.full((), -(1 << 31), dtype=torch.int32, device=tensor.device)


def _laid_out(values: Tensor, tensor: Tensor) -> Tensor:
    """Copies values to fp32, or for an fp64 parameter to fp64, on its device and in its layout."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False).copy_(values)


def _full_state(rule: type[Rule], name: str, tensor: Tensor, entries: Mapping[str, Any]) -> Tensor | None:
    """Decodes a state to fp32, in the parameter's layout; None without a state."""
    value = state_in(entries, name)
    if value is None:
        return None
    if value.shape != tensor.shape:
        raise RuntimeError(
            f"state {name!r} has shape {list(value.shape)}, its parameter {list(tensor.shape)}; "
            "load a checkpoint of the same model"
        )
    if value.dtype != torch.uint8:
        return _laid_out(value, tensor)
    # The blocks follow the layout that the codes have now.
    value = value if layout(value) == "dense" else value.contiguous()
    full = torch.empty_like(value, dtype=torch.float32)
    scale = entries[scale_name(name)].to(value.device).reshape(-1)
    if scale.numel() != codecs.block_count(value.numel()):  # a shard of the codes, and all scales
        raise RuntimeError(
            f"state {name!r} is in 8 bits, in blocks that lie across the parts of which this process has one; save it "
            "with state_dtype=torch.float32 or torch.bfloat16 to load it here"
        )
    memory_order(full).copy_(load_state(memory_order(value), scale, name in rule.second_moments))
    return _laid_out(full, tensor)


def _stored(rule: type[Rule], form: Format, name: str, tensor: Tensor, value: Tensor | None) -> dict[str, Any]:
    """Stores a state's fp32 values in the format, or zeros without values; returns the state, with its scales."""
    state = torch.zeros_like(tensor, dtype=form.state_dtype, requires_grad=False)
    made: dict[str, Any] = {name: state}
    if form.states is States.INT8:
        made = {codes_name(name): state, scale_name(name): state.new_zeros(scale_shape(tensor))}
        if name in rule.restarts:
            made[name] = IN_CODES
    if value is None:
        return made
    if form.states is not States.INT8:
        state.copy_(value)
        return made
    stored: Any = store_state(form, memory_order(value), _nearest(value), name in rule.second_moments)
    for to, values in zip((memory_order(state), made[scale_name(name)].view(-1)), stored, strict=True):
        to.copy_(values)
    return made
