"""What the command line chooses for the suites: a Bench that carries it, and knows which suites made use of it."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from accumfused.backends import NAMES, why_not
from bench import peers
from bench.report import Table
from bench.shapes import Shapes
from bench.suites import Bench

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIONS = {"backends": "--backend", "dtype": "--dtype", "peers": "--peers", "model_shapes": "--model"}


class OptionError(ValueError):
    """An option that cannot be followed, and why: one line."""


@dataclass
class Chosen(Bench):
    """A Bench with what was chosen.

    Args:
        model_name: what `model_shapes` are called.
        given: field -> the option as it was given; of those that were.
    """

    model_name: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Before each suite: nothing has been made use of."""
        self._read: set[str] = set()
        self._replaced: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in _OPTIONS and "_read" in self.__dict__:
            self._read.add(name)
        return super().__getattribute__(name)

    def shapes(self, model: str) -> Shapes:
        """As Bench's, and notes whose place is taken."""
        if self.model_shapes is not None:
            self._replaced.add(model)
        return super().shapes(model)

    def mark(self, tables: Sequence[Table]) -> None:
        """Says in a suite's tables which model took whose place, and which options made no difference."""
        for table in tables:
            for model in self._replaced:
                if model in table.title:
                    table.title = table.title.replace(model, f"{self.model_name} in place of {model}")
            table.notes += [
                f"{option} makes no difference in this suite"
                for name, option in self.given.items()
                if name not in self._read
            ]


def chosen(bench: Bench, **options: Any) -> Chosen:
    """The same Bench, with options of `Chosen`."""
    return Chosen(**{**{one.name: getattr(bench, one.name) for one in fields(bench)}, **options})


def threads(written: str) -> int:
    """A number of threads, for argparse."""
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r} is no number of threads: give 1 or more")
    return int(written)


def backend(name: str, device: torch.device) -> str:
    """The name of a backend that runs.

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
    """None for "all", () for "none", or the names between the commas.

    Raises:
        OptionError: a name is not known.
    """
    if written in ("all", "none"):
        return None if written == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in written.split(",") if name.strip()))
    unknown = [name for name in names if name not in peers.KNOWN]
    if unknown or not names:
        say = f"all, none, or names with commas between them: {', '.join(peers.KNOWN)}"
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no name"
        raise OptionError(f"--peers {written}: {wrong}; give {say}")
    return names


def model_shapes(written: str) -> Shapes:
    """The shapes of MODULE:FUNCTION's model: of an nn.Module's parameters, or a list of shapes.

    Raises:
        OptionError: what is wrong with it.
    """
    module_name, _, function_name = written.partition(":")
    if not module_name or not function_name:
        raise OptionError(f"--model takes MODULE:FUNCTION, such as my_models:gpt; got {written!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever is in it
        raise OptionError(f"--model {written}: {module_name} does not import: {_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise OptionError(f"--model {written}: {module_name} has no function {function_name}")
    try:
        found = function()
    except Exception as error:
        raise OptionError(f"--model {written}: {function_name}() failed: {_line(error)}") from error
    if isinstance(found, torch.nn.Module):
        found = [param.shape for param in found.parameters() if param.requires_grad]
    if not isinstance(found, (list, tuple)) or not all(map(_is_shape, found)):
        called = type(found).__name__
        article = "an" if called[0].lower() in "aeiou" else "a"
        what = "other things" if isinstance(found, (list, tuple)) else f"{article} {called}"
        raise OptionError(f"--model {written}: {function_name}() returned {what}, not a module or a list of shapes")
    shapes = [tuple(map(int, shape)) for shape in found if math.prod(shape) > 0]
    if not shapes:
        raise OptionError(f"--model {written}: {function_name}() has no parameters that are trained")
    return shapes


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
