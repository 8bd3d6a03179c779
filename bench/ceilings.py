"""The machine's own rate for each mix of reads and writes: what a pass over memory can be compared with.

A read-only pass, one that overwrites and one that reads and writes several streams reach very different rates (46 GB/s
against 21 on one machine), so every verb has a ceiling of its own mix. The loops are in ceiling.cpp. A GPU's ceiling is
a copy of as many bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.clock import Clock, HostClock


@dataclass(frozen=True)
class Mix:
    """Bytes that a pass reads and writes per parameter."""

    read: int
    written: int
    meaning: str

    @property
    def bytes(self) -> int:
        return self.read + self.written


MIXES = {
    "read": Mix(4, 0, "the norm of fp32 gradients"),
    "scale": Mix(4, 4, "fp32 gradients rewritten: clip, unscale"),
    "accumulate": Mix(8, 4, "fp32 gradients into fp32 accumulators"),
    "accumulate_bf16": Mix(6, 4, "16-bit gradients into fp32 accumulators"),
    "overwrite_bf16": Mix(2, 4, "first 16-bit gradients: accumulators only overwritten (non-temporal stores)"),
    "narrow_bf16": Mix(4, 2, "fp32 parameters copied to bf16 ones (non-temporal stores)"),
    "step": Mix(16, 12, "AdamW: gradient, parameter and two states read, three written"),
    "step_rewriting_grad": Mix(16, 16, "the same with the gradient rewritten: torch's fused step with grad_scale"),
}


def moved_bytes(passes: Sequence[str]) -> int:
    return sum(MIXES[name].bytes for name in passes)


def seconds_at(rates: Mapping[str, float], passes: Sequence[str] | None) -> float | None:
    """What these passes take per parameter at these rates; None where one is not known."""
    if not passes or not all(mix in rates for mix in passes):
        return None
    return sum(MIXES[mix].bytes / rates[mix] for mix in passes)


class Loops(Protocol):
    """Streaming loops over one size of streams; several for each mix."""

    elements: int
    count: int

    def run(self, mix: str, loop: int) -> None:
        """One pass of a mix by one of its loops."""


class Ceilings:
    """Times the loops; where they cannot be made `reason` says why.

    Args:
        make: makes the loops, or raises RuntimeError.
    """

    def __init__(self, make: Callable[[], Loops], clock: Clock | None = None) -> None:
        self.reason: str | None = None
        self._clock = clock or HostClock()
        self._seconds: dict[str, list[float]] = {}
        self._loop: dict[str, int] = {}
        self._loops: Loops | None = None
        try:
            self._loops = make()
        except RuntimeError as error:
            self.reason = str(error)

    def measure(self, mixes: Sequence[str]) -> dict[str, float]:
        """Times each mix once more, with the loop that was the fastest when the mix was met first.

        Returns:
            Mix -> bytes a second, this time; empty where there are no loops.
        """
        rates: dict[str, float] = {}
        if self._loops is None:
            return rates
        for mix in mixes:
            if mix not in self._loop:
                self._loop[mix] = self._fastest_loop(self._loops, mix)
                self._seconds[mix] = []
            seconds = self._time(self._loops, mix, self._loop[mix])
            self._seconds[mix].append(seconds)
            rates[mix] = MIXES[mix].bytes * self._loops.elements / seconds
        return rates

    def best_rates(self) -> dict[str, float]:
        """Mix -> the best so far, in bytes a second."""
        return self._rates({mix: min(seconds) for mix, seconds in self._seconds.items()})

    def median_rates(self) -> dict[str, float]:
        return self._rates({mix: statistics.median(seconds) for mix, seconds in self._seconds.items()})

    def _rates(self, seconds: Mapping[str, float]) -> dict[str, float]:
        assert self._loops is not None or not seconds
        elements = self._loops.elements if self._loops is not None else 0
        return {mix: MIXES[mix].bytes * elements / taken for mix, taken in seconds.items()}

    def _fastest_loop(self, loops: Loops, mix: str) -> int:
        rounds = [[self._time(loops, mix, loop) for loop in range(loops.count)] for _ in range(4)]
        return min(range(loops.count), key=lambda loop: min(seconds[loop] for seconds in rounds))

    def _time(self, loops: Loops, mix: str, loop: int) -> float:
        return self._clock.seconds(lambda: loops.run(mix, loop))
