"""The format of a parameter and its optimizer states in memory; the settings choose it for each parameter.

`Weights` and `States` have a row for each format. The arithmetic is fp32 in all of them: a step decodes, updates and
encodes in one pass (codecs.py). `Storage` holds a parameter's tensors in the optimizer's state, in the kernels' order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from accumfused.formats import codecs, shards
from accumfused.formats.numeric import full
from accumfused.rules.rule import MAX_STATES, Rule
from accumfused.settings import MasterWeights, Settings

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of parameters and gradients, in the order of csrc/rows.h
TORCH_DTYPES = (*DTYPES, torch.float64)  # torch's own kernels take fp64, too
SEED, REMAINDER, MASTER = "rounding_seed", "master_remainder", "master_weight"  # keys of a parameter's state
# Stands for a state that is kept in codes, if its optimizer of torch would begin a missing one anew: this fails there.
IN_CODES = 8


class WeightFormat(NamedTuple):
    """A row of `Weights`."""

    number: int  # in csrc/rows.h
    label: str  # for people
    dtype: torch.dtype  # of the parameter
    options: tuple[MasterWeights | None, ...]  # values of the setting master_weights that choose the format
    join: Callable[[Tensor, Any], Tensor]  # (parameter, master) -> fp32 weights
    split: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]  # (fp32 weights, noise) -> (parameter, master)
    master: tuple[str, torch.dtype] | None = None  # its key in the parameter's state, and its dtype
    is_noisy: bool = False  # whether it rounds stochastically

    def __index__(self) -> int:
        return self.number


class Weights(WeightFormat, Enum):
    """The formats of a parameter. codecs.py and csrc/codecs.h have their arithmetic."""

    FLOAT32 = WeightFormat(
        number=0, label="fp32", dtype=torch.float32, options=(None, *get_args(MasterWeights)),  # which do not matter
        join=lambda param, _: full(param), split=lambda weights, _: (weights, None),
    )  # fmt: skip
    BFLOAT16_STOCHASTIC = WeightFormat(
        number=1, label="bf16 stochastic", dtype=torch.bfloat16, options=(None,), is_noisy=True,
        join=lambda param, _: full(param),
        split=lambda weights, noise: (codecs.to_bfloat16_stochastic(weights, noise), None),
    )  # fmt: skip
    BFLOAT16_SPLIT16 = WeightFormat(
        number=2, label="bf16 + split16", dtype=torch.bfloat16, options=("auto", "split16"),
        master=(REMAINDER, torch.int16), join=codecs.join, split=codecs.split,
    )  # fmt: skip
    BFLOAT16_SPLIT8 = WeightFormat(
        number=3, label="bf16 + split8", dtype=torch.bfloat16, options=("split8",), is_noisy=True,
        master=(REMAINDER, torch.int8), join=codecs.join_short, split=codecs.split_short,
    )  # fmt: skip
    FLOAT16_MASTER = WeightFormat(
        number=4, label="fp16 + fp32 master", dtype=torch.float16, options=("auto", "fp32"),
        master=(MASTER, torch.float32), join=codecs.join_master, split=codecs.split_master,
    )  # fmt: skip


class StateFormat(NamedTuple):
    """A row of `States`."""

    number: int  # in csrc/rows.h
    label: str  # for people
    option: torch.dtype | str  # the value of the setting state_dtype that chooses the format
    dtype: torch.dtype  # of a state

    def __index__(self) -> int:
        return self.number


class States(StateFormat, Enum):
    """The formats of a rule's states."""

    FLOAT32 = StateFormat(0, "fp32 states", torch.float32, torch.float32)
    BFLOAT16 = StateFormat(1, "bf16 states", torch.bfloat16, torch.bfloat16)  # rounded stochastically
    INT8 = StateFormat(2, "8-bit states", "8bit", torch.uint8)  # codes, and a scale for each quantisation block


