"""Where problems are solved: a backend that runs on this machine, and the device of its tensors. A GPU is three."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import inside
import numpy as np
import pytest
import torch
from harness import GPU, interpreting

from accumfused import backends, compiled

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 1)
INSTRUCTION_SETS = [] if compiled.unavailable else inside.native().instruction_sets()
# "reference" too: the reference with any layout against itself with contiguous tensors.
ON_CPU = ["reference", *INSTRUCTION_SETS, "emulated"]
ON_GPU = ["cuda", "triton", "torch on a GPU"] if GPU else []
INTERPRETED = [] if GPU else ["interpreted"]


@dataclass(frozen=True)
class Place:
    backend: Any
    device: str = "cpu"
    is_slow: bool = False  # seconds for what others do in milliseconds


def interpreted() -> Iterator[Place]:
    """Triton's kernels, by its interpreter."""
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4")
    interpreter = triton.runtime.interpreter
    with interpreting(), np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:  # numpy warns of overflow
        # A launch patches the names of these modules that its kernel's knows, and each call of a device function does
        # it anew, which takes half of the time. With all of them known, the launch's suffices.
        patch.setattr(interpreter, "core", triton.language.core, raising=False)
        function = interpreter.InterpretedFunction
        patch.setattr(function, "__call__", lambda self, *args, **options: self.rewrite()(*args, **options))
        assert type(triton.language.sum).__name__.startswith("Interpreted"), "something imported Triton before us"
        yield Place(backends.select("triton", [CPU]), is_slow=True)
