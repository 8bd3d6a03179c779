"""What the command line chooses for the suites, checked before anything runs."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence

import torch

from accumfused.backends import NAMES, why_not
from bench.peers import KNOWN
from bench.shapes import Shapes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class OptionError(ValueError):
    """Says in one line which option cannot be followed, and why."""


def threads(written: str) -> int:
    """Reads a number of threads, for argparse."""
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r} is no number of threads: give 1 or more")
    return int(written)


def backend(name: str, device: torch.device) -> str:
    """Returns the name of a backend that runs.

    Raises:
        OptionError: there is none of that name, or it does not run for that device.
    """
    if name not in NAMES:
        raise OptionError(f"--backend {name}: unknown; choose from {', '.join(NAMES)}")
    reason = None if name == "auto" else why_not(name, device)
    if reason is not None:
        raise OptionError(f"--backend {name} cannot run: {' '.join(reason.split())}")
    return name


def peer_names(written: str) -> tuple[str, ...] | None:
    """Returns None for "all", () for "none", or the names between the commas.

    Raises:
        OptionError: a name is not known.
    """
    if written in ("all", "none"):
        return None if written == "all" else ()
    names = [name.strip() for name in written.split(",") if name.strip()]
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no name"
        raise OptionError(f"--peers {written}: {wrong}; give all, none, or names from {', '.join(KNOWN)}")
    return tuple(dict.fromkeys(names))


def model_shapes(written: str) -> Shapes:
    """Returns the shapes of MODULE:FUNCTION's model: of an nn.Module's parameters, or a list of shapes.

    Raises:
        OptionError: what is wrong with it.
    """
    module, _, function = written.partition(":")
    if not module or not function:
        raise OptionError(f"--model takes MODULE:FUNCTION, such as my_models:gpt; got {written!r}")
    try:
        found = getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever is in somebody's module
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionError(f"--model {written}: {line}") from error
    if isinstance(found, torch.nn.Module):
        found = [tuple(param.shape) for param in found.parameters() if param.requires_grad]
    if not isinstance(found, Sequence) or not all(map(_is_shape, found)):
        raise OptionError(f"--model {written}: {function}() returned no module and no list of shapes")
    shapes = [tuple(shape) for shape in found if math.prod(shape) > 0]
    if not shapes:
        raise OptionError(f"--model {written}: {function}() has no parameters that are trained")
    return shapes


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list | tuple) and all(type(size) is int and size >= 0 for size in shape)
