"""One window and its verdict, from numbers alone: what the optimizer got beside the mean that the loss counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from accumfused.auditing.fit import Grads, TensorDifference, added, differences, weights_of
from accumfused.auditing.graph import Reading, Term

EQUAL, SCALED, UNKNOWN, DIFFERENT = "equal", "scaled", "unknown", "different"  # verdicts, from best to worst
WORST = (EQUAL, SCALED, UNKNOWN, DIFFERENT)
TOLERANCE = 1e-4  # of the gradient: sums in fp32 stay below
LOST = 0.01  # of the largest weight: micro-batches below did not reach the step
_CLOSE = 2e-3  # relative: two numbers that are the same but for rounding


@dataclass
class MicroBatch:
    """One backward pass."""

    reading: Reading = field(default_factory=lambda: Reading(unknown=["its backward() was not seen"]))
    samples: int = 0  # of the model's last call; 0: unknown
    rank: int = 0
    is_random: bool = False  # forward drew random numbers
    has_batch_norm: bool = False  # in training mode
    is_used: bool = False  # a step has taken it
    grads: dict[int, Tensor] = field(default_factory=dict)  # on the host, by parameter, until the step
    call: Any = None  # of the model, if it has returned the loss
    undivided: list[tuple[Term, dict[int, Tensor]]] = field(default_factory=list)  # terms that lack a division, so far

    @property
    def count(self) -> float:
        """Samples or tokens that its loss counts."""
        main = self.reading.main
        return float(self.samples or 1) if main is None else main.mean_of if main.is_mean else main.count

    @property
    def coefficient(self) -> float:
        """The number in front of each of the loss's terms."""
        main = self.reading.main
        return 1.0 / self.count if main is None else main.coefficient or 1.0


@dataclass
class Window:
    """The micro-batches between two steps of an optimizer.

    Args:
        weights: the step's gradient is the sum of the micro-batches' gradients, times these.
        shares: the weight of each micro-batch's terms in the step: 1 is right.
        stale: the weight of the gradient that was there before the window.
        residual: the relative part of the step's gradient that no micro-batch explains.
        flags: what was seen as it happened: names of causes, with details.
        fits: the comparison with the large batch: all tensors, then each.
        ratio: the step's gradient is so many times the large batch's, where the direction is the same.
        reasons: why the graph cannot tell, by the name of the cause.
        is_decided: by the comparison with the window computed at once.
        reset: so many of the first micro-batches are gone from p.grad, by what was seen.
    """

    micro_batches: list[MicroBatch]
    weights: list[float]
    shares: list[float]
    stale: float
    residual: float
    flags: dict[str, str]
    world: int = 1
    fits: list[TensorDifference] = field(default_factory=list)
    ratio: float = 1.0
    verdict: str = UNKNOWN
    reasons: dict[str, str] = field(default_factory=dict)
    is_decided: bool = False
    reset: int = 0

    @property
    def lost(self) -> list[bool]:
        """Flags micro-batches that neither this step nor another optimizer's has taken."""
        sizes = [abs(share * each.count) for share, each in self.pairs]
        return [
            size < LOST * max(sizes) and not each.is_used for size, (_, each) in zip(sizes, self.pairs, strict=True)
        ]

    @property
    def pairs(self) -> list[tuple[float, MicroBatch]]:
        """Shares and micro-batches."""
        return list(zip(self.shares, self.micro_batches, strict=True))


