"""Plans: an optimizer's current plan with its backend, exchange and states; anew whenever it is outdated.

In: param_groups and state. A tensor that moves, a new group, another state: each outdates a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.plan import Plan
from accumfused.core.protocol import Backend, Exchange, Owner, run
from accumfused.core.rows import (
    HOST,
    Grads,
    InGroup,
    Row,
    check_memory,
    check_size,
    has_memory,
    is_freed,
    row_of,
)
from accumfused.core.skips import Skips
from accumfused.formats.convert import state_of
from accumfused.formats.kinds import check_states, is_stored, names
from accumfused.formats.numeric import chunk_count
from accumfused.formats.shards import initialized
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
        skipped: how many steps were skipped so far: int64, shape [].
    """

    def __init__(self, owner: Owner, settings: Settings, surroundings: Surroundings, skipped: Tensor | None) -> None:
        self._owner = weakref.ref(owner)
        self.settings = settings
        self.skips = Skips(torch.zeros((), dtype=torch.int64, device="cpu") if skipped is None else skipped)
        self.last: Plan | None = None
        self.backend: Backend | None = None  # a benchmark sets it; it overrides the selection
        self.fused: weakref.WeakSet[Any] = weakref.WeakSet()  # layers whose products add to their weights' sums
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
        seed = self.settings.rounding_seed
        return self._surroundings.default_seed() if seed is None else seed

    def current(self, *, with_states: bool = True) -> Plan:
        """Returns the plan for the current parameters and states, with backend and exchange.

        Args:
            with_states: False: for a fold, which reads no states; they may be others.
        """
        owner, last = self.owner, self.last
        rules = [rule_of(owner.rules, group) for group in owner.param_groups]
        if last is not None and last.is_valid and last.rules == rules and last.unchanged(with_states=with_states):
            return last
        graphs.refuse_new_tensors({param.device for param in self.params if has_memory(param)})
        plan = build(self._owner, rules, self.settings, {id(layer.weight) for layer in self.fused})
        plan.seed = self.seed
        backend, plan.exchange = self._surroundings.select(self.settings, plan, last)
        for row in plan.rows:
            row.is_bundled = 4 * initialized(row.param).numel() < plan.exchange.bundled_bytes
        plan.backend = self.backend or backend
        plan.backend.prepare(plan)
        if self.skips.count.device != plan.device:
            self.skips = Skips(self.skips.count.to(plan.device))
        plan.skips = self.skips
        self.last = plan
        return plan

    def forget(self) -> None:
        """Outdates the plan, because state or settings were replaced: the next call makes a new one."""
        if self.last is not None:
            self.last.is_valid = False

    def release(self) -> None:
        """Lets go of the plan, and of what others keep for it; not of its exchange, on whose state processes agree."""
        last = self.last
        if last is not None:
            empty = Plan([], last.rules, 0, last.device, None, last.devices, last.dtype, is_valid=False)
            last.drop(memory=True)
            empty.backend, empty.exchange = last.backend, last.exchange
            self.last = empty

    def with_states(self, plan: Plan, grads: Grads) -> Plan:
        """Makes the state of every parameter with a gradient, in its format, and a plan with these states."""
        graphs.refuse_new_tensors({plan.device})  # a graph would keep the zeros' addresses without filling them
        state = self.owner.state
        for row, grad in zip(plan.rows, grads, strict=True):
            if grad is None:
                continue
            entries, shard = state.get(row.param) or {}, row.shard
            local, wanted = entries if shard is None else shard.parts(entries), names(row.rule, row.form)
            made, weights = local, None
            if not is_stored(row.rule, row.form, row.tensor, local, row.sum_device):
                if row.copy is not None:
                    row.copy.copy_(row.owned)
                group, tensor = self.owner.param_groups[row.group], row.tensor.to(row.sum_device)
                made, weights = state_of(row.rule, row.form, tensor, local, self.seed, group)
            elif shard is None or shard.has_placed(entries, wanted):
                continue
            if shard is not None:
                made = shard.wholes(made, entries, wanted)
            # All of it is made by now: the weights, if others belong to the state, and the state come together.
            calls = [] if weights is None else [partial(row.owned.detach().copy_, weights)]
            run([*calls, partial(entries.clear), partial(entries.update, made)])
            state[row.param] = entries
        return self.current()


def build(
    optimizer: Callable[[], Any], rules: list[type[Rule]], settings: Settings, fused: Container[int] = ()
) -> Plan:
    """Builds the plan; the backend then adds its own tables.

    Args:
        fused: ids of parameters to whose sums products add.

    Raises:
        ValueError: a group's states cannot be kept in 8 bits.
        RuntimeError: two parameters share memory; a parameter's memory is too small or read-only; this process has no
            shard of a DTensor to update.
    """
    for rule in rules:
        check_states(rule, settings)
    rows, chunks = list[Row](), 0
    for group, (rule, of_group) in enumerate(zip(rules, optimizer().param_groups, strict=True)):
        for index in range(len(of_group["params"])):
            is_fused = id(of_group["params"][index]) in fused
            rows.append(row_of(InGroup(optimizer, group, index), group, rule, settings, chunks, is_fused=is_fused))
            chunks += chunk_count(rows[-1].tensor.numel())
    params = [row.owned for row in rows]
    devices = {row.param.device for row in rows if has_memory(row.param)}
    check_memory([param for param in params if has_memory(param) and not is_freed(param) and param.numel()])
    for row in rows:  # also states of other formats, which are converted
        for value in row.entries.values():
            if isinstance(value, Tensor) and has_memory(value):
                check_size(value, "state")
    device = next((param.device for param in params if has_memory(param) and not settings.offload), HOST)
    is_double = any(row.form.dtype == torch.float64 and row.param.requires_grad for row in rows)
    dtype = torch.float64 if is_double else torch.float32
    return Plan(rows, rules, chunks, device, optimizer, devices, dtype)


def rule_of(rules: Iterable[type[Rule]], group: Mapping[str, Any]) -> type[Rule]:
    """Returns the optimizer's rule for a parameter group: the first whose flags are the group's."""
    return next(rule for rule in rules if rule.fits(group))
