"""Watching a training run from outside: the time of each part of an update, and the memory that its gradients take.

Both watches are called with a part's name, and give the context manager that the part runs in.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn

UNTIMED_UPDATES = 3  # the first ones allocate the optimizer's state


class Watch(Protocol):
    """What the recipes are given; see Stopwatch and MemoryWatch."""

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Watches what stands in the `with` statement."""

    def accumulation_inside_backward(self, model: nn.Module) -> None:
        """Watches autograd's own accumulation, too, as the part "accumulate" of "backward"."""


class Stopwatch:
    """Sums up the time of each part of an update."""

    def __init__(self) -> None:
        self._now: defaultdict[str, float] = defaultdict(float)
        self._updates: list[dict[str, float]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self._now[part] += perf_counter() - began

    def accumulation_inside_backward(self, model: nn.Module) -> None:
        """Times the nodes of autograd's graph that store, and then add to, `p.grad`; the hooks take 1 us of each."""
        began = 0.0

        def begin(_: object) -> None:
            nonlocal began
            began = perf_counter()

        def end(*_: object) -> None:
            self._now["accumulate"] += perf_counter() - began

        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
        for node in self._nodes:  # kept: a node that nobody holds is made anew by the next forward, without hooks
            node.register_prehook(begin)
            node.register_hook(end)

    def end_update(self) -> None:
        self._updates.append(dict(self._now))
        self._now.clear()

    def times_ms(self, *parts: str) -> list[float]:
        """Of every update but the first ones, the time that these parts took together."""
        timed = self._updates[UNTIMED_UPDATES:] or self._updates
        return [1e3 * sum(update.get(part, 0.0) for part in parts) for update in timed]

    def median_ms(self, *parts: str) -> float:
        return median(self.times_ms(*parts))


class MemoryWatch:
    """The most memory that gradients and accumulators take, looked at before the first step, which makes the state."""

    def __init__(self) -> None:
        self._before: int | None = None
        self.peak_bytes = 0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self._before is None:
            self._before = live_bytes()
        yield
        if part in ("backward", "accumulate", "clip"):
            self.peak_bytes = max(self.peak_bytes, live_bytes() - self._before)

    def accumulation_inside_backward(self, model: nn.Module) -> None:
        pass


def live_bytes() -> int:
    """What all tensors of this process but integers of 64 bits hold, whoever owns them, so that none can be forgotten.

    A tensor that wraps others has no storage; those that it wraps are found themselves.
    """
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dtype != torch.int64]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
