"""Warnings that point at the user's line, through however many frames of torch and of this package they come."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def warn(message: str) -> None:
    """Warns at the first frame outside accumfused and torch, by which Python's filters tell one place from another."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth + 1)
