"""Batches of any form, cut into micro-batches along the first dimension of their tensors, and joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

_IGNORED = -100  # the target that torch's cross entropy leaves out


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
    flat = [tree_flatten(each) for each in inputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("its inputs have several forms")
    is_text = any(isinstance(each, Mapping) and "labels" in each for each in (inputs[0][1], *inputs[0][0]))
    names = [str(path[-1]) for path, _ in tree_flatten_with_path(inputs[0])[0]]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten(
        [_joined(name, column, is_text) for name, column in zip(names, columns, strict=True)], flat[0][1]
    )


def _joined(name: str, column: Sequence[Any], is_text: bool) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or first.ndim == 0:
        if any(type(each) is not type(first) or bool(each != first) for each in column):
            raise ValueError(f"its input {name} differs between micro-batches")
        return first
    if len({each.shape[1:] for each in column}) > 1:
        if not is_text or first.ndim != 2 or first.is_floating_point():
            raise ValueError(f"its input {name} has several shapes")
        width, filler = max(each.shape[1] for each in column), _IGNORED if "labels" in name else 0
        column = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=filler) for each in column]
    return torch.cat(list(column))