def judge(
    micro_batches: list[MicroBatch], pieces: list[list[Tensor | None]], stale: list[list[Tensor | None]], taken: Grads,
    ids: Sequence[int], names: Sequence[str], *, expected: int | None, world: int, reset: int, flags: dict[str, str],
) -> Window:  # fmt: skip
    """The verdict on one step.

    Args:
        pieces: the gradients of each micro-batch.
        stale: the gradients that the window found in p.grad, if there were any.
        taken: the gradients that the step takes.
        reset: so many of the first micro-batches are gone from p.grad, by what was seen.
    """
    of_rank = len(micro_batches) // world
    likely = [index % of_rank >= reset for index in range(len(micro_batches))] + [False] * len(stale)
    fitted, residual = weights_of([*pieces, *stale], taken, likely)
    largest = max(abs(weight) for weight in fitted)
    own = [not m.is_used or abs(w) >= LOST * largest for w, m in zip(fitted, micro_batches, strict=False)]
    micro_batches, pieces = list(itertools.compress(micro_batches, own)), list(itertools.compress(pieces, own))
    weights = list(itertools.compress(fitted, own))
    shares = [weight * each.coefficient for weight, each in zip(weights, micro_batches, strict=True)]
    window = Window(micro_batches, weights, shares, fitted[-1] if stale else 0.0, residual, flags, world, reset=reset)
    families = _families(micro_batches, pieces, ids, world, expected)
    large = [family.large for family in families]
    scales, _ = weights_of(large, taken, [True] * len(large))
    best = [family.explained(scale) for family, scale in zip(families, scales, strict=True)]
    window.fits = differences(large, best, taken, names)
    off = differences(large, scales, taken, names)[0].difference
    ratios = [scale / own if own else 1.0 for scale, own in zip(scales, best, strict=True)]
    numbers = [family.micro_batches for family in families]
    for family in families:
        window.reasons |= family.reasons
    if len(micro_batches) > 1:
        window.reasons |= _dependences(micro_batches)
    if not _same(ratios) and len(set(numbers)) > 1:  # losses of different forms take turns
        ratios = [ratio * sum(numbers) / number for ratio, number in zip(ratios, numbers, strict=True)]
        if not _same(ratios):
            window.reasons["unread"] = "losses of different forms come in different numbers"
    window.ratio = ratios[0]
    if off <= TOLERANCE and not _same(ratios):
        window.flags["uneven"] = f"its losses enter with the factors {', '.join(f'{ratio:.3g}' for ratio in ratios)}"
    if "weights_changed" in flags or off > TOLERANCE or not _same(ratios) or min(ratios) <= 0:
        window.verdict = DIFFERENT
    else:
        window.verdict = EQUAL if is_close(ratios[0], 1.0) else SCALED
    counts = [each.count for each in micro_batches]
    mean = sum(share * count for share, count in zip(shares, counts, strict=True)) / (sum(counts) or 1.0)
    size = (1.0 if window.verdict == DIFFERENT else window.ratio) / (mean or 1.0)
    window.shares = [share * size for share in shares]
    return window


def _dependences(micro_batches: Sequence[MicroBatch]) -> dict[str, str]:
    """What the graph shows of samples that depend on each other, or does not show."""
    found: dict[str, str] = {}
    if any(each.has_batch_norm for each in micro_batches):
        found["batch_norm"] = "BatchNorm in training mode makes samples depend on each other"
    for each in micro_batches:
        terms = [term for term in each.reading.terms if term.has_rows]
        coupled = [term for term in terms if term.is_coupled]
        if coupled and "batch_norm" not in found:
            name = "negatives" if len(coupled) == len(terms) else "auxiliary"
            found[name] = f"samples of a micro-batch depend on each other in its {coupled[0].kind}"
        if any(term.is_coupled is None for term in terms) and not each.reading.unknown:
            found["unread"] = "whether samples depend on each other could not be asked of the graph"
        if each.reading.unknown:
            found["unread"] = each.reading.unknown[0]
    return found


# ---- the mean that the terms count -----------------------------------------------------------------------------------


@dataclass
class _Family:
    """The micro-batches whose losses have the same form.

    Args:
        large: the gradient of the mean over all their terms, or of the sum, without factors.
        own: these factors, one division by the number of micro-batches left out.
        sign: that of the loss.
        numbers: of micro-batches and processes.
        sizes: factors that a loop may choose: the sum of all terms may become their mean.
    """

    large: list[Tensor | None]
    own: list[float]
    sign: float
    micro_batches: int
    numbers: set[int]
    reasons: dict[str, str]
    sizes: tuple[float, ...] = (1.0,)

    def explained(self, scale: float) -> float:
        """The product of own factors that was measured; else that of all."""
        return self.sign * explained(scale, self.own, self.numbers, self.sizes)


