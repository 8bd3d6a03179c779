"""How much longer a run takes, from what its suites have taken so far and what they take elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Seconds of a whole run, about: of the CPU's suites on two cores, of the GPU's on one card with its host.
TYPICAL = {"tail": 75, "verbs": 12, "accumulate": 15, "window": 36, "small": 20, "lean": 21, "train": 15,
           "backward": 90, "zeros": 5, "scale": 23, "memory": 13, "processes": 44, "numerics": 18}  # fmt: skip
TYPICAL_GPU = {"tail": 60, "verbs": 30, "window": 40, "small": 30, "lean": 40, "accumulate": 30, "graph": 30,
               "memory": 20, "train": 40, "backward": 30}  # fmt: skip
_OTHER = 30  # a suite that is in neither
_QUICK = 0.1  # of a whole one


def remaining(left: Sequence[str], taken: Mapping[str, float], *, on_gpu: bool, quick: bool) -> float:
    """Seconds for the suites that are left.

    Args:
        taken: suite -> seconds, of those that are done: how much faster or slower than usual this machine is.
    """
    typical = TYPICAL_GPU if on_gpu else TYPICAL
    factor = _QUICK if quick else 1.0
    usual = sum(typical.get(name, _OTHER) for name in taken)
    pace = sum(taken.values()) / usual if usual else factor
    return pace * sum(typical.get(name, _OTHER) for name in left)


def line(name: str, names: Sequence[str], taken: Mapping[str, float], *, on_gpu: bool, quick: bool) -> str:
    """suite k of n: name, about m min left: a first guess, then at the pace of the suites that are done."""
    index = names.index(name)
    seconds = remaining(names[index:], taken, on_gpu=on_gpu, quick=quick)
    left = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(10.0, round(seconds, -1)):.0f} s"
    told = "at the pace so far" if taken else "a first guess, from an idle machine"
    return f"suite {index + 1} of {len(names)}: {name}, about {left} left ({told})"
