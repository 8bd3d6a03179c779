"""From what was seen to causes: each function looks for some, and says in which window and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from accumfused.auditing.evidence import MicroBatch, Window, is_close

Found = dict[str, str]  # causes with the detail that shows them
_UNEXPLAINED = 0.02  # of the step's gradient; sums in 16 bits stay below


def expected_of(windows: Sequence[Window]) -> int:
    """The number of micro-batches in most windows."""
    counts = Counter(len(window.micro_batches) // window.world for window in windows)
    return max(counts, key=lambda count: (counts[count], count)) if counts else 1


def diagnose(windows: Sequence[Window], left: Sequence[MicroBatch], steps: int | None) -> Found:
    """The causes that one optimizer's windows show.

    Args:
        left: micro-batches after the last step.
        steps: gradient_accumulation_steps; None: as in most windows.
    """
    found: Found = {}
    expected = steps or expected_of(windows)
    is_coupled = any("negatives" in each.causes for window in windows for each in window.micro_batches)
    short = [window for window in windows if window.arrived(expected) < expected]
    has_remainders = 2 * len(short) <= len(windows)  # those of epochs
    for index, window in enumerate(windows):
        # Without a number given, windows may have any length, as long as their gradients have the right size.
        own_length = window.arrived(expected) if steps is None and window.scale(expected) is not None else expected
        own = _in_window(window, own_length, has_remainders=has_remainders, is_coupled=is_coupled)
        for cause, detail in own.items():
            found.setdefault(cause, f"step {index + 1}: {detail}")
    if found.keys() & {"not_divided", "divided_twice"}:
        found.pop("factor", None)  # of a shorter window
    if left and windows and not any(each.is_used for each in left) and "remainder_leaked" not in found:
        found.setdefault("remainder_dropped", f"{len(left)} after the last step")
    return found


def _in_window(window: Window, expected: int, *, has_remainders: bool, is_coupled: bool) -> Found:
    found = dict.fromkeys(sorted(window.flags), "seen as it happened")
    everyone = window.micro_batches
    if len(everyone) > 1:
        for is_seen, cause in (
            (any(each.has_batch_norm for each in everyone), "batch_norm"),
            (any(each.is_random for each in everyone), "dropout"),
        ):
            if is_seen:
                found[cause] = "in forward"
        for cause in sorted(set().union(*(each.causes for each in everyone))):
            found[cause] = "seen in its loss"
    found |= _order(window, expected, has_remainders=has_remainders)
    if window.is_partial or found.keys() & {"clip", "unscale", "remainder_leaked", "zero_grad"}:
        return found
    if is_coupled and not all(each.term is not None and each.term.is_loss for each in everyone):
        return found  # its outermost sum may have other terms than samples
    if window.residual > _UNEXPLAINED:
        return found | {"unexplained": f"{window.residual:.1%} of the gradient"}
    found |= _weights(window)
    return found if "uneven" in found else found | _size(window, expected, found)


def _order(window: Window, expected: int, *, has_remainders: bool) -> Found:
    """Micro-batches that are lost, or are there and should not be."""
    found: Found = {}
    arrived = window.arrived(expected)
    # What is clipped or unscaled within a window may be as small as what is lost.
    lost = 0 if window.flags & {"clip", "unscale"} else sum(window.lost) // window.world
    if abs(window.stale) > 0.01:
        found["zero_grad"] = f"{window.stale:.2f} times the gradient from before the window is still there"
    if lost and arrived - lost >= expected:
        found["remainder_dropped"] = f"{lost} before this window"
    elif lost:
        found["zero_grad"] = f"the first {lost} of {arrived} are lost"
    elif arrived > expected:
        found["remainder_leaked"] = f"{arrived} micro-batches where {expected} belong"
    elif arrived < expected and not has_remainders:
        found["never_arrived"] = f"{arrived} of {expected}"
    return found


def _weights(window: Window) -> Found:
    """Whether all terms of the window count alike."""
    kept = window.kept
    if not all(each.is_known for _, each in kept) or _alike([share for share, _ in kept]):
        return {}
    counts = [each.count for _, each in kept]
    of_ranks = [[pair for pair in kept if pair[1].rank == rank] for rank in range(window.world)]
    detail = f"counts from {min(counts):g} to {max(counts):g}"
    if window.world > 1 and all(_alike([share for share, _ in own]) for own in of_ranks):
        return {"ranks": detail}
    if _alike([share * each.count for share, each in kept]):
        return {"mean_of_means": detail}
    ratios = [share for share, _ in kept]
    return {"uneven": f"weights from {min(ratios):.3g} to {max(ratios):.3g}"}


def _size(window: Window, expected: int, found: Found) -> Found:
    """Whether the step's gradient is that of a mean over the window, up to factors of the loss itself."""
    ratio, arrived = window.ratio, window.arrived(expected)
    if any(each.term is None for each in window.micro_batches):
        return {}
    allowed = window.scales(expected)
    if any(is_close(ratio, scale) for scale in allowed):
        return {}
    scaled = [ratio / scale for scale in allowed]
    detail = f"{ratio / allowed[0]:.4g} times that of the large batch"

    def fits(*targets: float) -> bool:
        return any(is_close(one, target) for one in scaled for target in targets)

    if arrived < expected and fits(arrived / expected):
        return {} if "never_arrived" in found else {"remainder_under_weighted": f"{arrived} of {expected}: {detail}"}
    if any(fits(*each.term.scales) for each in window.micro_batches[:1] if each.term is not None):
        return {"unscale": detail}
    if window.world > 1 and fits(window.world, 1 / window.world):
        return {"ranks": detail}
    if fits(arrived, expected):
        return {"not_divided": detail}
    if fits(1 / arrived, 1 / expected):
        return {"divided_twice": detail}
    return {"factor": detail}


def _alike(numbers: Sequence[float]) -> bool:
    return all(is_close(number, numbers[0]) for number in numbers)
