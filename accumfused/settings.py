"""Settings: every option of an optimizer beyond torch's arguments, with its default and its check."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from typing_extensions import TypedDict, Unpack  # a dependency of torch's

from accumfused.clip import LIMIT, Clip, RunningMean, check_limit, check_policies
from accumfused.rules import Rule

Nonfinite = Literal["skip", "drop", "propagate", "raise"]
MasterWeights = Literal["auto", "fp32", "split16", "split8"]
BackendName = Literal["auto", "cuda", "triton", "cpu", "torch"]

PLACE = "    **settings: those of `accumfused.settings.Settings`.\n"  # docstrings get the descriptions here


class SettingArguments(TypedDict, total=False):
    """The keyword arguments of `Settings`, for functions that pass them on."""

    max_grad_norm: float | None
    clip: Clip | None
    skip_above: float | RunningMean | None
    nonfinite: Nonfinite | None
    backend: str
    master_weights: MasterWeights | None
    state_dtype: torch.dtype | Literal["8bit"]
    state_dtype_min_numel: int
    rounding_seed: int | None
    process_group: Any
    norm_group: Any
    grads_are_reduced: bool
    reduce_dtype: torch.dtype | None
    noise_scale: bool | float
    metrics: bool | int
    sum_dtype: torch.dtype | None
    offload: bool


NAMES = frozenset(SettingArguments.__annotations__)


@dataclass
class Settings:
    """The settings that every optimizer here takes beyond torch's arguments, with their defaults.

    deepcopy and pickle carry them; state_dict does not, because a checkpoint of torch's has none.

    Args:
        max_grad_norm: the limit, > 0, of the global norm of all gradients, as of `clip_grad_norm_`. None: no clipping.
            A parameter group may have its own: then each group has a norm, and this is the limit of the others.
        clip: a policy instead of `max_grad_norm`: `af.clip.PerTensor`, `af.clip.ZScore`.
        skip_above: the limit, > 0, of the global norm before clipping, above which a step writes nothing. Or a multiple
            of the norms before: `af.clip.RunningMean`. None: only a norm that is not finite skips.
        nonfinite: the step's answer to a non-finite norm. "skip" writes nothing; "propagate" behaves as stock torch;
            "raise" checks on the host and raises before it writes. "drop" leaves each micro-batch out whose norm is not
            finite, as if it had not been there, and skips a window with none left; `accumulate()` then reads the
            gradients once more. None: "skip" whenever the step takes a norm.
        backend: "cpu", "cuda" (native kernels), "triton", "torch" (torch's own kernels and bits, for fp64 parameters,
            too), or "auto": the fastest backend that runs.
        master_weights: the form in which a 16-bit parameter keeps its fp32 value, on which a step works. For bf16
            "split16": the 16 bits that the parameter lacks, exact; "split8": 8 of them, rounded stochastically; None:
            no fp32 value, and each step rounds the parameter stochastically. For fp16 "fp32": a whole copy. "auto":
            "split16" for bf16, "fp32" for fp16.
        state_dtype: torch.float32, torch.bfloat16 (rounded stochastically), or "8bit": 8-bit floats with one scale for
            each quantisation block of 128 elements. An element whose state overflows spoils its block, unless a norm
            is taken or nonfinite is "skip", "drop" or "raise". amsgrad, Adamax and Schedule-Free refuse "8bit".
        state_dtype_min_numel: parameters with fewer elements have fp32 states; fp64 ones always have fp64 states.
        rounding_seed: the seed of all stochastic rounding; each new state takes it over. None: torch's initial seed
            (no random number is consumed), or 0 with several processes, because these must round alike. The same
            seed gives the same bits on every backend.
        process_group: a torch.distributed group of processes with a batch each. The optimizer adds up their gradients,
            once per window: see `accumfused.attach_ddp` and docs/guide/distributed.md. Copies and pickles leave it out.
        norm_group: a torch.distributed group of processes with a part of the parameters each, and the whole gradients
            of these: the stages of a pipeline, or ZeroRedundancyOptimizer's ranks. They have one norm, one limit and
            one skip, so all of them must step. Copies and pickles leave it out.
        grads_are_reduced: True states that each micro-batch's gradients are reduced already. With several processes and
            no process_group, `accumulate()` raises without it.
        reduce_dtype: the dtype in which gradients travel in process_group: torch.float32, torch.bfloat16 (which also
            adds them up in bf16), or None: the dtype of the accumulators.
        noise_scale: True measures the gradient noise scale in windows, for `optimizer.noise_scale()`. A number > 0 and
            < 1 is the decay of its means, for each window, instead of 0.99. The same in all processes.
        metrics: True measures every step for `optimizer.metrics()`: norms of gradients, parameters and updates,
            and their ratio. A whole number n measures every n-th step.
        sum_dtype: the dtype of a window's sums. torch.bfloat16: two bytes for each element of fp32 and bf16 parameters,
            rounded stochastically at each addition, so that they are unbiased but not exact. None or torch.float32:
            exact ones in fp32. Sums of fp16 and fp64 parameters, and those of `fuse_linears`, stay fp32 and fp64.
        offload: True keeps sums, masters and states in the host's memory, and steps there, with the same bits: the card
            holds weights and activations. See docs/guide/offload.md.
    """

    max_grad_norm: float | None = None
    clip: Clip | None = None
    skip_above: float | RunningMean | None = None
    nonfinite: Nonfinite | None = None
    backend: str = "auto"
    master_weights: MasterWeights | None = "auto"
    state_dtype: torch.dtype | Literal["8bit"] = torch.float32
    state_dtype_min_numel: int = 4096
    rounding_seed: int | None = None
    process_group: Any = None  # torch.distributed.ProcessGroup
    norm_group: Any = None  # torch.distributed.ProcessGroup
    grads_are_reduced: bool = False
    reduce_dtype: torch.dtype | None = None
    noise_scale: bool | float = False
    metrics: bool | int = False
    sum_dtype: torch.dtype | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            check_limit(self.max_grad_norm, "max_grad_norm", "None is off (elsewhere 0 often is)")
        check_policies(self.clip, self.max_grad_norm, self.skip_above, self.nonfinite)
        modes = get_args(Nonfinite)
        if self.nonfinite not in (None, *modes):
            raise ValueError(f"nonfinite must be one of {', '.join(modes)} or None, got {self.nonfinite!r}")
        if self.backend not in get_args(BackendName):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendName))}, got {self.backend!r}")
        self._check_formats()
        self._check_groups()
        self._check_measures()

    @property
    def noise_decay(self) -> float | None:
        """The decay of the noise scale's means; None: it is not measured."""
        if isinstance(self.noise_scale, bool):
            return 0.99 if self.noise_scale else None
        return self.noise_scale

    def _check_measures(self) -> None:
        decay = self.noise_scale
        if not isinstance(decay, bool) and not (isinstance(decay, float) and 0.0 < decay < 1.0):
            raise ValueError(f"noise_scale must be True, False, or a decay > 0 and < 1, got {decay!r}")
        every = self.metrics
        if not isinstance(every, int) or every < 0:
            raise ValueError(f"metrics must be True, False, or every how many steps (a whole number), got {every!r}")

    def _check_formats(self) -> None:
        masters = get_args(MasterWeights)
        if self.master_weights not in (None, *masters):
            raise ValueError(f"master_weights must be one of {', '.join(masters)} or None, got {self.master_weights!r}")
        if self.state_dtype not in (torch.float32, torch.bfloat16, "8bit"):
            allowed = "torch.float32, torch.bfloat16, '8bit'"
            raise ValueError(f"state_dtype must be one of {allowed}, got {self.state_dtype!r}")
        if self.sum_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"sum_dtype must be torch.bfloat16, torch.float32 or None, got {self.sum_dtype!r}")
        for name in ("state_dtype_min_numel", "rounding_seed"):
            value = getattr(self, name)
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
        if self.norm_group is not None and self.nonfinite == "drop":
            raise ValueError(
                "nonfinite='drop' decides in each process alone, and norm_group= has one norm; leave one of them out"
            )
        if self.norm_group is not None and self.noise_scale:
            raise ValueError("noise_scale= measures the parameters of one process; leave norm_group= or it out")