_WEIGHTS = {(weights.dtype, option): weights for weights in Weights for option in weights.options}
_STATES = {states.option: states for states in States}
# The least eps but 0, and that of 8-bit states. A moment below 2^-126 (in 8-bit blocks 2^-94) is stored as 0: its root
# is at most a thousandth of this.
_LEAST_EPS = {"root": (1e-16, 1e-11), "square": (1e-32, 1e-22)}
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Format:
    """The format of one parameter and its states."""

    weights: Weights = Weights.FLOAT32
    states: States = States.FLOAT32
    dtype: torch.dtype = torch.float32  # of the arithmetic and the sum; fp64 is that of weights and states, too

    @property
    def needs_noise(self) -> bool:
        """Whether a step's results depend on noise, which all processes with the parameter must share."""
        return self.weights.is_noisy or self.states is not States.FLOAT32

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the states are kept."""
        return self.dtype if self.states is States.FLOAT32 else self.states.dtype

    @property
    def master(self) -> tuple[str, torch.dtype] | None:
        """The name in the state, and the dtype, of the master or remainder; None if the format has none."""
        return self.weights.master


@dataclass
class Storage:
    """A parameter's tensors in the optimizer's state; None or missing where the format has none."""

    step: Tensor | None  # fp32, shape []
    seed: Tensor | None  # int64, shape []
    master: Tensor | None
    values: list[Tensor]  # the rule's states
    scales: list[Tensor]  # uint8 [blocks], of INT8 states

    def slots(self) -> list[Tensor | None]:
        """The tensors in the order of csrc/rows.h."""
        padded = [[*values, *[None] * (MAX_STATES - len(values))] for values in (self.values, self.scales)]
        return [self.step, self.seed, self.master, *itertools.chain(*padded)]


def format_of(rule: type[Rule], param: Tensor, settings: Settings) -> Format:
    """Chooses the format of a parameter by these settings.

    Raises:
        ValueError: the parameter's dtype does not allow these master_weights.
    """
    if param.dtype == torch.float64:
        return Format(dtype=torch.float64)
    if rule.is_foreign or param.dtype not in DTYPES:
        return Format()  # no kernel reads it
    check_master_weights(param.dtype, settings.master_weights)
    states = States.FLOAT32
    if rule.states and shards.initialized(param).numel() >= settings.state_dtype_min_numel:
        states = _STATES[settings.state_dtype]
    if states is States.INT8 and not shards.keeps_blocks(param):
        states = States.FLOAT32
    return Format(_WEIGHTS[param.dtype, settings.master_weights], states)


def check_master_weights(dtype: torch.dtype, master_weights: str | None) -> None:
    """Refuses master weights that no format of the dtype has."""
    if (dtype, master_weights) not in _WEIGHTS:
        why, instead = "an fp16 number is not the upper half of an fp32 one, and has too few exponents without", "fp32"
        if dtype == torch.bfloat16:
            why, instead = "both halves of an fp32 number are that number, in 2 bytes less", "split16"
        raise ValueError(
            f"a parameter is {dtype}, which master_weights={master_weights!r} does not serve: {why}; use "
            f"master_weights={instead!r}"
        )


def check_states(rule: type[Rule], settings: Settings) -> None:
    """Refuses 8-bit states that would drift.

    Raises:
        ValueError: 8 bits are too few for the rule's states.
    """
    if rule.needs_16_bits and _STATES[settings.state_dtype] is States.INT8:
        what, remedy = ("amsgrad=True", ", or amsgrad=False") if "amsgrad" in rule.flags else (rule.name, "")
        raise ValueError(
            f"state_dtype='8bit' does not go with {what}, {rule.needs_16_bits}; use "
            f"state_dtype=torch.float32 or torch.bfloat16{remedy}"
        )


def least_eps(rule: type[Rule], form: Format) -> float:
    """Returns the least eps, but 0, that a parameter of this format may have; 0 where any may."""
    if not rule.eps_beside or form.dtype == torch.float64:
        return 0.0
    return _LEAST_EPS[rule.eps_beside][form.states is States.INT8]


def check_eps(eps: float | Tensor, least: float) -> None:
    """Refuses an eps below the least, unless it is 0: a first moment is kept where a second one is stored as 0.

    A tensor on a GPU is not read.

    Raises:
        ValueError: that.
    """
    if not (isinstance(eps, Tensor) and eps.device.type != "cpu") and 0 < eps < least:
        raise ValueError(
            f"eps={float(eps):g} is too small: second moments below 2^-126 (with 8-bit states, 2^-94) are stored as 0, "
            f"and steps would be many times too large; give eps=0 or one of at least {least:g} (fp64 parameters "
            "take any)"
        )


def described(rule: type[Rule], form: Format, param: Tensor) -> str:
    """Describes a format for people: "bf16 + split16, fp32 states"."""
    dtype = _DTYPE_NAMES.get(param.dtype, str(param.dtype).removeprefix("torch."))
    if rule.is_foreign:
        return f"{dtype}, its own states"
    weights = form.weights.label if param.dtype in DTYPES else dtype
    states = "fp64 states" if form.dtype == torch.float64 else form.states.label
    return f"{weights}, {states if rule.states else 'no states'}"


def names(rule: type[Rule], form: Format) -> list[str]:
    """Lists the keys of a parameter's state, in the order of `Storage`."""
    keys = ["step"] if counts_steps(rule, form) else []
    keys += [SEED] if form.needs_noise else []
    keys += [form.master[0]] if form.master else []
    if form.states is not States.INT8:
        return [*keys, *rule.states]
    return [*keys, *map(codes_name, rule.states), *map(scale_name, rule.states), *rule.restarts]


