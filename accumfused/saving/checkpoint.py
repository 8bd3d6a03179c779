"""Checkpoints: the states, checked before they are loaded, and an open window.

The state of each parameter holds its window, because torch.distributed.checkpoint keeps nothing else.
`state[p]["grad_accumulator"]`, fp32, fp64 or bf16, is the sum so far, and goes on in its dtype.
`state[p]["grad_accumulator_weights"]`, fp64 [4], holds the window's numbers, the same for each: its unit, the sum of
its weights, that of its factors, and the number of its micro-batches (negative: a plain sum). A window without sums has
its numbers alone, in the state of the first parameter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from accumfused.core.engine import Engine
from accumfused.core.protocol import Owner
from accumfused.core.rows import Grads, home_of
from accumfused.core.window import Window
from accumfused.formats import kinds
from accumfused.formats.codecs import BLOCK
from accumfused.formats.convert import state_of
from accumfused.formats.kinds import (
    IN_CODES,
    MASTER,
    REMAINDER,
    SEED,
    TORCH_DTYPES,
    check_states,
    codes_name,
    format_of,
    is_stored,
    names,
    scale_name,
    scale_shape,
    state_in,
)
from accumfused.formats.numeric import layout
from accumfused.formats.shards import is_dtensor, owned, shard_of
from accumfused.rules.rule import Rule, known_states
from accumfused.warn import warn

ACCUMULATOR = "grad_accumulator"
WEIGHTS = "grad_accumulator_weights"


def refuse_part(engine: Engine) -> None:
    """Refuses to save or copy a window in mid micro-batch, or with the sums of one process among several."""
    if engine.settings.process_group is not None:
        raise RuntimeError(
            "a window is open, and holds this process's own part of the sums: no checkpoint or copy of one process "
            "has them all; call step() or zero_grad(), or accumulate(..., last=True), before that"
        )
    if engine.window.in_progress is not None:
        raise RuntimeError(
            "a micro-batch is in progress, and a part of its gradients is in the window; call accumulate() (or step(), "
            "or zero_grad()) before the optimizer is saved or copied"
        )


def with_window(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with the (fused) optimizer's open window.

    Parameters without a step get the states with which torch's optimizer begins, since it takes any entry for a
    complete state. With DTensors all processes must call this: it saves the mean of their weights, the divisor for
    sums of such gradients.
    """
    window, state = optimizer._engine.window, dict(state_dict["state"])
    keys = {id(param): key for key, param in _params(optimizer, state_dict).items()}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    plan = optimizer._engine.plans.current()
    weights = window.weights
    total = plan.exchange.total(plan, weights.total, weights.is_weighted)
    numbers = weights.saved(total, plan.device)
    rows = list(zip(window.params, window.sums, strict=True))
    for param, accumulator in [row for row in rows if row[1] is not None] or rows[:1]:
        key, group = keys[id(param)], groups[id(param)]
        rule = optimizer._rule_of(group)
        entries = dict(state.get(key, {}))
        if "step" in rule.torch_states and any(state_in(entries, name) is None for name in rule.states):
            _complete(optimizer, group, param, entries)
        state[key] = entries | {WEIGHTS: numbers}
        if accumulator is not None:
            shard = shard_of(param)
            state[key][ACCUMULATOR] = accumulator if shard is None else shard.whole(accumulator)
    return {**state_dict, "state": state}


