"""Warnings that point at the user's line, through however many frames of torch and of this package they come."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = tuple(str(Path(module).parent) + os.sep for module in (__file__, torch.__file__))  # not torchvision


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first frame outside accumfused and torch, by which Python's filters tell one place from another."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth + 1)
