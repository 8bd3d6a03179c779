"""The states of all random generators that a model may draw from: Python's, NumPy's, and torch's on each device."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
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
        self._ways: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
        ]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            self._ways.append((numpy.random.get_state, numpy.random.set_state))
        for device in sorted({str(tensor.device) for tensor in used if not tensor.is_cpu}):
            self._ways.append(_on(torch.device(device)))

    def states(self) -> list[Any]:
        """The states now."""
        return [read() for read, _ in self._ways]

    def restore(self, states: list[Any]) -> None:
        """Sets the states."""
        for (_, write), state in zip(self._ways, states, strict=True):
            write(state)

    def tensors(self) -> list[torch.Tensor]:
        """torch's own states now, which a forward pass changes if it draws."""
        return [state for state in self.states() if isinstance(state, torch.Tensor)]


def _on(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    try:
        module: Any = torch.get_device_module(device)
        module.get_rng_state(device)
    except Exception as error:
        raise RuntimeError(
            f"the random generator of {device} cannot be read ({error}), so one batch and its micro-batches would draw "
            "other numbers; audit a copy of the model on a CPU"
        ) from error
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
