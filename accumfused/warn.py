"""Warnings that point at the user's line, however many frames lie between, and lines in the log."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = tuple(str(Path(module).parent) + os.sep for module in (__file__, torch.__file__))  # not torchvision


class AccumulationWarning(UserWarning):
    """The category of this package's warnings. See `strict`."""


def strict() -> None:
    """Makes this package's warnings errors, as `warnings.simplefilter("error", accumfused.AccumulationWarning)` does.

    Those about windows (dropped before each step, or with a parameter written within) come before anything is written.
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


def names_of_caller() -> tuple[str, ...]:
    """Returns the names that the code of the first frame outside accumfused and torch uses."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_names


@functools.cache
def say_once(message: str) -> None:
    """Logs, once, a correct choice that may be unexpected."""
    logging.getLogger("accumfused").warning(message)
