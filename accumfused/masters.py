"""Notices parameters that were overwritten from outside, whose masters are then not theirs any more.

`model.load_state_dict`, an exponential moving average that is swapped in, `p.copy_()`: each raises the parameter's
version counter, as our own steps do. A write through `p.data` does not. A remainder is then at worst half a unit off,
and an fp32 master brings its own value back; only where `p.data` is other memory is it compared.

The counter does not tell which elements were written. An fp32 master keeps those that are still rounded to their
parameter; a remainder cannot be compared, and is dropped whole.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from torch import Tensor

from accumfused.numeric import ieee
from accumfused.plan import Plan
from accumfused.state import still_halved
from accumfused.warn import warn

_MANY = 4  # steps in a row


class _Row(NamedTuple):
    owned: Tensor  # this process's part of the parameter
    master: Tensor
    address: int  # of the part

    @property
    def is_whole(self) -> bool:
        """Whether the master is an fp32 one beside the parameter, not a remainder of it."""
        return self.master.is_floating_point()

    def derive(self) -> None:
        if not self.is_whole:
            self.master.zero_()
            return
        with ieee():
            self.master.copy_(still_halved(self.master, self.owned))


class Masters:
    """The versions of all parameters with a master, as they were after the last step.

    A new one takes remainders for what they should be: those of a checkpoint, say, whose parameters may come later. An
    fp32 master is compared with its parameter: where it is not rounded to that, it is out of date.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._params: list[Tensor] = []
        self._versions: list[int] = []
        self._rows: list[_Row] = []
        self._drops: dict[int, int] = {}  # by the parameter's id: refreshes in a row that dropped its remainder
        self._has_warned = False

    def refresh(self, plan: Plan) -> None:
        """Derives the master of every parameter again that was written since."""
        if plan is not self._plan:
            self._follow(plan)
        drops = dict[int, int]()
        for index in self._written_since():
            self._rows[index].derive()
            if not self._rows[index].is_whole:
                own = id(self._params[index])
                drops[own] = self._drops.get(own, 0) + 1
        self._drops = drops
        self.written()

    def written(self) -> None:
        """The parameters are those of our own step."""
        self._versions = [param._version for param in self._params]

    def watch(self) -> None:
        """After a step: warns, once, where a remainder is dropped before every step."""
        if self._has_warned or max(self._drops.values(), default=0) < _MANY:
            return
        self._has_warned = True
        warn(
            f"a parameter was written from outside before each of the last {_MANY} steps (by Embedding(max_norm=...), "
            "clamp_(), an average that is swapped in and out?), and each time all of its master weight was derived "
            "from it again, so steps below half a unit of bfloat16 are lost; master_weights='fp32' keeps every "
            "element that is still rounded to its parameter"
        )

    def settle(self) -> None:
        """Drops the remainders of overwritten parameters now, for who saves, copies or converts the state.

        An fp32 master stays: it is compared where it is used, and serves again if its weights come back.
        """
        for index in self._written_since():
            if not self._rows[index].is_whole:
                self._rows[index].derive()
                self._versions[index] = self._params[index]._version

    def out_of_date(self) -> set[int]:
        """Ids of overwritten parameters, whose remainders are not theirs any more."""
        return {id(self._params[index]) for index in self._written_since() if not self._rows[index].is_whole}

    def forget(self, loaded: Container[Tensor]) -> None:
        """A checkpoint has brought masters of these, whose parameters may come later; others are what they were."""
        kept = [index for index, param in enumerate(self._params) if param not in loaded]
        self._params = [self._params[index] for index in kept]
        self._versions = [self._versions[index] for index in kept]
        self._rows, self._plan = [self._rows[index] for index in kept], None

    def _written_since(self) -> list[int]:
        versions = [param._version for param in self._params]
        if versions == self._versions:
            return []
        return [index for index, known in enumerate(self._versions) if versions[index] != known]

    def _follow(self, plan: Plan) -> None:
        seen = zip(self._params, self._versions, self._rows, strict=True)
        known = {id(param): (param, version, row) for param, version, row in seen}
        self._plan, self._params, self._versions, self._rows = plan, [], [], []
        for param, owned, storage in zip(plan.params, plan.owned, plan.storages, strict=True):
            if storage is None or storage.master is None:
                continue
            row = _Row(owned, storage.master, owned.data_ptr())
            _, version, before = known.pop(id(param), (param, param._version, None))
            if row.is_whole and (before is None or before.address != row.address):
                row.derive()
            self._params.append(param)
            self._versions.append(version)
            self._rows.append(row)
        for param, version, row in known.values():  # whose state is to be converted first
            if param._version != version and not row.is_whole:
                row.derive()
