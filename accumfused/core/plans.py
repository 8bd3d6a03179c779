"""Plans: an optimizer's current plan with its backend, exchange and states; anew whenever it is outdated.

In: param_groups and state. A tensor that moves, a new group, another state: each outdates a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.plan import Backend, Exchange, Plan
from accumfused.core.protocol import Owner
from accumfused.core.rows import Grads, Row, check_memory, check_size, has_memory, is_freed, row_of
from accumfused.core.skips import Skips
from accumfused.formats.convert import make_state
from accumfused.formats.kinds import check_states, names
from accumfused.formats.numeric import chunk_count
from accumfused.rules import Rule
from accumfused.settings import Settings


@dataclass(frozen=True)
class Surroundings:
    """The choices that the core leaves to others.

    Args:
        select: chooses a new plan's backend and exchange, perhaps those of the last plan again.
        default_seed: gives the seed of stochastic rounding if the settings have none.
    """

    select: Callable[[Settings, Plan, Plan | None], tuple[Backend, Exchange]]
    default_seed: Callable[[], int]


class Plans:
    """Makes the plans and the states of an optimizer.

    Args:
        owner: the optimizer; a weak reference, because the optimizer holds this object.
    """

    def __init__(self, owner: Owner, settings: Settings, surroundings: Surroundings) -> None:
        self._owner = weakref.ref(owner)
        self.settings = settings
        self.last: Plan | None = None
        self.backend: Backend | None = None  # a benchmark sets it; it overrides the selection
        self._surroundings = surroundings

    @property
    def owner(self) -> Owner:
        """The optimizer."""
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the optimizer was deleted; keep it as long as what was made of it")
        return owner

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the groups' order."""
        return [param for group in self.owner.param_groups for param in group["params"]]

    @property
    def seed(self) -> int:
        """The seed of the noise of new states."""
        given = self.settings.rounding_seed
        return self._surroundings.default_seed() if given is None else given

    def current(self, *, with_states: bool = True) -> Plan:
        """The plan for the current parameters and states, with backend and exchange.

        Args:
            with_states: False: for a fold, which reads no states; they may be others.
        """
        owner, known = self.owner, self.last
        groups, state, asked = owner.param_groups, owner.state, owner.state if with_states else None
        rules = [rule_of(owner.rules, group) for group in groups]
        if known is not None and known.is_valid and known.rules == rules and known.unchanged(groups, asked):
            return known
        graphs.refuse_new_tensors({param.device for param in self.params if has_memory(param)})
        plan = build(groups, state, rules, self.settings)
        backend, plan.exchange = self._surroundings.select(self.settings, plan, known)
        for row in plan.rows:
            row.is_bundled = 4 * row.param.numel() < plan.exchange.bundled_bytes
        plan.backend = self.backend or backend
        plan.backend.prepare(plan, groups, state)
        plan.skips = Skips(plan.device) if known is None or known.skips.count.device != plan.device else known.skips
        self.last = plan
        return plan

    def forget(self) -> None:
        """The optimizer's state or settings were replaced: the next call makes a new plan. The old one is freed."""
        known = self.last
        if known is not None:
            self.last = Plan([], known.rules, 0, known.device, known.devices, known.dtype, is_valid=False)
            self.last.backend, self.last.exchange, self.last.skips = known.backend, known.exchange, known.skips

    def with_states(self, plan: Plan, grads: Grads) -> Plan:
        """Makes the state of every parameter with a gradient, in its format, and a plan with these states."""
        graphs.refuse_new_tensors({plan.device})  # a graph would keep the zeros' addresses without filling them
        for row, grad in zip(plan.rows, grads, strict=True):
            if grad is None:
                continue
            if row.is_copy:
                row.tensor.copy_(row.owned)
            entries, shard = self.owner.state[row.param], row.shard
            local = entries if shard is None else shard.parts(entries)
            make_state(row.rule, row.form, row.tensor, local, self.seed, self.owner.param_groups[row.group])
            if shard is not None:
                shard.put(local, entries, names(row.rule, row.form))
            if row.is_copy:
                row.owned.copy_(row.tensor)
        return self.current()


def build(
    param_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Any],
    rules: list[type[Rule]],
    settings: Settings,
) -> Plan:
    """Builds the plan; the backend then adds its own tables.

    Raises:
        ValueError: a group's states cannot be kept in 8 bits.
        RuntimeError: two parameters share memory; a parameter's memory is too small or read-only; this process has no
            shard of a DTensor to update.
    """
    for rule in rules:
        check_states(rule, settings)
    rows, chunks = list[Row](), 0
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            rows.append(row_of(param, index, rules[index], state.get(param), settings, chunks))
            chunks += chunk_count(rows[-1].tensor.numel())
    owned = [row.owned for row in rows]
    devices = {row.param.device for row in rows if has_memory(row.param)}
    check_memory([tensor for tensor in owned if has_memory(tensor) and not is_freed(tensor) and tensor.numel()])
    for row in rows:
        for slot in () if row.storage is None else row.storage.slots():
            if slot is not None:
                check_size(slot, "state")
    device = next((tensor.device for tensor in owned if has_memory(tensor)), torch.device("cpu"))
    is_double = any(row.form.dtype == torch.float64 and row.param.requires_grad for row in rows)
    plan = Plan(rows, rules, chunks, device, devices, torch.float64 if is_double else torch.float32)
    if plan.is_spread:
        plan.reader.remember(param_groups, state)
    return plan


def rule_of(rules: Iterable[type[Rule]], group: Mapping[str, Any]) -> type[Rule]:
    """An optimizer's rule for a parameter group: the first whose flags are the group's."""
    return next(rule for rule in rules if rule.fits(group))
