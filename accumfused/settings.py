"""What the user chose for an optimizer, beyond torch's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from typing_extensions import TypedDict  # a dependency of torch's

from accumfused import backends, distributed
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
    process_group: Any
    sharding_group: Any
    grads_are_reduced: bool
    reduce_dtype: torch.dtype | None


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
    process_group: Any = None  # torch.distributed.ProcessGroup
    sharding_group: Any = None
    grads_are_reduced: bool = False
    reduce_dtype: torch.dtype | None = None

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
        self._check_groups()
        backends.check(self.backend)

    def _check_formats(self) -> None:
        masters, roundings = get_args(MasterWeights), get_args(Rounding)
        if self.master_weights not in (None, *masters):
            raise ValueError(f"master_weights must be one of {', '.join(masters)} or None, got {self.master_weights!r}")
        if self.rounding not in roundings:
            raise ValueError(f"rounding must be one of {', '.join(roundings)}, got {self.rounding!r}")
        if self.state_dtype not in list(_STATES):
            allowed = "torch.float32, torch.bfloat16, 'int8'"
            raise ValueError(f"state_dtype must be one of {allowed}, got {self.state_dtype!r}")
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

    def _check_groups(self) -> None:
        for name, group in (("process_group", self.process_group), ("sharding_group", self.sharding_group)):
            if group is not None:
                distributed.check_group(name, group)
        if self.process_group is not None and self.sharding_group is not None:
            raise ValueError("sharding_group reduces gradients too; leave process_group out")
        if self.grads_are_reduced and self.group is not None:
            raise ValueError("grads_are_reduced=True says that nothing is to be reduced; leave the process group out")
        if self.reduce_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"reduce_dtype must be torch.float32, torch.bfloat16 or None, got {self.reduce_dtype!r}")
        if self.reduce_dtype is not None and self.group is None:
            raise ValueError("reduce_dtype is for gradients that process_group or sharding_group reduces; give one")
        if self.sharding_group is not None and self.write_grad:
            raise ValueError(
                "write_grad leaves whole gradients, of which a process with sharding_group has a part only"
            )
        if self.sharding_group is not None and self.accumulator_dtype != torch.float32:
            raise ValueError("with sharding_group accumulators are fp32; leave accumulator_dtype out")

    @property
    def group(self) -> Any:
        """Of the processes whose gradients this optimizer adds up itself, or None."""
        return self.process_group if self.sharding_group is None else self.sharding_group

    @property
    def seed(self) -> int:
        """By default that of torch's generator, of which nothing is drawn; of several processes, one that all have."""
        if self.rounding_seed is not None:
            return self.rounding_seed
        return 0 if distributed.has_processes() else torch.initial_seed() % 2**63

    @property
    def states(self) -> States:
        return _STATES[self.state_dtype]

    @property
    def takes_norm(self) -> bool:
        """Whether a norm is wanted even where it does not come free."""
        return self.max_grad_norm is not None or self.nonfinite in ("skip", "raise")
