"""Tensors that exist before a test begins, and that it can reach.

They lie on the CPU, and clash with what the test makes where torch's default device is a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

HERE = Path(__file__).parent


def reaches_tensors(root: Any) -> bool:
    """Whether a tensor is in this object, or in what our functions in it name: globals, closures, pytest's marks.

    One element does not count: torch and this package take numbers from the CPU beside tensors of every device.
    """
    return any(isinstance(value, Tensor) and value.numel() != 1 for value in _reachable(root))


def _reachable(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    left = [root]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (ModuleType, type)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, FunctionType):
            left.extend(_held_by(value))
        elif not isinstance(value, Tensor):
            left.extend(gc.get_referents(value))


def _held_by(function: FunctionType) -> Iterator[Any]:
    if not _is_ours(function.__code__.co_filename):
        return
    known = function.__globals__
    yield from (held for held in gc.get_referents(function) if held is not known)
    names = set(_names(function.__code__))
    for value in [known[name] for name in names & known.keys()]:
        yield value
        if isinstance(value, ModuleType) and _is_ours(getattr(value, "__file__", None)):
            yield from (vars(value)[attribute] for attribute in names & vars(value).keys())


def _is_ours(file: str | None) -> bool:
    return file is not None and HERE in Path(file).parents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
