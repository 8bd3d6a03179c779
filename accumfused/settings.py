"""What the user chose for an optimizer, beyond torch's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from typing_extensions import TypedDict  # a dependency of torch's

from accumfused import backends
from accumfused.formats import States

Nonfinite = Literal["skip", "propagate", "raise"]
Amp = Literal["fused"]
MasterWeights = Literal["auto", "fp32", "split16", "split8"]
Rounding = Literal["nearest", "stochastic"]

_STATES = {torch.float32: States.FLOAT32, torch.bfloat16: States.BFLOAT16, "int8": States.INT8}
_ACCUMULATORS = (torch.float32, torch.bfloat16)


class SettingArguments(TypedDict, total=False):
    """Keyword arguments that every optimizer here takes; `accumfused.Adam` describes them."""

    max_grad_norm: float | None
    nonfinite: Nonfinite | None
    amp: Amp | None
    write_grad: bool
    backend: str
    master_weights: MasterWeights | None
    rounding: Rounding
    state_dtype: torch.dtype | Literal["int8"]
    state_dtype_min_numel: int
    accumulator_dtype: torch.dtype
    rounding_seed: int | None


@dataclass
class Settings:
    """Carried by deepcopy and pickle, not by state_dict: a checkpoint of torch's has none to give."""

    max_grad_norm: float | None = None
    nonfinite: Nonfinite | None = None
    amp: Amp | None = None
    write_grad: bool = False
    backend: str = "auto"
    master_weights: MasterWeights | None = "auto"
    rounding: Rounding = "nearest"
    state_dtype: torch.dtype | Literal["int8"] = torch.float32
    state_dtype_min_numel: int = 4096
    accumulator_dtype: torch.dtype = torch.float32
    rounding_seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_grad_norm, (int, float, type(None))):
            raise TypeError(f"max_grad_norm must be a number or None, got {type(self.max_grad_norm).__name__}")
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm must be >= 0 or None, got {self.max_grad_norm}")
        modes = get_args(Nonfinite)
        if self.nonfinite not in (None, *modes):
            raise ValueError(f"nonfinite must be one of {', '.join(modes)} or None, got {self.nonfinite!r}")
        if self.amp not in (None, *get_args(Amp)):
            raise ValueError(f"amp must be 'fused' or None, got {self.amp!r}")
        if self.backend not in backends.NAMES:
            raise ValueError(f"backend must be one of {', '.join(backends.NAMES)}, got {self.backend!r}")
        self._check_formats()
        backends.check(self.backend)

    def _check_formats(self) -> None:
        masters, roundings = get_args(MasterWeights), get_args(Rounding)
        if self.master_weights not in (None, *masters):
            raise ValueError(f"master_weights must be one of {', '.join(masters)} or None, got {self.master_weights!r}")
        if self.rounding not in roundings:
            raise ValueError(f"rounding must be one of {', '.join(roundings)}, got {self.rounding!r}")
        if self.state_dtype not in _STATES:
            raise ValueError(f"state_dtype must be one of {', '.join(map(str, _STATES))}, got {self.state_dtype!r}")
        if self.accumulator_dtype not in _ACCUMULATORS:
            raise ValueError(
                f"accumulator_dtype must be one of {', '.join(map(str, _ACCUMULATORS))}, got {self.accumulator_dtype!r}"
            )
        for name, value in (
            ("state_dtype_min_numel", self.state_dtype_min_numel),
            ("rounding_seed", self.rounding_seed),
        ):
            if value is None and name == "rounding_seed":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
            if not 0 <= value < 2**63:
                raise ValueError(f"{name} must be >= 0 and below 2^63, got {value}")

    @property
    def seed(self) -> int:
        """By default that of torch's generator, of which nothing is drawn."""
        return torch.initial_seed() % 2**63 if self.rounding_seed is None else self.rounding_seed

    @property
    def states(self) -> States:
        return _STATES[self.state_dtype]

    @property
    def takes_norm(self) -> bool:
        """Whether a norm is wanted even where it does not come free."""
        return self.max_grad_norm is not None or self.nonfinite in ("skip", "raise")
