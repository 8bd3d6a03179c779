"""Batches of any form, cut into micro-batches along the first dimension of their tensors, and joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def split(batch: Any, steps: int) -> list[Any]:
    """Cuts all tensors of a batch along their first dimension, into equal parts; the last may be shorter.

    Raises:
        ValueError: it cannot be cut so.
    """
    count = samples_of(batch)
    if count < steps:
        raise ValueError(f"{count} samples do not make {steps} micro-batches; take a larger batch")
    size = -(-count // steps)
    if size * (steps - 1) >= count:  # the last would be empty
        size = count // steps

    def part(index: int) -> Any:
        end = count if index == steps - 1 else (index + 1) * size
        return tree_map(lambda leaf: leaf[index * size : end] if _is_cut(leaf) else leaf, batch)

    return [part(index) for index in range(steps)]


def samples_of(batch: Any) -> int:
    """The length of the batch's tensors.

    Raises:
        ValueError: they differ, or there are none.
    """
    lengths = {len(leaf) for leaf in tree_leaves(batch) if _is_cut(leaf)}
    if len(lengths) != 1:
        found = "has no tensors with a first dimension" if not lengths else f"has tensors of lengths {sorted(lengths)}"
        raise ValueError(f"the batch cannot be split: it {found}; each tensor's first dimension must be the sample")
    return lengths.pop()


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch on the CPU, its floating-point tensors in this dtype."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu", dtype) if leaf.is_floating_point() else leaf.to("cpu")

    return tree_map(cast, batch)


def joined(inputs: Sequence[Any]) -> Any:
    """Inputs of several calls as those of one: tensors joined along their first dimension.

    Raises:
        ValueError: they cannot be.
    """

    def join(*column: Any) -> Any:
        first = column[0]
        if isinstance(first, Tensor) and first.ndim:
            return torch.cat(column)
        if any(type(each) is not type(first) or bool(each != first) for each in column):
            raise ValueError("an input differs between micro-batches")
        return first

    return tree_map(join, *inputs)
