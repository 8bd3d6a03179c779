"""Notices parameters that were overwritten from outside, whose masters are then not theirs any more.

`model.load_state_dict`, an exponential moving average that is swapped in, `p.copy_()`: each raises the parameter's
version counter, as our own steps do. A write through `p.data` does not. A remainder is then at worst half a unit off,
and an fp32 master brings its own value back; only where `p.data` is other memory is it compared.
"""

from __future__ import annotations

from torch import Tensor

from accumfused.formats import Storage
from accumfused.numeric import ieee
from accumfused.plan import Plan
from accumfused.state import still_halved


class Masters:
    """The versions of all parameters with a master, as they were after the last step.

    A new one takes remainders for what they should be: those of a checkpoint, say, whose parameters may come later. An
    fp32 master is compared with its parameter: where it is not rounded to that, it is out of date.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._rows: list[int] = []
        self._params: list[Tensor] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []

    def refresh(self, plan: Plan) -> None:
        """Derives the master of every parameter again that was written since."""
        if plan is not self._plan:
            self._follow(plan)
        versions = [param._version for param in self._params]
        if versions == self._versions:
            return
        for row, known, now in zip(self._rows, self._versions, versions, strict=True):
            if known != now:
                _derive(plan, row)
        self.written()

    def written(self) -> None:
        """The parameters are those of our own step."""
        self._versions = [param._version for param in self._params]

    def settle(self) -> None:
        """Drops the remainders of overwritten parameters now, for who saves or copies the state before the next step.

        An fp32 master stays: it is compared where it is used, and serves again if its weights come back.
        """
        if self._plan is None:
            return
        for index, (row, param) in enumerate(zip(self._rows, self._params, strict=True)):
            if self._versions[index] != param._version and not _is_whole(self._plan.storages[row]):
                _derive(self._plan, row)
                self._versions[index] = param._version

    def _follow(self, plan: Plan) -> None:
        seen = zip(self._params, self._versions, self._addresses, strict=True)
        known = {id(param): (version, address) for param, version, address in seen}
        rows = zip(plan.formats, plan.storages, strict=True)
        self._plan = plan
        self._rows = [row for row, (form, storage) in enumerate(rows) if form.master is not None and storage]
        self._params = [plan.params[row] for row in self._rows]
        self._addresses = [plan.owned[row].data_ptr() for row in self._rows]
        self._versions = []
        for row, param, address in zip(self._rows, self._params, self._addresses, strict=True):
            version, before = known.get(id(param), (param._version, None))
            if address != before and _is_whole(plan.storages[row]):
                _derive(plan, row)
            self._versions.append(version)


def _is_whole(storage: Storage | None) -> bool:
    """Whether the master is an fp32 one beside the parameter, not a remainder of it."""
    return storage is not None and storage.master is not None and storage.master.is_floating_point()


def _derive(plan: Plan, row: int) -> None:
    param, storage = plan.owned[row], plan.storages[row]
    assert storage is not None
    assert storage.master is not None
    if _is_whole(storage):
        with ieee():
            storage.master.copy_(still_halved(storage.master, param))
    else:
        storage.master.zero_()