def without_window(optimizer: Owner, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], Window | None]:
    """Returns the checkpoint without its open window, and that window on the parameters' devices."""
    params = _params(optimizer, state_dict)
    by_id, state, numbers = dict[int, Tensor | None](), {}, list[float]()
    for key, entries in state_dict["state"].items():
        state[key] = entries
        if key in params and WEIGHTS in entries:
            if optimizer._engine.settings.process_group is not None:
                raise ValueError(
                    "the checkpoint has an open window, which is the sum of all processes, and with a process group "
                    "each has its own part; load it without process_group and finish the window"
                )
            state[key] = {name: value for name, value in entries.items() if name not in (ACCUMULATOR, WEIGHTS)}
            shard, saved = shard_of(params[key]), entries.get(ACCUMULATOR)
            accumulator = None
            if saved is not None:
                tensor = owned(params[key], shard)
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                if saved.dtype is torch.bfloat16 and tensor.dtype in (torch.float32, torch.bfloat16):
                    dtype = saved.dtype
                home = home_of(tensor, optimizer._engine.settings)
                accumulator = torch.empty_like(tensor, dtype=dtype, device=home, requires_grad=False)
                accumulator.copy_(saved if shard is None else shard.part(ACCUMULATOR, saved))
            by_id[id(params[key])], numbers = accumulator, entries[WEIGHTS].tolist()
    if not numbers:
        return dict(state_dict), None
    sums = Grads([by_id.get(id(param)) for param in params.values()])
    window = Window.resumed([*params.values()], sums, numbers)
    return {**state_dict, "state": state}, window


def without_formats(
    optimizer: Owner, state_dict: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Tensor]]]:
    """Returns the checkpoint without entries that torch would cast, and those entries.

    The next step converts the entries, once the parameters are loaded too. Entries that another optimizer has cast are
    left out. A parameter keeps its master if the checkpoint has none.
    """
    params, groups, state = _params(optimizer, state_dict), _groups(optimizer, state_dict), dict(state_dict["state"])
    entries_of, formatted = dict[Tensor, dict[str, Tensor]](), _formatted(optimizer)
    for key, param in params.items():
        rule, entries = optimizer._rule_of(groups[key]), state.get(key)
        if rule.is_foreign or param.dtype not in TORCH_DTYPES:
            continue
        current = optimizer.state.get(param, {})
        masters = {name: current[name] for name in (REMAINDER, MASTER) if name in current}
        if not entries:
            if masters:
                _complete(optimizer, groups[key], param, masters)
                entries_of[param] = masters
            continue
        usable = {name for name in formatted if _is_whole(name, entries.get(name))}
        lost = [name for name in (REMAINDER, MASTER) if entries.get(name) is not None and name not in usable]
        if lost and format_of(rule, param, optimizer._engine.settings).master:
            warn(
                f"the checkpoint's {lost[0]!r} of parameter {key} is {entries[lost[0]].dtype}, so its bits are lost "
                "(another optimizer has cast it); the master weight is derived from the parameter again"
            )
        entries_of[param] = {
            name: (value.to(home_of(param, optimizer._engine.settings)) if isinstance(value, Tensor) else value)
            for name, value in entries.items()
            if name in usable
        }
        if entries_of[param].keys().isdisjoint((REMAINDER, MASTER)):
            entries_of[param] |= masters
        state[key] = {name: value for name, value in entries.items() if name not in formatted}
    return {**state_dict, "state": state}, entries_of


def refuse_cast(state: Mapping[Tensor, Mapping[str, Any]], rule: type[Rule], params: list[Tensor]) -> None:
    """Refuses what an optimizer of torch has made of our checkpoint: it has cast bits, and left a window alone.

    Cast remainders of 16 bits are still read: some are larger than any of 8 bits.

    Raises:
        ValueError: that.
    """
    ours = (ACCUMULATOR, WEIGHTS, *map(codes_name, rule.states))
    remainders = [entries[REMAINDER] for entries in state.values() if isinstance(entries.get(REMAINDER), Tensor)]
    have_16_bits = any(bool((remainder.abs() > 128).any()) for remainder in remainders)
    readable = (REMAINDER,) if have_16_bits else ()
    for entries in (state.get(param) or {} for param in params):
        for name, value in entries.items():
            is_cast = name in (REMAINDER, MASTER) and name not in readable and not _is_whole(name, value)
            if name in ours or is_cast:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the optimizer's state has {name!r}, as {kind}: it is of a checkpoint of accumfused, which torch "
                    "does not read; call fuse() first and load the checkpoint then, or delete the entry to "
                    "go on from the parameter as it is"
                )


