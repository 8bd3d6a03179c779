"""Refuses a torch that is too old, on import."""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)  # as in pyproject.toml

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"accumfused needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and {torch.__version__} is installed; "
        "pip install --upgrade torch"
    )
