"""What the user chose for an optimizer, beyond torch's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import TypedDict  # a dependency of torch's

from accumfused import backends

Nonfinite = Literal["skip", "propagate", "raise"]
Amp = Literal["fused"]


class SettingArguments(TypedDict, total=False):
    """Keyword arguments that every optimizer here takes; `accumfused.Adam` describes them."""

    max_grad_norm: float | None
    nonfinite: Nonfinite | None
    amp: Amp | None
    write_grad: bool
    backend: str


@dataclass
class Settings:
    """Carried by deepcopy and pickle, not by state_dict: a checkpoint of torch's has none to give."""

    max_grad_norm: float | None = None
    nonfinite: Nonfinite | None = None
    amp: Amp | None = None
    write_grad: bool = False
    backend: str = "auto"

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
        backends.check(self.backend)

    @property
    def takes_norm(self) -> bool:
        """Whether a norm is wanted even where it does not come free."""
        return self.max_grad_norm is not None or self.nonfinite in ("skip", "raise")
