"""One window and its verdict, from numbers alone: what the optimizer got, against the mean that the loss counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from accumfused.auditing.fit import Grads, TensorDifference, added, differences, weights_of
from accumfused.auditing.graph import Term
from accumfused.auditing.passes import Opened, Pass

EQUAL, SCALED, UNKNOWN, DIFFERENT = "equal", "scaled", "unknown", "different"  # verdicts, from best to worst
WORST = (EQUAL, SCALED, UNKNOWN, DIFFERENT)
TOLERANCE = 1e-4  # of the gradient: sums in fp32 stay below
LOST = 0.01  # of the largest weight: micro-batches below did not reach the step
UNSEEN = "the loss itself divides by the number of micro-batches, where the audit does not see it"
_CLOSE = 2e-3  # relative: two numbers that are the same but for rounding


@dataclass
class Part:
    """Terms of a micro-batch's loss that have the same divisions, the main one, and the gradients that they bring."""

    terms: list[Term]
    main: Term
    grads: list[Tensor | None]
    samples: int
    loss: int = 0


@dataclass
class Step:
    """The micro-batches between two steps of an optimizer.

    Args:
        weights: the step's gradient is the sum of the micro-batches' gradients, times these.
        shares: the weight of each micro-batch's terms in the step: 1 is right.
        stale: the weight of the gradient that was there before the window.
        residual: the relative part of the step's gradient that no micro-batch explains.
        flags: what was seen as it happened: names of causes, with details.
        reset: so many of the first micro-batches are gone from p.grad, by what was seen.
        fits: the comparison with the large batch: all tensors, then each.
        ratio: the step's gradient is so many times the large batch's, where the direction is the same.
        reasons: why the graph cannot tell, by the name of the cause.
        is_decided: by the comparison with the window computed at once.
        sum_over: the number by which a loss that is a sum is divided, and the count of its terms.
    """

    passes: list[Pass]
    weights: list[float]
    shares: list[float]
    stale: float
    residual: float
    flags: dict[str, str]
    world: int
    reset: int
    fits: list[TensorDifference] = field(default_factory=list)
    ratio: float = 1.0
    verdict: str = UNKNOWN
    reasons: dict[str, str] = field(default_factory=dict)
    is_decided: bool = False
    sum_over: tuple[float, float] = 1.0, 1.0

    @property
    def losses(self) -> int:
        """How many losses each micro-batch has, with a backward pass for each."""
        return 1 + max((each.loss for each in self.passes), default=0)

    @property
    def arrived(self) -> int:
        """Micro-batches of each process."""
        return len(self.passes) // self.world // self.losses

    @property
    def lost(self) -> int:
        """How many of a process neither this step nor another optimizer's has taken."""
        sizes = [abs(share * each.main.size) for share, each in self.pairs]
        pairs = zip(sizes, self.passes, strict=True)
        return sum(size < LOST * max(sizes) and not each.is_used for size, each in pairs) // self.world // self.losses

    @property
    def weighed(self) -> list[tuple[float, Pass]]:
        """Weights and micro-batches."""
        return list(zip(self.weights, self.passes, strict=True))

    @property
    def pairs(self) -> list[tuple[float, Pass]]:
        """Shares and micro-batches."""
        return list(zip(self.shares, self.passes, strict=True))


