"""The history of norms in checkpoints, and the limits of parameter groups, which no checkpoint brings.

One parameter's state holds the history, because torch.distributed.checkpoint keeps nothing else:
`state[p]["clip_history"]`, fp64 [2, 3]. It is the first parameter that has a state, or never has one. torch's
optimizers ignore the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumfused.clipping import LIMIT

HISTORY = "clip_history"


def with_history(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with the (fused) optimizer's history of norms."""
    state = dict(state_dict["state"])
    groups = zip(state_dict["param_groups"], map(optimizer.rule_of, optimizer.param_groups), strict=True)
    stateless = {key: not rule.torch_states for group, rule in groups for key in group["params"]}
    key = next((key for key, has_none in stateless.items() if has_none or state.get(key)), None)
    if key is None:
        return state_dict  # no step was made
    state[key] = {**state.get(key, {}), HISTORY: optimizer.engine.clipping.history}
    return {**state_dict, "state": state}


def without_history(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the checkpoint without a history of norms, and that history.

    Raises:
        ValueError: it is damaged.
    """
    state = state_dict.get("state")
    if not isinstance(state, Mapping):
        return state_dict, None  # refused by the check that follows
    found, others = None, dict(state)  # an entry that has nothing else is left out
    for key, entries in state.items():
        if isinstance(entries, Mapping) and HISTORY in entries:
            found = entries[HISTORY]
            others[key] = {name: value for name, value in entries.items() if name != HISTORY}
            if not others[key]:
                del others[key]
            if not isinstance(found, Tensor) or found.shape != (2, 3):
                raise ValueError(
                    f"the checkpoint's {HISTORY!r} of parameter {key} is not a tensor [2, 3]; it is damaged"
                )
    history = None if found is None else found.to(torch.float64, copy=True)
    return {**state_dict, "state": others}, history


def with_limits(groups: Sequence[Mapping[str, Any]], state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint with the limits of these parameter groups in place of its own."""
    own = [{LIMIT: group[LIMIT]} if LIMIT in group else {} for group in groups]
    loaded = [{name: value for name, value in group.items() if name != LIMIT} for group in state_dict["param_groups"]]
    own += [{}] * (len(loaded) - len(own))  # torch refuses another number of groups
    return {**state_dict, "param_groups": [group | limit for group, limit in zip(loaded, own, strict=False)]}
