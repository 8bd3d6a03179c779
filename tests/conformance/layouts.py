"""Where elements lie: every kind of strides, holes and boundaries; gradients without memory; sizes that kernels cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import inside
import torch
from torch import Tensor

from accumfused.formats.numeric import CHUNK

PIECE = 2048  # elements that GPUs take at once where they are aligned
GAP = 99.0  # between the elements of a parameter with holes: nobody's business


def same(values: Tensor) -> Tensor:
    return values


def with_holes(values: Tensor) -> Tensor:
    if values.dim() == 0:
        return values
    base = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), GAP)
    base[..., ::2] = values
    return base[..., ::2]


def every_third_row(values: Tensor) -> Tensor:
    base = values.new_full((3 * values.shape[0], *values.shape[1:]), GAP)
    base[::3] = values
    return base[::3]


def transposed(values: Tensor) -> Tensor:
    return values.t().contiguous().t()


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last)


def permuted_with_holes(values: Tensor) -> Tensor:
    return with_holes(values.permute(1, 2, 0).contiguous()).permute(2, 0, 1)


def strides_of_one_size(values: Tensor) -> Tensor:
    return values.as_strided(values.shape, (17, values.stride(1), 5))


def shifted(values: Tensor, offset: int = 1) -> Tensor:
    """So many elements behind a boundary of 16 bytes."""
    return torch.cat([values.new_full((offset,), 77), values.flatten()])[offset:].view(values.shape)


@dataclass(frozen=True)
class Layout:
    """Where a parameter's elements lie."""

    shape: tuple[int, ...]
    place: Callable[[Tensor], Tensor] = same  # contiguous values -> the same values in this layout
    in_memory: Callable[[Tensor], Tensor] = same  # values -> contiguous ones, in the order of this layout's memory


LAYOUTS = (
    Layout((70, 9)),
    Layout((70, 9), with_holes),
    Layout((70, 9), every_third_row),
    Layout((70, 9), transposed, lambda t: t.t().contiguous()),
    Layout((6, 5, 4, 3), channels_last, lambda t: t.permute(0, 2, 3, 1).contiguous()),
    Layout((7, 6, 5), permuted_with_holes, lambda t: t.permute(1, 2, 0).contiguous()),
    Layout((1, 37, 1), strides_of_one_size),
    Layout((33, 3), shifted),
    Layout(()),
    Layout((0, 6), with_holes),
    Layout((3, 0)),
)
OFFSETS = (1, 2, 3, 4, 8)
STREAMS = 6  # parameter, gradient, and what a state may have besides


def edges(*sizes: int) -> tuple[Layout, ...]:
    return tuple(Layout((size,)) for size in sizes)


# What a backend has time for. Below 2^17 elements in all the CPU's kernels use one thread: "large" is more.
EDGES = {
    "large": edges(0, 1, 15, 16, 17, 127, 128, 129, 1000, CHUNK - 1, CHUNK, CHUNK + 1, *[3] * 40, 3 * CHUNK + 5),
    "usual": edges(0, 1, 127, 128, 129, 1000, CHUNK + 130),
    "small": edges(0, 3, 129, 2 * PIECE + 130),
    "tiny": edges(0, 17, PIECE + 129),
    "chunks": edges(CHUNK, 0, 1, 15, 16, CHUNK - 1, CHUNK + 1),
}


class Wrapper(Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper = inside.wrapper(cls, inner)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[a.inner if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "wrapper": lambda: Wrapper(torch.ones(3)), "zero": inside.efficient_zeros,
    "expanded": lambda: torch.tensor(2.0).expand(3),
}  # fmt: skip
