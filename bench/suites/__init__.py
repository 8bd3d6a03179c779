"""The suites, one file each. A suite takes a Bench and returns its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.ceilings import Ceilings
from bench.report import Table


@dataclass
class Bench:
    """What every suite is given.

    Args:
        quick: tiny sizes, to see that everything runs; the figures mean nothing.
        rounds: of the interleaved variants on the large shapes, after one warm-up round.
    """

    ceilings: Ceilings
    quick: bool = False
    rounds: int = 9


Suite = Callable[[Bench], list[Table]]


def all_suites() -> dict[str, Suite]:
    """Name -> suite, in the order in which they run."""
    from bench.suites import memory, scale, small, tail, verbs, window, zeros

    return {
        "tail": tail.run,
        "verbs": verbs.run,
        "window": window.run,
        "small": small.run,
        "zeros": zeros.run,
        "scale": scale.run,
        "memory": memory.run,
    }
