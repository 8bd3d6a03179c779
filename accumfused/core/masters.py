"""Notices parameters that others have overwritten, because their remainders no longer belong to them.

`model.load_state_dict`, an exponential moving average that is swapped in, `p.copy_()`: each raises the parameter's
version counter, as our own steps do. The counter does not name the written elements, and a remainder cannot be
compared with its parameter, so the whole remainder is dropped. A write through `p.data` does not raise the counter: the
old remainder then errs by at most half a unit of bfloat16. (Each step compares an fp32 master element by element.)
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from accumfused.core.plan import Plan
from accumfused.formats import shards
from accumfused.formats.kinds import REMAINDER
from accumfused.warn import warn

State = Mapping[Tensor, Mapping[str, Any]]

_MANY = 4  # steps in a row


class Masters:
    """The versions of all parameters with a remainder, as they were after the last step.

    A new tracker trusts the remainders that it finds, because a checkpoint may load parameters after them.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._params: list[Tensor] = []
        self._versions: list[int] = []
        self._remainders: list[Tensor] = []
        self._drops: dict[int, int] = {}  # per parameter's id: refreshes in a row that dropped its remainder
        self._has_warned = False

    def refresh(self, plan: Plan) -> None:
        """Drops the remainder of every parameter that others have written since our last step."""
        if plan is not self._plan:
            self._follow(plan)
        drops = dict[int, int]()
        for index in self._written_since():
            self._remainders[index].zero_()
            own = id(self._params[index])
            drops[own] = self._drops.get(own, 0) + 1
        self._drops = drops

    def written(self) -> None:
        """Notes that our own step has written the parameters."""
        self._versions = [param._version for param in self._params]

    def watch(self) -> None:
        """After a step: warns, once, if a remainder is dropped before every step."""
        if self._has_warned or max(self._drops.values(), default=0) < _MANY:
            return
        warn(
            f"a parameter was written from outside before each of the last {_MANY} steps (by Embedding(max_norm=...), "
            "clamp_(), an average that is swapped in and out?), and each time all of its master weight was derived "
            "from it again, so steps below half a unit of bfloat16 are lost; master_weights='fp32' keeps every "
            "element that is still rounded to its parameter"
        )
        self._has_warned = True

    def settle(self) -> None:
        """Drops the remainders of overwritten parameters now, before the state is saved, copied or converted."""
        for index in self._written_since():
            self._remainders[index].zero_()
            self._versions[index] = self._params[index]._version

    def out_of_date(self) -> set[int]:
        """Ids of overwritten parameters: their remainders no longer belong to them."""
        return {id(self._params[index]) for index in self._written_since()}

    def see(self, state: State, but: Container[Tensor] = ()) -> None:
        """Takes the remainders from an optimizer's state: of a copy, after a checkpoint, or of new states.

        Each remainder belongs to the version of its parameter that was noted last, or to the current one.

        Args:
            but: parameters to leave out, because a checkpoint has brought their remainders before them.
        """
        known = {id(param): version for param, version in zip(self._params, self._versions, strict=True)}
        own = [(param, entries) for param, entries in state.items() if isinstance(param, Tensor) and param not in but]
        found = [(param, shards.local(entries[REMAINDER])) for param, entries in own if REMAINDER in entries]
        self._params = [param for param, _ in found]
        self._versions = [known.get(id(param), param._version) for param in self._params]
        self._remainders, self._plan = [remainder for _, remainder in found], None

    def _written_since(self) -> list[int]:
        versions = [param._version for param in self._params]
        if versions == self._versions:
            return []
        return [index for index, known in enumerate(self._versions) if versions[index] != known]

    def _follow(self, plan: Plan) -> None:
        seen = zip(self._params, self._versions, self._remainders, strict=True)
        known = {id(param): (param, version, remainder) for param, version, remainder in seen}
        self._plan, self._params, self._versions, self._remainders = plan, [], [], []
        for param, storage in ((row.param, row.storage) for row in plan.rows):
            if storage is None or storage.master is None or storage.master.is_floating_point():
                continue
            _, version, _ = known.pop(id(param), (param, param._version, storage.master))
            self._params.append(param)
            self._versions.append(version)
            self._remainders.append(storage.master)
        own = {id(param) for param in plan.params}
        for param, version, remainder in known.values():  # their states must be converted first
            if id(param) in own:
                self._params.append(param)
                self._versions.append(version)
                self._remainders.append(remainder)
