"""Plans: an optimizer's current plan with its backend, exchange and states; anew whenever it is outdated."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.norm import finish_norm
from accumfused.core.plan import EMPTY, Plan, build, rule_of
from accumfused.core.protocol import Backend, Exchange, Outcome, Owner, Scaling
from accumfused.core.rows import Grads, has_memory
from accumfused.core.skips import Skips
from accumfused.formats.convert import make_state
from accumfused.formats.kinds import names
from accumfused.formats.numeric import ieee
from accumfused.rules import Rule
from accumfused.settings import Settings


@dataclass
class Prepared:
    """A plan, the backend that keeps tables for it, and the exchange of its sums and norms with other processes."""

    plan: Plan
    backend: Backend
    exchange: Exchange
    devices: set[torch.device]  # for these and for these rules the backend was selected
    rules: set[type[Rule]]
    partials: Tensor | None = None  # sums of squares of gradients from p.grad
    is_valid: bool = True  # False: the optimizer's state was replaced

    def norm(self, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        """`Backend.norm`, over all processes that share the norm."""
        if partials is None or not self.exchange.shares_norm(self.plan):
            return self.backend.norm(self.plan, grads, partials, scaling)
        self.backend.norm(self.plan, grads, partials, Scaling(self.plan.device))
        scaling = replace(scaling, found_inf=self.exchange.found_inf(scaling.found_inf))
        with ieee():
            return finish_norm(self.sum_of_squares(partials), scaling)

    def sum_of_squares(self, partials: Tensor) -> Tensor:
        """The sum of all chunks' sums of squares, over all processes that share the norm: fp64, shape []."""
        return self.exchange.sums_of_squares(self.backend, self.plan, [partials])[0]

    def cleared_partials(self, complete: bool) -> Tensor:
        """Memory for the sums of squares; zero for rows without a gradient."""
        if self.partials is None:
            self.partials = torch.zeros(self.plan.chunks, dtype=torch.float32, device=self.plan.device)
        elif not complete:
            self.partials.zero_()
        return self.partials


@dataclass(frozen=True)
class Surroundings:
    """The choices that the core leaves to others.

    Args:
        select: chooses a new plan's backend and exchange, perhaps those of the last plan again.
        default_seed: gives the seed of stochastic rounding if the settings have none.
    """

    select: Callable[[Settings, Plan, set[torch.device], Prepared | None], tuple[Backend, Exchange]]
    default_seed: Callable[[], int]


class Plans:
    """Makes the plans and the states of an optimizer.

    Args:
        owner: the optimizer; a weak reference, because the optimizer holds this object.
    """

    def __init__(self, owner: Owner, settings: Settings, surroundings: Surroundings) -> None:
        self._owner = weakref.ref(owner)
        self.settings = settings
        self.skips: Skips | None = None
        self.last: Prepared | None = None
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

    def current(self, *, with_states: bool = True) -> Prepared:
        """The plan for the current parameters and states, with backend and exchange.

        Args:
            with_states: False: for a fold, which reads no states; they may be others.
        """
        owner, known = self.owner, self.last
        groups, state, asked = owner.param_groups, owner.state, owner.state if with_states else None
        rules = [rule_of(owner.rules, group) for group in groups]
        if known is not None and known.is_valid and known.plan.rules == rules and known.plan.unchanged(groups, asked):
            return known
        devices = {param.device for param in self.params if has_memory(param)}
        graphs.refuse_new_tensors(devices)
        plan = build(groups, state, rules, self.settings)
        backend, exchange = self._surroundings.select(self.settings, plan, devices, known)
        for row in plan.rows:
            row.is_bundled = 4 * row.param.numel() < exchange.bundled_bytes
        backend = self.backend or backend
        backend.prepare(plan, groups, state)
        if self.skips is None or self.skips.count.device != plan.device:
            self.skips = Skips(plan.device)
        self.last = Prepared(plan, backend, exchange, devices, set(rules))
        return self.last

    def forget(self) -> None:
        """The optimizer's state or settings were replaced: the next call makes a new plan. The old one is freed."""
        if self.last is not None:
            self.last = replace(self.last, plan=EMPTY, partials=None, is_valid=False)

    def with_states(self, plan: Plan, grads: Grads) -> Prepared:
        """Makes the state of every parameter with a gradient, in its format, and a plan with these states."""
        graphs.refuse_new_tensors({plan.device})  # a graph would keep the zeros' addresses without filling them
        for row, grad in zip(plan.rows, grads, strict=True):
            if grad is None:
                continue
            if row.is_copy:
                row.tensor.copy_(row.owned)
            entries, shard = self.owner.state[row.param], row.shard
            own = entries if shard is None else shard.parts(entries)
            make_state(row.rule, row.form, row.tensor, own, self.seed, self.owner.param_groups[row.group])
            if shard is not None:
                shard.put(own, entries, names(row.rule, row.form))
            if row.is_copy:
                row.owned.copy_(row.tensor)
        return self.current()
