"""What a checkpoint holds: the states, checked before they are loaded, and an open window.

A window is saved with each parameter, because torch.distributed.checkpoint keeps nothing else:
`state[p]["grad_accumulator"]`, fp32, is the sum so far, and `state[p]["grad_accumulator_weights"]`, fp64 [4], holds the
factor that the next fold applies to it, the sum of the window's weights, the number of its micro-batches, and 1 where
it is weighted (0: a plain sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accumfused.accumulation import Window
from accumfused.formats import format_of
from accumfused.state import make_state
from accumfused.warn import warn

if TYPE_CHECKING:
    from accumfused.optimizer import FusedOptimizer

ACCUMULATOR = "grad_accumulator"
WEIGHTS = "grad_accumulator_weights"
REMAINDER = "master_remainder"


def refuse_part(window: Window) -> None:
    """Refuses to save or copy a window that holds a part of a micro-batch.

    Raises:
        RuntimeError: it does: gradients are released during backward, and the micro-batch has not ended.
    """
    if window.entered:
        raise RuntimeError(
            "a micro-batch is in progress, and a part of its gradients is in the window; call accumulate() (or step(), "
            "or zero_grad()) before the optimizer is saved or copied"
        )


def with_window(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with the (fused) optimizer's open window.

    Parameters that have not been stepped get the zeros that torch's optimizer begins with: it takes a state that holds
    anything for a complete one.
    """
    window, state = optimizer._runtime.window, dict(state_dict["state"])
    keys = {id(param): key for key, param in _params(optimizer, state_dict).items()}
    rules = {id(p): optimizer.rule_of(group) for group in optimizer.param_groups for p in group["params"]}
    for param, accumulator, weights in zip(window.params, window.accumulators, window.weights_held(), strict=True):
        if accumulator is None:
            continue
        key, rule = keys[id(param)], rules[id(param)]
        entries = dict(state.get(key, {}))
        if "step" in rule.torch_states:
            settings = optimizer._settings
            make_state(rule, format_of(rule, param, settings), param, entries, settings.seed)
        state[key] = entries | {ACCUMULATOR: accumulator, WEIGHTS: weights}
    return {**state_dict, "state": state}


def without_window(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], Window | None]:
    """The checkpoint without its open window, and that window, on the devices of the parameters."""
    params = _params(optimizer, state_dict)
    found, state = {}, {}
    for key, entries in state_dict["state"].items():
        state[key] = entries
        if key in params and ACCUMULATOR in entries:
            state[key] = {name: value for name, value in entries.items() if name not in (ACCUMULATOR, WEIGHTS)}
            dtype = optimizer._settings.accumulator_dtype
            accumulator = torch.empty_like(params[key], dtype=dtype, requires_grad=False)
            found[id(params[key])] = accumulator.copy_(entries[ACCUMULATOR]), entries[WEIGHTS].tolist()
    if not found:
        return dict(state_dict), None
    window = Window.resumed([(param, *found.get(id(param), (None, None))) for param in params.values()])
    return {**state_dict, "state": state}, window


def without_formats(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Tensor]]]:
    """The checkpoint without what torch would cast to its parameter's dtype, and that, on the parameter's device."""
    params, state = _params(optimizer, state_dict), dict(state_dict["state"])
    kept: dict[Tensor, dict[str, Tensor]] = {}
    for key, param in params.items():
        entries = state.get(key, {})
        own = {
            name: value.to(param.device)
            for name, value in entries.items()
            if isinstance(value, Tensor) and name != "step"
            if param.dtype != torch.float32 or not value.is_floating_point()
        }
        remainder = own.get(REMAINDER)
        if remainder is not None and remainder.dtype not in (torch.int16, torch.int8):
            warn(
                f"the checkpoint's {REMAINDER!r} of parameter {key} is {remainder.dtype}, so its bits are lost (another "
                "optimizer has cast it); the master weight is derived from the parameter again"
            )
            del own[REMAINDER]
        if own:
            kept[param] = own
            state[key] = {name: value for name, value in entries.items() if name not in (*own, REMAINDER)}
    return {**state_dict, "state": state}, kept


def check(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that does not fit, before anything is changed. The number of parameters is left to torch.

    Raises:
        ValueError: not an optimizer's checkpoint; that of another optimizer; a state that is incomplete, has another
            shape than its parameter, or belongs to none.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ValueError(
            "this is not an optimizer's state_dict, which has 'state' and 'param_groups'; "
            f"this one has {', '.join(map(repr, list(state_dict)[:5]))}"
        )
    from accumfused.rules import ALL  # which are optimizers, and import this

    name = (optimizer.torch_class or type(optimizer)).__name__
    rules = []
    for group in state_dict["param_groups"]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError("a group of the checkpoint has no 'params'; it is damaged")
        rule = optimizer.rule_of({**optimizer.defaults, **group})
        rules += [rule] * len(group["params"])
        # Switches and what defaults to None came to torch with time, and older checkpoints lack them.
        needed = [key for key, value in optimizer.defaults.items() if not isinstance(value, (bool, type(None)))]
        lacks = [key for key in needed if key not in group]
        if lacks:
            raise ValueError(f"the checkpoint's groups have no {lacks[0]!r}, which {name} needs; load one of {name}")
    known = {state for fused in ALL for rule in fused.rules for state in rule.states}
    known -= {state for rule in optimizer.rules for state in rule.states}
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params, rule_of = _params(optimizer, state_dict), dict(zip(ids, rules, strict=True))
    for key, entries in state_dict["state"].items():
        if isinstance(key, int) and key not in rule_of:
            raise ValueError(
                f"the checkpoint has a state of parameter {key}, which none of its groups has; it is damaged"
            )
        if key in params:
            _check_state(key, params[key], entries, rule_of[key].states, rule_of[key].torch_states, name)
            others = known & entries.keys() if rule_of[key].states else set()
            if others:
                raise ValueError(f"the checkpoint's state of parameter {key} has {min(others)!r}, which {name} has not")


def _check_state(
    key: Any, param: Tensor, entries: Mapping[str, Any], states: tuple[str, ...], expected: tuple[str, ...], name: str
) -> None:
    if not isinstance(entries, Mapping):
        raise ValueError(f"the checkpoint's state of parameter {key} is a {type(entries).__name__}, not a dictionary")
    own = {k: v for k, v in entries.items() if v is not None and k not in (ACCUMULATOR, WEIGHTS)}
    lacks = [k for k in expected or states if own and k not in own]
    if lacks:
        raise ValueError(
            f"the checkpoint's state of parameter {key} has no {lacks[0]!r}, only {', '.join(sorted(own))}: "
            f"it is incomplete, or of another optimizer than {name}"
        )
    step = entries.get("step")
    if "step" in expected and isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(f"state 'step' of parameter {key} has shape {list(step.shape)}, and is to be one number")
    for k in (*states, ACCUMULATOR):
        value = entries.get(k)
        if isinstance(value, Tensor) and value.shape != param.shape:
            raise ValueError(
                f"state {k!r} of parameter {key} has shape {list(value.shape)}, its parameter {list(param.shape)}; "
                "load a checkpoint of the same model"
            )
    window = [entries[k] for k in (ACCUMULATOR, WEIGHTS) if k in entries]
    if window and not (len(window) == 2 and all(isinstance(v, Tensor) for v in window) and window[1].shape == (4,)):
        raise ValueError(
            f"the open window of parameter {key} is incomplete: it needs {ACCUMULATOR!r} and {WEIGHTS!r} [4]"
        )


def _params(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    """The parameter of each of the checkpoint's ids; they are paired in order, as torch does."""
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(zip(ids, params, strict=False))
