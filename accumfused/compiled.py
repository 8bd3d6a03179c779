"""The native module, or the reason why it is missing.

torch comes first: `_C` is not linked to an OpenMP runtime and binds to the one that torch has loaded.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from inspect import isgetsetdescriptor
from pathlib import Path
from typing import Any

import torch

from accumfused.compiling import interface

module: Any = None
unavailable: str | None = None  # why there is no native module
cuda_unavailable: str | None = None  # why the native module has no kernels for GPUs

# torch's table of C functions that read a tensor's address, shape and strides.
exchange_api: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


_SOURCE = Path(__file__).parents[1] / "csrc"


def note_of_the_build(name: str, module: str = __file__) -> str:
    """Returns the text that setup.py has written into the folder of a module, or ""."""
    with contextlib.suppress(OSError):
        return (Path(module).parent / name).read_text().strip()
    return ""


def imported() -> Any:
    """Imports the native module; for a clone without one, which Python finds first, the one that pip has installed."""
    try:
        return import_module("accumfused._C")
    except ModuleNotFoundError:
        elsewhere = [path for path in sys.path if Path(path).resolve() != _SOURCE.parent.resolve()]
        package = PathFinder.find_spec("accumfused", elsewhere) if _SOURCE.exists() else None
        spec = package and PathFinder.find_spec("accumfused._C", package.submodule_search_locations)
        if spec is None or spec.loader is None:
            raise
    sys.modules[spec.name] = native = module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


try:
    module = imported()
except ImportError as error:
    unavailable = f"the native module does not load: {error}; install accumfused again"
    if isinstance(error, ModuleNotFoundError):
        unavailable = "the native module was not built (ACCUMFUSED_NATIVE=0, or installed from pure Python)"
        if _SOURCE.exists():
            unavailable = f"{_SOURCE.parent} has no native module; build it: pip install -e ."
        if others := [path.name for path in Path(__file__).parent.glob("_C.*") if path.suffix in (".so", ".pyd")]:
            unavailable = f"{others[0]} is not for Python {platform.python_version()}; install accumfused again"
    if reason := note_of_the_build("_native_error.txt"):
        unavailable = f"the native module was not built: {reason}"

if module is not None and interface(_SOURCE) not in (None, getattr(module, "INTERFACE", "")):
    module, unavailable = None, "the native module is older than the C++ source here; build it again: pip install -e ."

# csrc/table.cpp calls this descriptor's getter.
if module is not None and (exchange_api is None or not isgetsetdescriptor(torch.Tensor.grad)):
    module, unavailable = None, f"torch {torch.__version__} gives no addresses, or keeps p.grad otherwise; report this"

if module is None:
    cuda_unavailable = unavailable
elif not hasattr(module, "cuda"):
    reason = note_of_the_build("_cuda_error.txt", module.__file__) or "no reason is known"
    cuda_unavailable = f"the native module was built without CUDA: {reason}"
