"""Triton's interpreter, for machines without a GPU.

It must be asked for before anything else imports Triton, which torch's compiler and the training frameworks do: so
harness.py imports this first.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Triton looks at this when it is imported, which it is in parts, and when it meets a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


with interpreting(), contextlib.suppress(ImportError):
    importlib.import_module("triton.language")
