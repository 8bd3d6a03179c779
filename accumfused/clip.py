"""Policies of clipping: what the settings `clip=` and `skip_above=` take instead of one number, and groups' limits.

Here are their numbers, on the host, and their checks; core/coefficients.py applies them, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accumfused.arguments import checked_whole

__all__ = ["PerTensor", "RunningMean", "ZScore"]

LIMIT = "max_grad_norm"  # the key of a parameter group


def check_limit(value: Any, name: str, off: str) -> None:
    """Refuses anything but a positive number; `off` tells the user how to switch clipping off."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}; {off}")
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}; {off}")


@dataclass(frozen=True)
class Clip:
    """The base of the policies in place of one limit: each gradient is multiplied by `min(1, limit / (norm + 1e-6))`.

    The policies differ in the limit, and in the gradients that share a norm.
    """


@dataclass(frozen=True)
class PerTensor(Clip):
    """Each parameter's gradient has a norm; the limit is common.

    Args:
        max_norm: the limit, > 0.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_limit(self.max_norm, "max_norm", "leave clip out to clip nothing")


@dataclass(frozen=True)
class ZScore(Clip):
    """One norm for all gradients, clipped where it lies far above the norms before.

    ZClip (Kumar et al. 2025, arXiv:2504.02507). With the exponential mean m and standard deviation s of the norms, and
    z = (norm - m) / (s + 1e-6), a norm with z > threshold gets the limit m + threshold^2 / z * s. Mean and variance
    take up the clipped norms; they lie on the device, and in checkpoints. Skipped steps and norms of 0 do not count.

    Args:
        threshold: in standard deviations, > 0.
        decay: of mean and variance, > 0 and < 1.
        warmup: the number, >= 2, of norms that are not clipped: mean and variance begin as theirs.
    """

    threshold: float = 2.5
    decay: float = 0.97
    warmup: int = 25

    def __post_init__(self) -> None:
        check_limit(self.threshold, "threshold", "leave clip out to clip nothing")
        _check_history(self.decay, self.warmup, 2)  # one norm has no variance


@dataclass(frozen=True)
class RunningMean:
    """A limit for `skip_above`: a multiple of the exponential mean of the norms before clipping.

    The mean lies on the device, and in checkpoints. Skipped steps and norms of 0 do not count.

    Args:
        times: the multiple, > 1.
        decay: of the mean, > 0 and < 1.
        warmup: the number, >= 1, of norms before the first step that may be skipped: the mean begins as theirs.
    """

    times: float = 4.0
    decay: float = 0.97
    warmup: int = 25

    def __post_init__(self) -> None:
        if not (isinstance(self.times, (int, float)) and self.times > 1):
            raise ValueError(f"times must be a number > 1, got {self.times!r}: most steps would be skipped")
        _check_history(self.decay, self.warmup, 1)


def _check_history(decay: Any, warmup: Any, fewest: int) -> None:
    if not (isinstance(decay, float) and 0.0 < decay < 1.0):
        raise ValueError(f"decay must be a number between 0 and 1, got {decay!r}")
    checked_whole(warmup, "warmup", fewest)


def check_policies(clip: Any, max_grad_norm: float | None, skip_above: Any, nonfinite: str | None) -> None:
    """Refuses values that are no policies, and policies that do not go together."""
    if clip is not None and not isinstance(clip, (PerTensor, ZScore)):  # those that core/coefficients.py applies
        raise TypeError(f"clip must be af.clip.PerTensor(...), af.clip.ZScore(...) or None, got {clip!r}")
    if clip is not None and max_grad_norm is not None:
        raise ValueError(f"clip={clip} and max_grad_norm={max_grad_norm} are both given; give one of them")
    if skip_above is None:
        return
    if not isinstance(skip_above, RunningMean):
        check_limit(skip_above, "skip_above", "None is off; af.clip.RunningMean(times=4) is relative")
    if nonfinite not in (None, "skip", "drop"):
        raise ValueError(
            f"skip_above skips steps, and nonfinite={nonfinite!r} skips none; leave one of them out, or use "
            "nonfinite='skip'"
        )


def group_limits(
    clip: Clip | None, max_grad_norm: float | None, groups: Sequence[Mapping[str, Any]]
) -> list[float] | None:
    """Returns the limit of each parameter group; None: no group has its own.

    Raises:
        ValueError, TypeError: a limit that is no number > 0; a group without one; a policy without limits of groups.
    """
    of_groups = [group.get(LIMIT) for group in groups]
    if all(limit is None for limit in of_groups):
        return None
    if clip is not None:
        raise ValueError(
            f"a parameter group has a max_grad_norm, and clip={clip} does not clip groups; leave one of them out"
        )
    limits = [max_grad_norm if limit is None else limit for limit in of_groups]
    for index, limit in enumerate(limits):
        if limit is None:
            raise ValueError(
                f"parameter group {index} has no max_grad_norm, and others have; give it one (math.inf is no limit), "
                "or give the optimizer a max_grad_norm, which is for groups without their own"
            )
        check_limit(limit, f"max_grad_norm of parameter group {index}", "math.inf is no limit")
    return [limit for limit in limits if limit is not None]