def _complete(optimizer: Owner, group: Mapping[str, Any], param: Tensor, entries: dict[str, Any]) -> None:
    """Makes the missing entries of a parameter's state, in place."""
    engine, shard, rule = optimizer._engine, shard_of(param), optimizer._rule_of(group)
    local = entries if shard is None else shard.parts(entries)
    form, tensor = format_of(rule, param, engine.settings), owned(param, shard)
    if layout(tensor) == "strided":  # states are dense
        tensor = torch.empty_like(tensor, requires_grad=False).copy_(tensor)
    made, weights, home = local, None, home_of(tensor, engine.settings)
    if not is_stored(rule, form, tensor, local, home):
        made, weights = state_of(rule, form, tensor.to(home), local, engine.plans.seed, group)
    if weights is not None:
        tensor.detach().copy_(weights)
    wholes = dict(made) if shard is None else shard.wholes(made, entries, names(rule, form))
    entries.clear()
    entries.update(wholes)


def _states(optimizer: Owner) -> set[str]:
    return {state for rule in optimizer.rules for state in rule.states}


def _formatted(optimizer: Owner) -> set[str]:
    """Returns the keys of entries in our own formats, in any format and under any options."""
    states = _states(optimizer)
    return {*states, *map(codes_name, states), *map(scale_name, states), REMAINDER, MASTER, SEED}


def _is_whole(name: str, value: Any) -> bool:
    """Tells whether no cast has lost the entry's bits."""
    dtypes = {REMAINDER: (torch.int16, torch.int8), MASTER: (torch.float32,), SEED: (torch.int64,)}
    if not isinstance(value, Tensor):
        return isinstance(value, int) and value == IN_CODES
    return name not in dtypes or value.dtype in dtypes[name]


def with_named_codes(optimizer: Owner, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with the names of now for codes: older ones have them under their states' names."""
    groups, state = _groups(optimizer, state_dict), dict(state_dict["state"])
    for key, group in groups.items():
        if state.get(key):
            state[key] = kinds.with_named_codes(optimizer._rule_of(group), state[key])
    return {**state_dict, "state": state}


def check(optimizer: Owner, state_dict: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that torch would load, and that would train wrongly, before anything is changed.

    Raises:
        ValueError: another optimizer's, or with options that the settings do not serve; a state that is incomplete,
            cannot be decoded, or fits no parameter. What is no checkpoint at all raises anything: see `refusing`.
    """
    name = getattr(optimizer, "torch_class", type(optimizer)).__name__
    for group in state_dict["param_groups"]:
        # torch added switches, and options that default to None, with time: older checkpoints lack them.
        needed = [key for key, value in optimizer.defaults.items() if not isinstance(value, (bool, type(None)))]
        lacks = [key for key in needed if key not in group]
        if lacks:
            raise ValueError(f"the checkpoint's groups have no {lacks[0]!r}, which {name} needs; load one of {name}")
    foreign = known_states() - _states(optimizer)
    foreign |= set(map(codes_name, foreign))
    params = _params(optimizer, state_dict)
    rules = {key: optimizer._rule_of(group) for key, group in _groups(optimizer, state_dict).items()}
    for rule in rules.values():
        check_states(rule, optimizer._engine.settings)
    for group in state_dict["param_groups"]:
        _read_numbers(optimizer, {**optimizer.defaults, **group})
    has_sums = any(ACCUMULATOR in entries for key, entries in state_dict["state"].items() if key in params)
    for key, entries in state_dict["state"].items():
        if isinstance(key, int) and key not in rules:
            raise ValueError(
                f"the checkpoint has a state of parameter {key}, which none of its groups has; it is damaged"
            )
        if key in params:
            _check_state(key, params[key], entries, rules[key], name)
            _check_window(key, params[key], entries, has_sums=has_sums)
            if not rules[key].is_foreign:
                _check_formats(key, params[key], entries, optimizer)
            others = foreign & entries.keys() if rules[key].states else set()
            if others:
                raise ValueError(f"the checkpoint's state of parameter {key} has {min(others)!r}, which {name} has not")


@contextlib.contextmanager
def refusing(*passed: type[Exception]) -> Iterator[None]:
    """Makes one refusal of whatever a lookup in a checkpoint raises, or torch while it loads one.

    Args:
        passed: errors that have words of their own; those of memory always have.

    Raises:
        ValueError: the block has raised.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (*passed, MemoryError)) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"not a checkpoint of this optimizer: {what}; load what its state_dict() has returned, undamaged"
        ) from error