def judge(
    opened: Opened, parts: list[list[Part]], stale: list[Grads], taken: Grads, names: Sequence[str],
    *, expected: int | None, world: int = 1,
) -> Step:  # fmt: skip
    """The verdict on one step.

    Args:
        opened: what was seen before it, of all processes.
        parts: of each pass.
        stale: the gradients that the window found in p.grad, if there were any.
        taken: the gradients that the step takes.
        expected: gradient_accumulation_steps.
        world: the number of processes.
    """
    passes, reset, flags = opened.passes, opened.reset, opened.flags
    pieces = [added([part.grads for part in each], [1.0] * len(each)) if each[1:] else each[0].grads for each in parts]
    of_rank = len(passes) // world
    likely = [index % of_rank >= reset for index in range(len(passes))] + [False] * len(stale)
    fitted, residual = weights_of([*pieces, *stale], taken, likely)
    largest = max(map(abs, fitted))
    own = [not m.is_used or abs(w) >= LOST * largest for w, m in zip(fitted, passes, strict=False)]
    reset = sum(own[:reset])
    passes, parts = list(itertools.compress(passes, own)), list(itertools.compress(parts, own))
    weights = list(itertools.compress(fitted, own))
    shares = [weight / (each.main.divisor or 1.0) for weight, each in zip(weights, passes, strict=True)]
    step = Step(passes, weights, shares, fitted[-1] if stale else 0.0, residual, flags, world, reset)
    families = _families(list(itertools.chain(*parts)), step.arrived, expected or step.arrived, world, step.reasons)
    large = [family.large() for family in families]
    scales, _ = weights_of(large, taken, [True] * len(large))
    right = [family.right(scale) for family, scale in zip(families, scales, strict=True)]
    ratios = [scale / each for scale, each in zip(scales, right, strict=True)]
    numbers = [family.number for family in families]
    turns = [ratio * sum(numbers) / number for ratio, number in zip(ratios, numbers, strict=True)]
    if _same(turns) and (is_close(turns[0], 1.0) if sum(numbers) == expected else not _same(ratios)):
        right, ratios = [scale / turns[0] for scale in scales], turns  # losses of several forms take turns
    elif not _same([*map(float, numbers)]) and not _same(ratios) and abs(step.stale) <= LOST:
        step.reasons["unread"] = "losses of different forms come in different numbers"
    step.fits, step.ratio = differences(large, right, taken, names), ratios[0]
    step.sum_over = families[0].constant, families[0].count
    is_off = differences(large, scales, taken, names)[0].difference > TOLERANCE
    if not is_off and not _same(ratios):
        flags["uneven"] = f"its losses enter with the factors {', '.join(f'{ratio:.3g}' for ratio in ratios)}"
    if {"weights_changed", "unsynced"} & flags.keys() or is_off or not _same(ratios) or min(ratios) <= 0:
        step.verdict = DIFFERENT
    else:
        step.verdict = EQUAL if is_close(ratios[0], 1.0) else SCALED
    if step.arrived * world > 1:
        step.reasons |= dependences(passes)
    _rescale(step)
    return step


def _rescale(step: Step) -> None:
    """Gives the shares the mean that the verdict says."""
    sizes = [each.main.size for each in step.passes]
    mean = sum(share * size for share, size in zip(step.shares, sizes, strict=True)) / (sum(sizes) or 1.0)
    wanted = 1.0 if step.verdict == DIFFERENT else step.ratio
    step.shares = [share * wanted / (mean or 1.0) for share in step.shares]


def decide(
    step: Step, whole: Part, taken: Grads, names: Sequence[str], tolerance: float,
    *, expected: int = 1, factors: Sequence[Sequence[float]] = (), right: float | None = None,
) -> None:  # fmt: skip
    """Takes the direction from the window computed at once, and the length from where its divisions were seen.

    A loss that is called for the whole window still believes that it is one of K, and may divide by K.

    Args:
        whole: its loss and gradients. Without terms: its graph could not be read.
        tolerance: the rounding that is no difference.
        expected: gradient_accumulation_steps.
        factors: for each micro-batch, those between the loss that was computed at once and backward.
        right: the number that belongs in front of the window's gradients; None: it is looked for.
    """
    scale = weights_of([whole.grads], taken, [True])[0][0]
    is_foreign = step.residual > TOLERANCE or abs(step.stale) > LOST  # something else is in the step's gradient
    is_off = differences([whole.grads], [scale], taken, names)[0].difference > tolerance or is_foreign
    is_read, is_divided = "unread" not in step.reasons, True
    if right is None and is_read and step.verdict != DIFFERENT and not is_off:
        right = scale / step.ratio
    elif right is None:
        right, is_divided = _length(whole, scale, step, expected, factors)
    step.fits, step.is_decided = differences([whole.grads], [right], taken, names), True
    step.ratio = scale / right
    if is_off or (is_read and "uneven" in step.flags):  # some of its terms are longer than others
        step.verdict = DIFFERENT
    elif is_close(step.ratio, 1.0) or step.fits[0].difference <= tolerance:
        step.verdict = EQUAL
    elif is_divided or not _is_count(step.ratio, (step.arrived, expected, step.arrived / expected)):
        step.verdict = SCALED
    else:
        step.verdict = UNKNOWN
        step.reasons = {"length": f"its length is times {step.ratio:.4g}, which is right if {UNSEEN}"}
    _rescale(step)


