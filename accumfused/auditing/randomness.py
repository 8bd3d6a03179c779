"""The states of all random generators that a model may draw from: Python's, NumPy's, and torch's on each device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Generators:
    """All generators; `states` reads them, `restore` writes them back.

    Args:
        used: tensors of the model and its data.

    Raises:
        RuntimeError: the generator of a device cannot be read.
    """

    def __init__(self, used: Iterable[torch.Tensor]) -> None:
        self._devices = sorted({str(tensor.device) for tensor in used if not tensor.is_cpu})
        try:
            self.tensors()
        except Exception as error:
            raise RuntimeError(
                f"a random generator of {', '.join(self._devices)} cannot be read ({error}), so one batch and its "
                "micro-batches would draw other numbers; audit a copy of the model on a CPU"
            ) from error

    def states(self) -> list[Any]:
        """The states now."""
        numpy: Any = sys.modules.get("numpy")
        return [random.getstate(), None if numpy is None else numpy.random.get_state(), *self.tensors()]

    def restore(self, states: list[Any]) -> None:
        """Sets the states."""
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
        torch.set_rng_state(states[2])
        for device, state in zip(self._devices, states[3:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def tensors(self) -> list[torch.Tensor]:
        """torch's own states now, which a forward pass changes if it draws."""
        on_devices = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
        return [torch.get_rng_state(), *on_devices]
