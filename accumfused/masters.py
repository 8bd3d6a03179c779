"""Notices parameters that were overwritten from outside, whose masters are then not theirs any more.

`model.load_state_dict`, an exponential moving average that is swapped in, `p.copy_()`: each raises the parameter's version
counter, as our own steps do. (A write through `p.data` does not. A remainder then is at worst half a unit off; an fp32
master brings its own value back.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accumfused.formats import Storage, Weights
from accumfused.plan import Plan


class Masters:
    """The versions of all parameters with a master, as they were after the last step.

    A new one takes the masters for what they should be: those of a checkpoint, say, whose parameters may be loaded later.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._rows: list[int] = []
        self._params: list[Tensor] = []
        self._versions: list[int] = []

    def refresh(self, plan: Plan) -> None:
        """Derives the master of every parameter again that was written since; the first time, all is as it should be."""
        if plan is not self._plan:
            seen = {id(param): version for param, version in zip(self._params, self._versions, strict=True)}
            self._plan = plan
            rows = zip(plan.formats, plan.storages, strict=True)
            self._rows = [row for row, (form, storage) in enumerate(rows) if form.master is not None and storage]
            self._params = [plan.params[row] for row in self._rows]
            self._versions = [seen.get(id(param), param._version) for param in self._params]
        versions = [param._version for param in self._params]
        if versions == self._versions:
            return
        for row, known, now in zip(self._rows, self._versions, versions, strict=True):
            if known != now:
                storage = plan.storages[row]
                assert storage is not None and storage.master is not None
                _derive(plan.formats[row].weights, plan.params[row], storage)
        self.written()

    def written(self) -> None:
        """The parameters are those of our own step."""
        self._versions = [param._version for param in self._params]


def _derive(weights: Weights, param: Tensor, storage: Storage) -> None:
    master: Any = storage.master
    if weights in (Weights.BFLOAT16_MASTER, Weights.FLOAT16_MASTER):
        # Where the parameter is still the master's, so is the master.
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.detach().float()))
    else:
        master.zero_()