def _check_state(key: Any, param: Tensor, entries: Mapping[str, Any], rule: type[Rule], name: str) -> None:
    expected = rule.torch_states
    # A rule without states leaves these, and momentum may be switched on later: the state is not incomplete.
    others = {ACCUMULATOR, WEIGHTS, MASTER, REMAINDER, SEED, *({"step"} - {*expected})}
    present = {k: v for k, v in entries.items() if v is not None and k not in others}
    placed = [k for k, v in entries.items() if is_dtensor(v)]
    if placed and not is_dtensor(param):
        raise ValueError(
            f"state {placed[0]!r} of parameter {key} is a part of a state, spread over processes, and this optimizer "
            "has whole ones; save and load by torch.distributed.checkpoint, which puts the parts together"
        )
    lacks = [k for k in expected or rule.states if present and state_in(present, k) is None]
    if lacks:
        raise ValueError(
            f"the checkpoint's state of parameter {key} has no {lacks[0]!r}, only {', '.join(sorted(present))}: "
            f"it is incomplete, or of another optimizer than {name}"
        )
    if expected or not rule.is_foreign:
        _read_number(f"'step' of parameter {key}", entries.get("step"))


def _read_number(what: str, value: Any) -> None:
    """Refuses, now and not at the next step, what is no number; the device's is not read."""
    try:
        if isinstance(value, Tensor):
            value.reshape(())
        elif value is not None:
            math.isnan(value)
    except (TypeError, ArithmeticError, RuntimeError) as error:
        raise TypeError(f"{what} is to be one number, {error}") from error


def _read_numbers(optimizer: Owner, group: Mapping[str, Any]) -> None:
    rule = optimizer._rule_of(group)
    for name in (*rule.counts, *rule.hyper_names):
        value = group[name] if name in rule.counts else rule.hyper(group, name)
        if value is None:
            raise TypeError(f"{name!r} of a group is None")
        _read_number(f"{name!r} of a group", value)


def _check_window(key: Any, param: Tensor, entries: Mapping[str, Any], *, has_sums: bool) -> None:
    """Refuses incomplete windows; `has_sums`: some parameter has a sum, else weights may come alone."""
    if isinstance(entries.get(ACCUMULATOR), Tensor):
        _check_shape(key, param, ACCUMULATOR, entries[ACCUMULATOR])
    needed = (WEIGHTS, ACCUMULATOR) if has_sums else (WEIGHTS,)
    window = [entries.get(name) for name in needed]
    is_there = any(name in entries for name in (WEIGHTS, ACCUMULATOR))
    if is_there and not (all(isinstance(value, Tensor) for value in window) and window[0].shape == (4,)):  # type: ignore[union-attr]
        raise ValueError(
            f"the open window of parameter {key} is incomplete: it needs {ACCUMULATOR!r} and {WEIGHTS!r} [4]"
        )
    if is_there:
        numbers = entries[WEIGHTS].tolist()
        unit, total, factors, count = numbers
        is_whole = math.isfinite(count) and count == int(count) != 0
        has_unit = total == 0 or math.isnan(total) or unit * factors != 0
        is_negative = total < 0 or (factors < 0 and math.copysign(1.0, unit) > 0)  # see `WindowWeights.saved`
        if not is_whole or not has_unit or math.inf in map(abs, numbers) or is_negative:
            raise ValueError(
                f"the open window of parameter {key} has {count:g} micro-batches of the weight {total:g}, as no window "
                "has; the checkpoint is damaged"
            )


