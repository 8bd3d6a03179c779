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
    lengths = {len(leaf) for leaf in tree_leaves(batch) if _is_cut(leaf)}
    if len(lengths) != 1:
        found = f"has tensors of lengths {sorted(lengths)}" if lengths else "has no tensors with a first dimension"
        raise ValueError(f"the batch cannot be split: it {found}; each tensor's first dimension must be the sample")
    count = lengths.pop()
    if count < steps:
        raise ValueError(f"{count} samples do not make {steps} micro-batches; take a larger batch")
    size = -(-count // steps)
    if size * (steps - 1) >= count:  # the last would be empty
        size = count // steps
    ends = [*range(size, size * steps, size), count]
    return [
        tree_map(lambda leaf, start=start, end=end: leaf[start:end] if _is_cut(leaf) else leaf, batch)
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def joined(inputs: Sequence[Any]) -> Any:
    """Inputs of several calls as those of one: tensors joined along their first dimension.

    Raises:
        ValueError: they cannot be.
    """

    def join(*column: Any) -> Any:
        first = column[0]
        if _is_cut(first):
            return torch.cat(column)
        if any(type(each) is not type(first) or bool(each != first) for each in column):
            raise ValueError("an input differs between micro-batches")
        return first

    return tree_map(join, *inputs)