def _length(
    whole: Part, scale: float, step: Step, expected: int, factors: Sequence[Sequence[float]]
) -> tuple[float, bool]:
    """The number in front of the window's gradient that was meant, and whether all that divides it was seen."""
    columns = list(zip(*factors, strict=False))
    is_even = all(map(_same, columns)) and len({*map(len, factors)}) < 2  # else they weigh micro-batches by counts
    own = [column[0] for column in columns] if is_even else []
    if whole.terms:
        scales = [factor for factor in own if factor in step.passes[0].main.scales]
        terms = [replace(t, factors=[*t.factors, *own], scales=[*t.scales, *scales]) for t in whole.terms]
        main = next(read for read, term in zip(terms, whole.terms, strict=True) if term is whole.main)
        family = _family([replace(whole, terms=terms, main=main)], step.arrived, expected, 1, {}, step.arrived)
        rights = [each * math.prod(own) * family.weights[0] for each in (1.0, *family.others)]
    else:
        counts = [count for count in (step.arrived, expected) if count > 1]
        free = [factor for factor in own if not any(is_close(abs(factor), 1 / count) for count in counts)]
        undone = [factor for factor in free if not any(is_close(factor, count) for count in counts)]
        rights = [*map(math.prod, (free, undone)), 1.0]
    is_divided = bool(whole.terms) or free != own
    return next((each for each in rights if is_close(scale, each)), rights[0]), is_divided


def _is_count(ratio: float, counts: Iterable[float]) -> bool:
    """Whether it is one of these, or one over it."""
    return any(is_close(abs(ratio), each) or is_close(abs(ratio), 1 / each) for each in counts)


def dependences(passes: Sequence[Pass]) -> dict[str, str]:
    """What the graph shows of samples that depend on each other, or does not show."""
    found: dict[str, str] = {}
    if any(each.has_batch_norm for each in passes):
        found["batch_norm"] = "BatchNorm in training mode makes samples depend on each other"
    for each in passes:
        terms = [term for term in each.reading.terms if term.has_rows]
        coupled = [term for term in terms if term.is_coupled]
        if coupled and "batch_norm" not in found and not each.reading.unknown:
            name = "negatives" if len(coupled) == len(terms) else "auxiliary"
            found[name] = f"samples of a micro-batch depend on each other in its {coupled[0].kind}"
        if each.reading.unknown:
            found["unread"] = each.reading.unknown[0]
        elif any(term.is_coupled is None for term in terms):
            found["unread"] = "whether samples depend on each other could not be asked of the graph"
    return found


# ---- the large batch of losses that have one form --------------------------------------------------------------------


@dataclass
class _Family:
    """Losses of one form.

    Args:
        main: the first one's main term.
        pieces: their gradients.
        weights: of these in the gradient of their terms at once.
        number: of them in each process.
        others: what may stand in front of that as well: a sum may be meant as a mean, or undo a division.
        is_divided: by a number of micro-batches.
        constant: the number by which a sum is divided, if that is none of its counts; else 1.
        count: of its terms.
    """

    main: Term
    pieces: list[list[Tensor | None]]
    weights: list[float]
    number: int
    others: list[float]
    is_divided: bool
    constant: float
    count: float

    def large(self) -> list[Tensor | None]:
        """The gradient of their terms at once."""
        return added(self.pieces, self.weights)

    def right(self, scale: float) -> float:
        """The number in front of it that was meant."""
        return next((each for each in self.others if is_close(scale, each)), 1.0)


def _families(parts: Sequence[Part], arrived: int, expected: int, world: int, reasons: dict[str, str]) -> list[_Family]:
    """Args: arrived: micro-batches of each process. expected: those that belong to a step."""
    forms: dict[Any, list[Part]] = {}
    for part in parts:
        forms.setdefault((part.loss, *((term.kind, term.has_rows) for term in part.terms)), []).append(part)
    families = [_family(group, arrived, expected, world, reasons) for group in forms.values()]
    for family in families:
        if not family.is_divided and any(each.is_divided for each in families):
            for factor in family.main.factors:
                if _may_contain(factor, family.number):
                    reasons["unread"] = f"whether its {family.main.kind}, times {factor:g}, is divided as the others"
    return families


