"""The native module, or the reason why it is not there.

torch comes first: `_C` is not linked to an OpenMP runtime and binds to the one that torch has loaded.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from inspect import isgetsetdescriptor
from pathlib import Path
from typing import Any

import torch

_C: Any = None
unavailable: str | None = None  # why there is no native module

# torch's table of C functions that read a tensor's address, shape and strides (torch 2.10 and newer).
exchange_api: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

try:
    _C = import_module("accumfused._C")
except ImportError as error:
    unavailable = f"the native module does not load: {error}"
    if isinstance(error, ModuleNotFoundError):
        unavailable = "the native module was not built (ACCUMFUSED_NATIVE=0, or installed from pure Python)"
    with contextlib.suppress(OSError):
        reason = (Path(__file__).parent / "_native_error.txt").read_text().strip()
        unavailable = f"the native module was not built: {reason}"

if _C is not None and exchange_api is None:
    _C, unavailable = None, f"torch {torch.__version__} has no DLPack exchange table; 2.11 or newer has"

# csrc/table.cpp calls this descriptor's getter.
if _C is not None and not isgetsetdescriptor(torch.Tensor.grad):
    _C, unavailable = None, f"torch {torch.__version__} keeps p.grad in another way; report this"