@functools.cache
def setting_like(name: str) -> str | None:
    """Returns the setting of this name, or of one so near that the user must have meant it; never of a private name."""
    near = difflib.get_close_matches(name, NAMES, 1, cutoff=0.7)
    return near[0] if near and not name.startswith("_") else None


def refuse_settings_of_groups(
    rules: Iterable[type[Rule]], groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Refuses settings in a group, where they would do nothing.

    Args:
        rules: the optimizer's; without options if it keeps a step of its own, which may read keys of such names.
        defaults: its own options; a rule may have one of such a name.
    """
    for index, group in enumerate(groups if any(rule.hypers for rule in rules) else ()):
        for name in NAMES.intersection(group) - defaults.keys() - {LIMIT}:
            raise ValueError(
                f"parameter group {index} has {name!r}, which is one for all groups; delete it, and give it to the "
                "optimizer when it is made (a group can have a max_grad_norm)"
            )


def chosen(caller: str, others: Iterable[str] = (), /, **settings: Unpack[SettingArguments]) -> Settings:
    """Builds the settings from the keyword arguments of `caller`, whose own arguments are `others`.

    Raises:
        TypeError: an unknown argument; the message names the nearest known one.
        ValueError, RuntimeError: wrong settings.
    """
    for name in settings:
        if name not in NAMES:
            near = difflib.get_close_matches(name, [*NAMES, *others], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    return Settings(**settings)


Target = TypeVar("Target", bound=Callable[..., Any])


def takes_settings(target: Target) -> Target:
    """Writes the settings into the signature and the docstring of a function or class that takes `**settings`.

    Static tools see `Unpack[SettingArguments]`; inspect, help() and notebooks see the signature written here.
    """
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    signature = inspect.signature(function, eval_str=True)
    settings = inspect.signature(Settings, eval_str=True).parameters.values()
    function.__signature__ = signature.replace(
        parameters=[
            *(parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD),
            *(setting.replace(kind=setting.KEYWORD_ONLY) for setting in settings),
        ]
    )
    if target.__doc__ and Settings.__doc__:  # python -OO removes docstrings
        target.__doc__ = inspect.cleandoc(target.__doc__).replace(PLACE, _described())
    return target


def _described() -> str:
    return inspect.cleandoc(Settings.__doc__ or "").partition("Args:\n")[2] + "\n"