def explained(
    scale: float, factors: Sequence[float], numbers: Collection[int], sizes: Sequence[float] = (1.0,)
) -> float:
    """The product of a size and all factors, if that is the scale; else that of the first size.

    Args:
        numbers: of micro-batches or processes; a factor that is one of them may be there to undo a division.
    """
    fixed = math.prod(f for f in factors if not any(is_close(f, number) for number in numbers))
    for size in sizes:
        for product in (math.prod(factors), fixed):
            if is_close(abs(scale), size * product):
                return size * product
    return sizes[0] * math.prod(factors)


def _families(
    micro_batches: Sequence[MicroBatch], pieces: list[list[Tensor | None]], ids: Sequence[int], world: int,
    expected: int | None,
) -> list[_Family]:  # fmt: skip
    indices: dict[tuple[str, ...], list[int]] = {}
    for index, each in enumerate(micro_batches):
        indices.setdefault(each.reading.signature, []).append(index)
    found = []
    for own in indices.values():
        group = [micro_batches[index] for index in own]
        number = len(group) // world or 1
        corrected = [_corrected(m, pieces[index], ids, number) for m, index in zip(group, own, strict=True)]
        found.append(_family(group, corrected, number, len(micro_batches) // world or 1, expected or number))
    return found


def _family(
    group: list[MicroBatch], pieces: list[list[Tensor | None]], number: int, turns: int, expected: int
) -> _Family:
    """Args: number: micro-batches of this form. turns: of all. expected: gradient_accumulation_steps."""
    mains = [each.reading.main for each in group]
    terms = [main for main in mains if main is not None]
    if len(terms) < len(group):
        weights = [1.0 / len(group) / (each.coefficient * each.count) for each in group]
        return _Family(
            added(pieces, weights), [], 1.0, number, set(), {"unread": "the loss of a micro-batch was not seen"}
        )
    reasons: dict[str, str] = {}
    counts, factors, own, is_mean = _counted(
        terms, [float(each.samples) for each in group], {number, turns, expected}, reasons
    )
    total = sum(counts) if is_mean else 1.0
    weights = [count / factor / total if factor else 0.0 for count, factor in zip(counts, factors, strict=True)]
    if not _same([count / factor for count, factor in zip(counts, factors, strict=True) if count]):
        _compare_terms(group, reasons)
    for each in group:
        for term, _ in each.undivided:
            if is_divided(term.factors, number) is None and _lacks(each, term, number):
                reasons["unread"] = (
                    f"whether its {term.kind}, times {term.factor:g}, is divided by {number} as the others"
                )
    joint = [
        term for term in group[0].reading.terms if (term.kind, term.has_rows) == (terms[0].kind, terms[0].has_rows)
    ]
    parts = len(joint)
    if parts > 1 and not _same([term.coefficient for term in joint]) and not _same([term.mean_of for term in joint]):
        reasons["unread"] = f"it adds up {parts} losses with different counts: whether they are alike"
    sizes: tuple[float, ...] = (1.0, 1.0 / parts)
    if number < expected == number * parts:  # the losses of several micro-batches share a backward pass
        sizes = (1.0 / parts,)
    if not is_mean:
        sizes += tuple(1.0 / sum(c) for c in ([t.count for t in terms], [each.samples for each in group]) if sum(c))
    numbers = {number, turns, expected, len(group) // number}
    ones = [1.0 / each for each in {number, turns, expected}]
    scales = terms[0].scales
    own = [abs(f) for f in own if f not in scales and not any(is_close(abs(f), one) and one < 1 for one in ones)]
    sign = math.copysign(1.0, factors[0]) if factors[0] else 1.0
    own = [factor for factor in own if not is_close(factor, 1.0)]
    return _Family(added(pieces, weights), own, sign, number, numbers, reasons, sizes)


def _counted(
    terms: Sequence[Term], samples: Sequence[float], divisions: set[int], reasons: dict[str, str]
) -> tuple[list[float], list[float], list[float], bool]:
    """For each term the number by which it divides, and its factor; the factors that all have alike; are they means.

    A factor that is one over the term's own count makes a sum a mean; one over the window's count does not.
    """
    counts, factors = [term.mean_of for term in terms], [term.factor for term in terms]
    columns = list(zip(*(term.factors for term in terms), strict=False))
    is_aligned = len({len(term.factors) for term in terms}) == 1
    fixed = [column[0] for column in columns if _same(column)]
    varying = [column for column in columns if not _same(column)]
    is_alike = _same([f / c for f, c in zip(factors, counts, strict=True) if c])  # the number in front of each term
    if varying and not is_alike and not (is_aligned and all(_are_counts(column, terms) for column in varying)):
        reasons["unread"] = "a factor of the loss changes within the window"
    is_mean = any(term.is_mean for term in terms)
    if is_aligned and not is_mean:
        for column in columns:
            sizes = [abs(factor) for factor in column]
            is_division = any(is_close(sizes[0], 1 / number) for number in divisions) and columns.count(column) < 2
            if [column] == varying or any(
                not is_division and all(is_close(size * count, 1.0) for size, count in zip(sizes, known, strict=True))
                for known in ([term.count for term in terms], samples)
            ):
                counts = [1.0 / abs(f) for f in column]
                factors = [f * count for f, count in zip(factors, counts, strict=True)]
                fixed, is_mean = [f for f in fixed if not is_close(f, column[0])], True
                break
    for known in (counts, samples) if is_mean and is_aligned else ():  # a share: its count over the window's
        own = [f for column in columns if all(map(is_close, map(abs, column), known)) for f in column[:1]]
        rest = [f for f in fixed if f not in own and not is_close(abs(f) * sum(known), 1.0)]
        fixed = rest if own and len(rest) < len(fixed) else fixed
    return counts, factors, fixed, is_mean


def _are_counts(column: Sequence[float], terms: Sequence[Term]) -> bool:
    """Whether factors are counts, or one over counts: of the terms, or whole numbers."""
    sizes = [1.0 / abs(f) if abs(f) < 1 else abs(f) for f in column if f]
    return len(sizes) == len(column) and (
        _same([size / term.count for size, term in zip(sizes, terms, strict=True) if term.count])
        or all(abs(size - round(size)) < 1e-3 for size in sizes)
    )


def _compare_terms(group: Sequence[MicroBatch], reasons: dict[str, str]) -> None:
    """Micro-batches get different weights: these fit all terms only if the terms count alike."""
    readings = [[term for term in each.reading.terms if term.has_rows] for each in group]
    if len({len(terms) for terms in readings}) > 1:
        reasons["unread"] = "the micro-batches' losses have different numbers of terms"
        return
    for column in zip(*readings, strict=True):
        rates = [term.coefficient / each.coefficient for term, each in zip(column, group, strict=True)]
        if not _same(rates):
            reasons["unread"] = f"its {column[0].kind} counts other things than its {group[0].reading.main.kind}"  # type: ignore[union-attr]


def _corrected(each: MicroBatch, grads: list[Tensor | None], ids: Sequence[int], number: int) -> list[Tensor | None]:
    """The gradients as they would be if all terms were divided by the number of micro-batches."""
    for term, own in each.undivided:
        if _lacks(each, term, number) and is_divided(term.factors, number) is False:
            parts = [own.get(param) for param in ids]
            grads = [
                g if g is None or part is None else g - part * (1 - 1 / number)
                for g, part in zip(grads, parts, strict=True)
            ]
    return grads


def _lacks(each: MicroBatch, term: Term, number: int) -> bool:
    """Whether the main term is divided by the number of micro-batches, and this one is not."""
    main = each.reading.main
    return main is not None and number > 1 and any(is_close(abs(f), 1 / number) for f in main.factors)


def is_divided(factors: Sequence[float], number: int) -> bool | None:
    """Whether one of the factors is a division by this number. None: it may contain one, as 0.075 is 0.3 / 4."""
    found: bool | None = False
    for factor in map(abs, factors):
        if number < 2 or not factor or not math.isfinite(factor):
            continue
        if is_close(factor, 1 / number):
            return True
        own, whole = _digits(factor), _digits(factor * number)
        if whole < own or (whole == own == 1 and f"{factor * number:e}"[0] in "1235"):
            found = None
    return found


def _digits(number: float) -> int:
    return len(f"{number:.6e}".partition("e")[0].replace(".", "").rstrip("0"))


def is_close(one: float, other: float) -> bool:
    """Whether two numbers are the same up to rounding."""
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other))


def _same(numbers: Sequence[float]) -> bool:
    return all(is_close(number, numbers[0]) for number in numbers)
