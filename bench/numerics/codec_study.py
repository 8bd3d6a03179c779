"""Why the 8-bit moments are coded as they are: five formats, in PyTorch, on gradients of several kinds.

Each format runs Adam's two moments through itself at every step, with true random rounding; its updates are compared
with those of moments in fp64. Nothing here uses the package: the formats that lost exist only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCKS = (64, 128, 256)
BETAS = (0.9, 0.999)
EPS = 1e-12
ROW = 64  # elements that are zero together where gradients are sparse

Coder = Callable[[Tensor], Tensor]  # fp32 [..., block] -> what is left of it after being stored


@dataclass(frozen=True)
class Pair:
    """How the first and the second moment are stored."""

    name: str
    first: Coder
    second: Coder


def pairs() -> list[Pair]:
    root = rooted(power_of_two=True)
    return [
        Pair("linear; root, real scale", linear(power_of_two=False), rooted(power_of_two=False)),
        Pair("linear; root", linear(power_of_two=True), root),
        Pair("signed root; root", signed_root, root),
        Pair("floats 1+3+4; 4+4", floats(3, 4), floats(4, 4, smallest=4)),
        Pair("floats 1+4+3; 5+3", floats(4, 3), floats(5, 3, smallest=4)),
    ]


def randomly_rounded(values: Tensor) -> Tensor:
    return (values + torch.rand_like(values)).floor()


def linear(power_of_two: bool) -> Coder:
    """Signed multiples of a 127th of the block's maximum."""

    def code(values: Tensor) -> Tensor:
        scale = _scale(values, power_of_two) / 127
        return randomly_rounded(values / scale).clamp(-127, 127) * scale

    return code


def rooted(power_of_two: bool) -> Coder:
    """Squares of multiples of a 255th of the root of the block's maximum; never zero, for updates are divided by it."""

    def code(values: Tensor) -> Tensor:
        scale = _scale(values.sqrt(), power_of_two) / 255
        return (randomly_rounded(values.sqrt() / scale).clamp(1, 255) * scale).square()

    return code


def signed_root(values: Tensor) -> Tensor:
    """Signed squares of multiples of a 127th; rounded so that the mean is the value, not its root's."""
    scale = _scale(values, power_of_two=True)
    sizes = values.abs() / scale
    below = (sizes.sqrt() * 127).floor()
    low, high = (below / 127).square(), ((below + 1) / 127).square()
    up = torch.rand_like(sizes) < (sizes - low) / (high - low)
    return values.sign() * ((below + up) / 127).square() * scale


def floats(exponent_bits: int, mantissa_bits: int, smallest: int = 0) -> Coder:
    """Small floating-point numbers: value(c) = F(c) - F(0), F(c) having that many bits, its largest just below 2.

    A block's scale is a power of two, with two codes of room above its largest value: without them, a second moment
    that lies just below a power of two is always rounded down to the last code, and never grows.
    """
    shift = 23 - mantissa_bits
    lowest = _bits(torch.tensor(2.0 ** (1 - (1 << exponent_bits))))
    largest = (1 << exponent_bits + mantissa_bits) - 1

    def code(values: Tensor) -> Tensor:
        exponent = (_bits(values.abs().amax(-1, keepdim=True).clamp_min(1e-36)) + (2 << shift)) >> 23
        scale = (exponent << 23).view(torch.float32)
        shifted = _bits(values.abs() / scale + lowest.view(torch.float32)) - lowest
        codes = (shifted + torch.randint_like(shifted, 1 << shift)) >> shift
        codes = codes.clamp(smallest, largest)
        decoded = ((codes << shift) + lowest).view(torch.float32) - lowest.view(torch.float32)
        return values.sign() * decoded * scale if smallest == 0 else decoded * scale

    return code


def study(block: int, quick: bool) -> list[dict[str, Any]]:
    """A row for each pair of formats and kind of gradient.

    `largest` is the largest |update| over the exact one's largest; `error` the root mean square of the updates' errors
    over that of the exact updates, in the second half of the steps; `drift` the same of their sum over all steps.
    """
    elements, count = (1 << 11, 20) if quick else (1 << 14, 200)
    rows = []
    for pair in pairs():
        torch.manual_seed(0)
        figures = _follow(pair, block, elements, count)
        for kind, found in zip(KINDS, figures, strict=True):
            rows.append({"format": pair.name, "block": block, "gradients": kind, **found})
    return rows


KINDS = ("normal", "log-normal 1", "log-normal 2", "log-normal 3", "Student t(3)", "sparse rows")


def gradients(elements: int, count: int) -> Iterator[Tensor]:
    """fp32 [len(KINDS), elements]: the same in every run.

    The log-normal ones are normal noise around a mean of its own, times a scale of each element whose logarithm has
    that standard deviation; of sparse rows, one in 50 has a gradient in a step.
    """
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(elements, generator=generator)

    scales = [(sigma * normal()).exp() for sigma in (0, 1, 2, 3)]
    means = [0.3 * normal() for _ in scales]
    for _ in range(count):
        spread = [scale * (mean + normal()) for scale, mean in zip(scales, means, strict=True)]
        chi_squared = sum(normal().square() for _ in range(3))
        alive = torch.rand(elements // ROW, generator=generator) < 0.02
        yield torch.stack([*spread, normal() / (chi_squared / 3).sqrt(), normal() * alive.repeat_interleave(ROW)])


def _follow(pair: Pair, block: int, elements: int, count: int) -> list[dict[str, float]]:
    shape = (len(KINDS), elements)
    first, second = torch.zeros(shape), torch.zeros(shape)
    exact_first, exact_second, moved, exact_moved = (torch.zeros(shape, dtype=torch.double) for _ in range(4))
    largest, exact_largest, squares, exact_squares = (torch.zeros(len(KINDS), dtype=torch.double) for _ in range(4))
    for number, grad in enumerate(gradients(elements, count), 1):
        first, second = _moments(first, second, grad)
        exact_first, exact_second = _moments(exact_first, exact_second, grad.double())
        update, exact = (_update(first, second, number).double(), _update(exact_first, exact_second, number))
        moved += update
        exact_moved += exact
        largest = torch.maximum(largest, update.abs().amax(1))
        exact_largest = torch.maximum(exact_largest, exact.abs().amax(1))
        if number > count // 2:
            squares += (update - exact).square().mean(1)
            exact_squares += exact.square().mean(1)
        first, second = (
            coder(moment.view(len(KINDS), -1, block)).view(shape)
            for coder, moment in ((pair.first, first), (pair.second, second))
        )
    drift = (moved - exact_moved).norm(dim=1) / exact_moved.norm(dim=1)
    figures = {"largest": largest / exact_largest, "error": (squares / exact_squares).sqrt(), "drift": drift}
    return [{name: float(values[kind]) for name, values in figures.items()} for kind in range(len(KINDS))]


def _moments(first: Tensor, second: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    beta1, beta2 = BETAS
    return beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad.square()


def _update(first: Tensor, second: Tensor, number: int) -> Tensor:
    beta1, beta2 = BETAS
    return first / (1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + EPS)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _scale(values: Tensor, power_of_two: bool) -> Tensor:
    """The largest of a block, or the next power of two above it."""
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-36)
    return ((_bits(largest) >> 23) + 1 << 23).view(torch.float32) if power_of_two else largest
