"""Timing: all variants in turn, round after round, so that what disturbs the machine disturbs them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.ceilings import MIXES, Ceilings
from bench.clock import Clock, HostClock


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Args:
        name: as it stands in the table.
        run: what is timed.
        setup: runs before each `run`, untimed.
        passes: the mixes (see `bench.ceilings.MIXES`) of the passes over all parameters that the work consists of;
            None where they are not known.
    """

    name: str
    run: Callable[[], Any]
    setup: Callable[[], Any] | None = None
    passes: tuple[str, ...] | None = None

    def whole(self) -> None:
        if self.setup is not None:
            self.setup()
        self.run()


@dataclass
class Timing:
    """What `interleave` measured for a variant, warm-up left out."""

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    at_ceiling: list[float] = field(default_factory=list)  # per parameter, at the ceilings of the same round
    host_seconds: float = 0.0  # of the last warm-up

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def times_as_fast_as(self, other: Timing) -> float:
        """The median of the ratios within a round: a shared machine's memory may change its speed between rounds."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))

    def share_of_ceiling(self, parameters: int) -> float | None:
        """The median over the rounds, each against the ceilings of its round."""
        if not self.at_ceiling:
            return None
        pairs = zip(self.at_ceiling, self.seconds, strict=True)
        return statistics.median(at_ceiling * parameters / seconds for at_ceiling, seconds in pairs)


BUDGET = 5.0  # seconds of a table, after which
_ENOUGH = 3  # rounds are enough
_WARM_CALLS = 200


def interleave(
    variants: Sequence[Variant], rounds: int, ceilings: Ceilings | None = None, clock: Clock | None = None,
    *, of_host: bool = False, budget: float = BUDGET,
) -> list[Timing]:  # fmt: skip
    """Runs every variant once per round, after the clock's warm-up rounds, which are not counted.

    Each round begins with another variant, so that none always follows the same one. The ceilings of the variants'
    mixes are measured in the same rounds.

    Args:
        rounds: tables that take longer than the budget, in seconds, get fewer, though three at least.
        of_host: times how long the host is busy with each, in place of the work: cold, because others came between.
    """
    timings = [Timing(variant) for variant in variants]
    mixes = sorted({mix for variant in variants for mix in variant.passes or ()})
    clock = clock or HostClock()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    try:
        for number in range(-clock.warm_ups, rounds):
            if number >= _ENOUGH and time.perf_counter() - begun > budget:
                break
            first = number % len(timings)
            for timing in timings[first:] + timings[:first]:
                if timing.variant.setup is not None:
                    timing.variant.setup()
                if number < 0:
                    timing.host_seconds = clock.host_seconds(timing.variant.run)
                elif of_host:
                    timing.seconds.append(clock.host_seconds(timing.variant.run))
                else:
                    timing.seconds.append(clock.seconds(timing.variant.run, timing.host_seconds))
            if ceilings is not None and number >= 0:
                rates = ceilings.measure(mixes)
                for timing in timings:
                    if rates and timing.variant.passes:
                        timing.at_ceiling.append(sum(MIXES[mix].bytes / rates[mix] for mix in timing.variant.passes))
    finally:
        if was_enabled:
            gc.enable()
    return timings


def back_to_back(variants: Sequence[Variant], clock: Clock) -> list[Timing]:
    """Times how long the host is busy with a call that follows others of its own: Python's code and data are cached.

    Each variant makes 200 calls after a first one that does not count; fewer, where all would take longer than seconds.
    """
    for variant in variants:
        variant.whole()
    begun = time.perf_counter()
    for variant in variants:
        clock.host_seconds(variant.run)
    calls = int(BUDGET / (time.perf_counter() - begun))
    timings = [Timing(variant) for variant in variants]
    for timing in timings:
        for _ in range(max(_ENOUGH, min(calls, _WARM_CALLS)) + 1):
            if timing.variant.setup is not None:
                timing.variant.setup()
            timing.seconds.append(clock.host_seconds(timing.variant.run))
        del timing.seconds[0]
    return timings
