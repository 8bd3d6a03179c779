"""What the user chose for an optimizer, beyond torch's arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from typing_extensions import TypedDict, Unpack  # a dependency of torch's

Nonfinite = Literal["skip", "propagate", "raise"]
MasterWeights = Literal["auto", "fp32", "split16", "split8"]
BackendName = Literal["auto", "cuda", "triton", "cpu", "foreach", "torch"]

_PLACE = "    **settings: those of `accumfused.settings.Settings`.\n"  # of their descriptions in docstrings


class SettingArguments(TypedDict, total=False):
    """The keyword arguments of `Settings`, for what passes them on."""

    max_grad_norm: float | None
    nonfinite: Nonfinite | None
    backend: str
    master_weights: MasterWeights | None
    state_dtype: torch.dtype | Literal["int8"]
    state_dtype_min_numel: int
    rounding_seed: int | None
    process_group: Any
    grads_are_reduced: bool
    reduce_dtype: torch.dtype | None


@dataclass
class Settings:
    """The settings that every optimizer here takes beyond torch's arguments, with their defaults.

    Carried by deepcopy and pickle, not by state_dict: a checkpoint of torch's has none to give.

    Args:
        max_grad_norm: > 0; clip the global norm of all gradients, as `clip_grad_norm_` does. None: no clipping.
        nonfinite: what a step does on a non-finite norm: "skip" writes nothing, "propagate" behaves as stock torch,
            "raise" checks on the host and raises before anything is written; None: "skip" whenever a norm is taken.
        backend: "cpu", "cuda" (native kernels), "triton", "foreach" (torch's own kernels and bits), "torch" (the
            reference), or "auto": the fastest that runs.
        master_weights: what 16-bit parameters keep beside them of their fp32 values, which a step works on. "fp32": all
            of it. "split16", of bf16: the 16 bits that they lack, which is exact; "split8": 8 of them, rounded
            stochastically. None: nothing, and each step rounds stochastically. "auto": "split16" for bf16, "fp32" for
            fp16.
        state_dtype: torch.float32, torch.bfloat16 (rounded stochastically), or "int8": 8-bit floats with a scale for
            each block of 128 elements. An element whose state overflows takes its block with it, where no norm is
            taken and nonfinite is not "skip" or "raise". Not "int8" with amsgrad: the maximum ratchets up.
        state_dtype_min_numel: smaller parameters have fp32 states.
        rounding_seed: of all stochastic rounding, for states that are new; None: that of torch's generator, of which
            nothing is drawn, and 0 where there are several processes, which must round alike. The same seed gives the
            same bits on every backend.
        process_group: of processes (torch.distributed) with a batch each, whose gradients the optimizer adds up itself,
            once for a window: see `accumfused.attach_ddp` and docs/distributed.md. Not carried by copies and pickles.
        grads_are_reduced: says that each micro-batch's gradients are reduced already, where there is more than one
            process and no process_group is given; without that `accumulate()` is refused.
        reduce_dtype: in which gradients travel between those processes: torch.float32, torch.bfloat16 (added up in
            bf16 then), or None: as they were accumulated.
    """

    max_grad_norm: float | None = None
    nonfinite: Nonfinite | None = None
    backend: str = "auto"
    master_weights: MasterWeights | None = "auto"
    state_dtype: torch.dtype | Literal["int8"] = torch.float32
    state_dtype_min_numel: int = 4096
    rounding_seed: int | None = None
    process_group: Any = None  # torch.distributed.ProcessGroup
    grads_are_reduced: bool = False
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            check_max_grad_norm(self.max_grad_norm, "None is off (elsewhere 0 often is)")
        modes = get_args(Nonfinite)
        if self.nonfinite not in (None, *modes):
            raise ValueError(f"nonfinite must be one of {', '.join(modes)} or None, got {self.nonfinite!r}")
        if self.backend not in get_args(BackendName):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendName))}, got {self.backend!r}")
        self._check_formats()
        self._check_groups()

    def _check_formats(self) -> None:
        masters = get_args(MasterWeights)
        if self.master_weights not in (None, *masters):
            raise ValueError(f"master_weights must be one of {', '.join(masters)} or None, got {self.master_weights!r}")
        if self.state_dtype not in (torch.float32, torch.bfloat16, "int8"):
            allowed = "torch.float32, torch.bfloat16, 'int8'"
            raise ValueError(f"state_dtype must be one of {allowed}, got {self.state_dtype!r}")
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
        if self.grads_are_reduced and self.process_group is not None:
            raise ValueError("grads_are_reduced=True says that nothing is to be reduced; leave the process group out")
        if self.reduce_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"reduce_dtype must be torch.float32, torch.bfloat16 or None, got {self.reduce_dtype!r}")
        if self.reduce_dtype is not None and self.process_group is None:
            raise ValueError("reduce_dtype is for gradients that process_group reduces; give one")


def check_max_grad_norm(value: Any, off: str) -> None:
    """Refuses what is not a positive number; `off` says what is written for no clipping."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"max_grad_norm must be a number, got {value!r}; {off}")
    if not value > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {value}; {off}")


def chosen(caller: str, others: Iterable[str] = (), /, **settings: Unpack[SettingArguments]) -> Settings:
    """The settings among the keyword arguments of `caller`, whose own arguments are `others`.

    Raises:
        TypeError: an argument that nobody takes, with the name that is nearest to it.
        ValueError, RuntimeError: wrong settings.
    """
    for name in settings:
        if name not in SettingArguments.__annotations__:
            near = difflib.get_close_matches(name, [*SettingArguments.__annotations__, *others], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name == "rounding":
                hint = "; leave it out: with master_weights=None 16-bit parameters are always rounded stochastically"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    return Settings(**settings)


Target = TypeVar("Target", bound=Callable[..., Any])


def takes_settings(target: Target) -> Target:
    """Writes the settings into the signature and the docstring of a function, or of a class, that takes `**settings`.

    Static tools see `Unpack[SettingArguments]`; inspect, help() and notebooks see what this leaves.
    """
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    own = inspect.signature(function, eval_str=True)
    settings = inspect.signature(Settings, eval_str=True).parameters.values()
    function.__signature__ = own.replace(
        parameters=[
            *(parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD),
            *(setting.replace(kind=setting.KEYWORD_ONLY) for setting in settings),
        ]
    )
    if target.__doc__ and Settings.__doc__:  # python -OO leaves none
        described = inspect.cleandoc(Settings.__doc__).partition("Args:\n")[2]
        target.__doc__ = inspect.cleandoc(target.__doc__).replace(_PLACE, described + "\n")
    return target
