"""Histories in checkpoints: of the norms that clipping has seen, the means of the noise scale, and sums' noise.

One parameter's state holds them, because torch.distributed.checkpoint keeps nothing else: `state[p]["clip_history"]`,
fp64 [2, 3], `state[p]["noise_scale"]`, fp64 [4], and `state[p]["sum_noise"]`, int64 [parameters]. It is the first
parameter that has a state, or never has one. torch's optimizers ignore the keys. The limits of parameter groups are in
the groups, as every option of a group is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused.clip import LIMIT
from accumfused.core.engine import Engine
from accumfused.warn import warn

_WORDS = "sum_noise"
_SHAPES = {"clip_history": (2, 3), "noise_scale": (4,), _WORDS: None}  # None: a number for each parameter

Histories = dict[str, Tensor]  # by their keys


def of(engine: Engine) -> Histories:
    """Returns the histories that an optimizer keeps, and has begun."""
    means = None if engine.noise is None else engine.noise.means
    every = {"clip_history": engine.clipping.history, "noise_scale": means, _WORDS: engine.window.noise.of_rows()}
    return {name: history for name, history in every.items() if history is not None}


def resume(engine: Engine, histories: Histories) -> None:
    """Goes on from the histories that the optimizer keeps; those that are missing begin anew.

    So do those that are not finite: torch's optimizers cast them to the parameter's dtype, and fp16 ends at 65504.
    """
    whole = {name: history for name, history in histories.items() if bool(history.isfinite().all())}
    engine.clipping.resume(whole.get("clip_history"))
    if engine.noise is not None:
        engine.noise.means = whole.get("noise_scale")
    engine.window.noise.resume(whole.get(_WORDS))


def with_histories(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with the (fused) optimizer's histories."""
    state = dict(state_dict["state"])
    groups = zip(state_dict["param_groups"], map(optimizer._rule_of, optimizer.param_groups), strict=True)
    stateless = {key: not rule.torch_states for group, rule in groups for key in group["params"]}
    key = next((key for key, has_none in stateless.items() if has_none or state.get(key)), None)
    if key is None:
        return state_dict  # no step was made
    state[key] = {**state.get(key, {}), **of(optimizer._engine)}
    return {**state_dict, "state": state}


def without_histories(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Histories]:
    """Returns the checkpoint without histories, and copies of these.

    Raises:
        ValueError: one is damaged.
    """
    state = state_dict["state"]
    histories, others = dict[str, Tensor](), dict(state)
    for key, entries in state.items():
        if not isinstance(entries, Mapping) or entries.keys().isdisjoint(_SHAPES):
            continue
        for name in _SHAPES.keys() & entries.keys():
            value, shape = entries[name], _SHAPES[name]
            if shape is None:
                if value.dtype is torch.int64 and value.dim() == 1:  # else another optimizer has cast it
                    histories[name] = value.clone()
                continue
            if value.shape != shape:
                raise ValueError(f"the checkpoint's {name!r} of parameter {key} has not the shape {list(shape)}")
            histories[name] = history = value.to(torch.float64, copy=True)
            least = history if name == "clip_history" else history[2:]  # counts, norms' means and variances...
            if bool((least < 0).any()):
                raise ValueError(
                    f"the checkpoint's {name!r} of parameter {key} holds {float(least.min())}, and none of its numbers "
                    "can be below 0; it is damaged"
                )
        others[key] = {name: value for name, value in entries.items() if name not in _SHAPES}
        if not others[key]:  # an entry that has nothing else is left out
            del others[key]
    return {**state_dict, "state": others}, histories


def of_policies(engine: Engine, histories: Histories) -> Histories:
    """Returns histories without those of clipping policies that the optimizer has not; it warns if it has another."""
    policies, history = engine.clipping.of_history, histories.get("clip_history")
    if history is None or not any(policies):
        return histories
    rows = list(history.unbind())
    for index, (policy, name) in enumerate(
        zip(policies, ("clip=af.clip.ZScore", "skip_above=af.clip.RunningMean"), strict=True)
    ):
        if policy is None and bool(rows[index].any()):
            rows[index] = torch.zeros_like(rows[index])
            own = next(policy for policy in policies if policy is not None)
            warn(
                f"the checkpoint's norms are those of {name}, which this optimizer has not, and are dropped; "
                f"{type(own).__name__} goes on from its own, or begins anew"
            )
    return {**histories, "clip_history": torch.stack(rows)}


def with_limits(groups: Sequence[Mapping[str, Any]], state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with these parameter groups' limits where its own groups have none.

    Those of torch's optimizers have none, nor those from before there were any.
    """
    limits: list[dict[str, Any]] = [{LIMIT: group[LIMIT]} if LIMIT in group else {} for group in groups]
    loaded = state_dict["param_groups"]
    limits += [{}] * (len(loaded) - len(limits))  # torch refuses another number of groups
    return {**state_dict, "param_groups": [limit | group for limit, group in zip(limits, loaded, strict=False)]}