def codes_name(state: str) -> str:
    """Names a state's codes otherwise than the state: optimizers of torch would take them for numbers."""
    return f"{state}_8bit"


def scale_name(state: str) -> str:
    return f"{state}_scale"


def state_in(entries: Mapping[str, Any], state: str) -> Any:
    """Returns the codes of a state, or its numbers; None: it has neither."""
    codes = entries.get(codes_name(state))
    return entries.get(state) if codes is None else codes


def with_named_codes(rule: type[Rule], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state with names of their own for codes, which have their states' in older checkpoints."""

    def is_coded(name: str) -> bool:
        codes = entries.get(name)
        return isinstance(codes, Tensor) and codes.dtype == torch.uint8 and scale_name(name) in entries

    coded = [name for name in rule.states if is_coded(name)]
    named = {codes_name(name) if name in coded else name: value for name, value in entries.items()}
    return named | {name: IN_CODES for name in coded if name in rule.restarts}


def scale_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape of the scales, one per block: a matrix if whole blocks make up each row of the parameter.

    Processes can shard such a matrix by rows. Blocks are runs of memory, so codes of another layout have scales of
    three dimensions: torch.distributed.checkpoint, which copies by index, then finds a shape that does not match.
    """
    if not param.is_contiguous():
        return 1, 1, codecs.block_count(param.numel())
    if shards.has_block_rows(param):
        return param.shape[0], math.prod(param.shape[1:]) // codecs.BLOCK
    return (codecs.block_count(param.numel()),)


def counts_steps(rule: type[Rule], form: Format) -> bool:
    """Whether the state counts steps: a rule may need the count, and the rounding noise depends on it."""
    return rule.counts_steps or form.needs_noise


def is_stored(
    rule: type[Rule], form: Format, param: Tensor, entries: Mapping[str, Any] | None, home: torch.device
) -> bool:
    """Whether a (dense) parameter's state is complete, in this format, and on the device `home`."""
    entries, wanted = entries or {}, names(rule, form)
    if not all(_fits(name, entries.get(name), rule, form, param, home) for name in wanted):
        return False
    # Entries of another format must not outlive a step.
    others = (SEED, REMAINDER, MASTER, *map(codes_name, rule.states))
    return rule.is_foreign or not any(name in entries and name not in wanted for name in others)


def storage_of(rule: type[Rule], form: Format, entries: Mapping[str, Any]) -> Storage:
    """The storage of a state that `is_stored`."""
    return Storage(
        entries["step"] if counts_steps(rule, form) else None,
        entries[SEED] if form.needs_noise else None,
        entries[form.master[0]] if form.master else None,
        [state_in(entries, name) for name in rule.states],
        [entries[scale_name(name)].view(-1) for name in rule.states] if form.states is States.INT8 else [],
    )


def _fits(name: str, value: Any, rule: type[Rule], form: Format, param: Tensor, home: torch.device) -> bool:
    in_codes = form.states is States.INT8
    if in_codes and name in rule.restarts:
        return isinstance(value, int) and value == IN_CODES
    if not isinstance(value, Tensor) or value.device != home:
        return False
    if name in ("step", SEED):
        return value.dim() == 0 and value.dtype == (torch.int64 if name == SEED else torch.float32)
    is_state = name in (map(codes_name, rule.states) if in_codes else rule.states)
    if is_state or (form.master is not None and name == form.master[0]):
        dtype = form.state_dtype if is_state else form.master[1]  # type: ignore[index]
        return value.dtype == dtype and value.shape == param.shape and _same_strides(value, param)
    return value.dtype == torch.uint8 and value.shape == scale_shape(param) and value.is_contiguous()


def _same_strides(value: Tensor, param: Tensor) -> bool:
    """Compares the strides that matter: torch freely changes those of one-element dimensions and of empty tensors."""
    dims = zip(param.shape, value.stride(), param.stride(), strict=True)
    return not param.numel() or all(one == other for size, one, other in dims if size > 1)