def _check_formats(key: Any, param: Tensor, entries: Mapping[str, Any], optimizer: Owner) -> None:
    """Refuses entries that `convert.state_of` could not read."""
    states, present = _states(optimizer), {name: value for name, value in entries.items() if value is not None}
    codes = {codes_name(state): state for state in states if codes_name(state) in present}
    for name in [*codes, *sorted(states & present.keys() - {*codes.values()}), REMAINDER, MASTER]:
        if name in present:
            if not isinstance(present[name], Tensor):
                raise ValueError(f"state {name!r} of parameter {key} is a {type(present[name]).__name__}, not a tensor")
            _check_shape(key, param, name, present[name])
    for state in states:
        _check_scale(key, state, present)
    _read_number(f"{SEED!r} of parameter {key}", present.get(SEED))


def _check_shape(key: Any, param: Tensor, name: str, value: Tensor) -> None:
    if not is_lazy(param) and value.shape != param.shape:  # else the first step compares them
        raise ValueError(
            f"state {name!r} of parameter {key} has shape {list(value.shape)}, its parameter {list(param.shape)}; "
            "load a checkpoint of the same model"
        )


def _check_scale(key: Any, state: str, entries: Mapping[str, Any]) -> None:
    """Refuses codes without scales, and numbers with scales: these were codes, until another optimizer cast them."""
    value, scale, is_coded = state_in(entries, state), entries.get(scale_name(state)), codes_name(state) in entries
    if value is None or (value.is_floating_point() and scale is None and not is_coded):
        return
    what = f"state {(codes_name(state) if is_coded else state)!r} of parameter {key}"
    if is_coded and isinstance(entries.get(state), Tensor):
        raise ValueError(f"{what} is in 8 bits, and {state!r} is there, too; one of them is another checkpoint's")
    if value.dtype != torch.uint8 or (
        scale is not None and (not isinstance(scale, Tensor) or scale.dtype != torch.uint8)
    ):
        kind = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(
            f"{what} is {value.dtype} {'without scales' if scale is None else f'with scales in {kind}'}, "
            "which is not a format (floating point, or torch.uint8 with scales in torch.uint8): another "
            "optimizer has cast 8-bit codes; load the checkpoint as accumfused has saved it"
        )
    if scale is None:
        raise ValueError(f"{what} is in 8 bits, and its scales {scale_name(state)!r} are missing; it is incomplete")
    shape, expected = tuple(scale.shape), scale_shape(value if layout(value) == "dense" else value.contiguous())
    if scale.numel() == math.prod(expected) and (len(shape) == 3) != (len(expected) == 3):
        words = "not contiguous", "contiguous"
        is_contiguous = len(expected) != 3
        raise ValueError(
            f"{what} is {words[is_contiguous]}, and its scales, of shape {list(shape)}, are those of codes that were "
            f"{words[not is_contiguous]}: blocks are runs of memory, and something has copied the codes by index into "
            "another layout; load the checkpoint as accumfused has saved it, by load_state_dict"
        )
    if shape != expected:
        raise ValueError(
            f"{what} has scales of shape {list(shape)}, and {BLOCK} elements to a scale make {list(expected)}; "
            "it is damaged, or was made with another block size"
        )


def _groups(optimizer: Owner, state_dict: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """Returns the options for each of the checkpoint's ids: the checkpoint's, and the defaults of others."""
    return {key: {**optimizer.defaults, **group} for group in state_dict["param_groups"] for key in group["params"]}


def _params(optimizer: Owner, state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    """Returns the parameter for each of the checkpoint's ids, paired in order as torch does."""
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(zip(ids, params, strict=False))
