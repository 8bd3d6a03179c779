"""Warnings that point at the user's line, however many frames lie between, and lines in the log."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_INSIDE = tuple(str(Path(module).parent) + os.sep for module in (__file__, torch.__file__))  # not torchvision


class AccumulationWarning(UserWarning):
    """The category of this package's warnings. See `strict`."""


class AfterStepWarning(AccumulationWarning):
    """Warns of what follows an update. As an error (`strict`) it says that the step is made, and not to be repeated."""


def strict() -> None:
    """Makes this package's warnings errors, as `warnings.simplefilter("error", accumfused.AccumulationWarning)` does.

    Those about windows (dropped before each step, or with a parameter written within) come before anything is written.
    Those after an update (most steps are skipped, metrics have failed) say that the step is made: do not repeat it.
    Each call that would have warned raises, not only the first.
    """
    warnings.simplefilter("error", AccumulationWarning)


def warn(message: str, category: type[AccumulationWarning] = AccumulationWarning) -> None:
    """Warns at the first frame outside accumfused and torch: Python's filters tell warnings apart by their frame."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth + 1)


def warn_after_step(errors: Iterable[Exception]) -> None:
    """Warns, once all of a step is made, of what has failed after it; as an error it keeps the first one's traceback.

    Raises:
        AfterStepWarning: warnings are errors.
    """
    errors = [*errors]
    if not errors:
        return
    if isinstance(errors[0], AfterStepWarning):  # an inner call's, on its way out
        raise errors[0]
    texts = dict.fromkeys(
        str(error) if isinstance(error, AccumulationWarning) else f"what follows the step has failed, {error!r}"
        for error in errors
    )
    try:
        warn(f"{'; '.join(texts)}; the step is made: do not repeat it", AfterStepWarning)
    except AfterStepWarning as warning:
        raise warning from errors[0]


def names_of_caller() -> tuple[str, ...]:
    """Returns the names that the code of the first frame outside accumfused and torch uses."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_names


def names_of(hook: Callable[..., Any]) -> set[str]:
    """Returns the names that a user's function or method uses, comprehensions within it, too; none of a package's here.

    Those are the hooks of torch, of its schedulers and profilers, and of accumfused.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = hook if hasattr(hook, "__code__") or hasattr(hook, "__func__") else type(hook).__call__
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    names = set[str]()
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType) and not code.co_filename.startswith(_INSIDE):
            names.update(code.co_names)
            codes += code.co_consts
    return names


@functools.cache
def say_once(message: str) -> None:
    """Logs, once, a correct choice that may be unexpected."""
    logging.getLogger("accumfused").warning(message)