def _family(
    group: Sequence[Part], arrived: int, expected: int, world: int, reasons: dict[str, str], number: int = 0
) -> _Family:
    """A mean counts its terms, and the large batch has those of all micro-batches. A sum stays what it is."""
    number, first = number or len(group) // world or 1, group[0].main
    mains = [part.main for part in group if part.main.divisor]
    _compare_terms([part for part in group if part.main.divisor], reasons)
    columns = list(zip(*(main.factors for main in mains), strict=False))
    is_same = _same([main.divisor for main in mains])
    is_aligned = len({len(main.factors) for main in mains}) < 2
    if not is_same and not (is_aligned and all(_same(column) or _are_counts(column, mains) for column in columns)):
        reasons["unread"] = "a factor of the loss changes within the window"
    counts = {count for count in (number, arrived, expected) if count > 1}
    fixed = [column[0] for column in columns if _same(column)]
    divisions = [factor for factor in fixed if any(is_close(abs(factor), 1 / count) for count in counts)]
    is_sum = first.has_rows
    if is_sum and _same([main.mean_of for main in mains]) and all(map(_same, columns)):  # else its counts cancel
        is_sum, divisions = _counted(first, group[0].samples, divisions)
    joint = sum(each.form == first.form for each in group[0].terms)
    undone = [abs(f) for f in fixed if any(is_close(abs(f), count) for count in {*counts, world} - {1})]
    total, others = sum(main.divisor for main in mains), [1 / math.prod(undone)]
    if is_sum and is_same:
        sizes = sum(main.count for main in mains), sum(part.samples for part in group)
        total, others = first.divisor, others + [1 / size for size in sizes if size]
    elif number < expected == number * joint:  # the losses of several micro-batches share a backward pass
        total *= joint
    count = sum(main.count for main in mains)
    constant = first.divisor if is_sum and is_same and not first.is_mean else 1.0
    own = math.prod(map(abs, divisions)) * math.prod(first.scales) * (total or 1.0)
    weights = [part.main.divisor / own for part in group]
    return _Family(first, [part.grads for part in group], weights, number, others, bool(divisions), constant, count)


def _compare_terms(group: Sequence[Part], reasons: dict[str, str]) -> None:
    """Terms of a loss that count other things than its main one, or are counted apart, are no mean together."""
    for column in zip(*(part.terms for part in group), strict=True):
        if column[0].has_rows and not _same([t.divisor / p.main.divisor for t, p in zip(column, group, strict=True)]):
            reasons["unread"] = f"its {column[0].kind} counts other things than its {group[0].main.kind}"
    joint = [term for part in group[:1] for term in part.terms if term.form == part.main.form]
    if not _same([term.divisor for term in joint]) and not _same([term.mean_of for term in joint]):
        reasons["unread"] = f"it adds up {len(joint)} losses with different counts: whether they are alike"


def _counted(first: Term, samples: int, divisions: list[float]) -> tuple[bool, list[float]]:
    """Whether a loss is a sum, not a mean over its own terms or samples; and divisions by numbers of micro-batches."""
    counts = [count for count in (first.size, samples) if count > 1]
    if first.is_mean:
        return any(is_close(abs(factor), count) for factor in first.factors for count in counts), divisions
    free = [factor for factor in first.factors if factor not in divisions or divisions.count(factor) > 1]
    own = [factor for factor in free if any(is_close(abs(factor) * count, 1.0) for count in counts)]
    return not own, [*divisions[1:]] if own and own[0] in divisions else divisions


def _are_counts(column: Sequence[float], terms: Sequence[Term]) -> bool:
    """Whether factors are counts, or one over counts: of the terms, or whole numbers."""
    sizes = [1.0 / abs(f) if abs(f) < 1 else abs(f) for f in column if f]
    return len(sizes) == len(terms) and (
        _same([size / term.count for size, term in zip(sizes, terms, strict=True) if term.count])
        or all(abs(size - round(size)) < 1e-3 for size in sizes)
    )


def _may_contain(factor: float, number: int) -> bool:
    """Whether a factor may be another one, divided by this number, as 0.075 is 0.3 / 4."""
    own, whole = (f"{abs(each):.6e}".partition("e")[0].rstrip("0.") for each in (factor, factor * number))
    return len(whole) < len(own) or (len(own) == 1 and whole in ("1", "2", "3", "5"))


def is_close(one: float, other: float) -> bool:
    """Whether two numbers are the same up to rounding."""
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other))


def _same(numbers: Sequence[float]) -> bool:
    return all(is_close(number, numbers[0]) for number in numbers)
