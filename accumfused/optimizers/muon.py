"""Muon: momentum, orthogonalized, for the matrices of hidden layers; AdamW for all other parameters.

The class has the formula. X is bf16, as in torch. The formula's first two lines are one rule and its last line another,
which every backend runs; torch multiplies matrices between them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.adamw import AdamW as TorchAdamW
from typing_extensions import Unpack

from accumfused.core.engine import Engine
from accumfused.core.norm import Measured
from accumfused.core.plan import Plan
from accumfused.core.protocol import Commit, Hypers, Outcome, OwnStep
from accumfused.core.rows import Grads, Row
from accumfused.formats import shards
from accumfused.formats.kinds import Format
from accumfused.formats.numeric import chunk_count
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.adam import Adam
from accumfused.optimizers.newton_schulz import orthogonalized
from accumfused.rules import Rule, Symbol, where
from accumfused.settings import SettingArguments, chosen, takes_settings

TorchMuon = torch.optim.Muon  # some programs put ours into its place

STACK = 2**24  # elements that are orthogonalized together, or one larger matrix


class MuonRule(Rule):
    """The first line: where a parameter would be written, it writes what is to be orthogonalized."""

    name = "muon"
    states = ("momentum_buffer",)
    torch_states = states
    restarts = states
    is_elementwise = False
    hypers = ("momentum", "nesterov")
    counts_steps = False

    @classmethod
    def fits(cls, group: Mapping[str, Any]) -> bool:
        return bool(group.get("use_muon", True))

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        (buffer,) = states
        rest = 1.0 - h.momentum
        buffer = buffer + (g - buffer) * rest
        return buffer + (g - buffer) * where(h.nesterov != 0, rest, 0.0), buffer


class OrthogonalRule(Rule):
    """The last line: the gradient is X."""

    name = "muon_orthogonal"
    hypers = ("lr", "weight_decay", "ratio")
    counts_steps = False

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        return (p * (1.0 - h.lr * h.weight_decay) - g * (h.lr * h.ratio),)


# ---- the step -------------------------------------------------------------------------------------------------------


@dataclass
class _Stack:
    """Matrices of one group, shape and layout."""

    group: int
    rows: list[int]  # of the optimizer's plan
    begin: int  # the first one's place in the plans of `_Matrices`
    is_transposed: bool  # in memory
    memory: Tensor  # [matrices, rows, columns], fp32: from the first rule to the last

    def laid_out(self, values: Tensor) -> list[Tensor]:
        """Views a tensor like `memory` as matrices with their parameters' shape and strides."""
        return [value.mT if self.is_transposed else value for value in values]


@dataclass(frozen=True)
class _Half:
    """The source of a row in the plan of one rule.

    Args:
        row: the parameter's, in the optimizer's plan.
        matrix: written in the parameter's place; None: the parameter is.
        step: a count of its own; None: the parameter's.
    """

    row: Row
    matrix: Tensor | None = None
    step: Tensor | None = None

    @property
    def param(self) -> Tensor:
        """The parameter, or the matrix in its place."""
        return self.row.param if self.matrix is None else self.matrix

    @property
    def entries(self) -> Mapping[str, Any]:
        """The parameter's state."""
        return self.row.entries if self.step is None else {**self.row.entries, "step": self.step}


class _Matrices:
    """The stacks of a plan; and a plan for each of both rules, in which each stack is a group.

    Raises:
        ValueError: a parameter is no matrix, or a shard of one.
    """

    def __init__(self, plan: Plan) -> None:
        self.stacks = _stacks(plan)
        first, last, chunk = list[Row](), list[Row](), 0
        for group, stack in enumerate(self.stacks):
            for index, slot in zip(stack.rows, stack.laid_out(stack.memory), strict=True):
                row = plan.rows[index]
                states, weights = Format(states=row.form.states), Format(weights=row.form.weights)
                # Each rule counts the step, if its format's noise needs the count.
                step = row.entries["step"].clone() if states.needs_noise and weights.needs_noise else None
                moved = replace(row, group=group, first_chunk=chunk)
                first.append(replace(moved, source=_Half(row, matrix=slot), form=states, copy=None))
                last.append(replace(moved, source=_Half(row, step=step), rule=OrthogonalRule, form=weights))
                chunk += chunk_count(row.tensor.numel())
        rows = [index for stack in self.stacks for index in stack.rows]
        self.places = torch.tensor(rows, dtype=torch.int64, device=plan.device)  # in the optimizer's plan
        self.first = Plan(first, [MuonRule] * len(self.stacks), chunk, plan.device)
        self.last = Plan(last, [OrthogonalRule] * len(self.stacks), chunk, plan.device)
        for half in (self.first, self.last):
            plan.backend.prepare(half)

    def only(self, stack: _Stack, values: Sequence[Tensor | None]) -> Grads:
        """Makes the gradients of either plan of one stack's; all others are None."""
        grads = Grads([None] * len(self.first.rows))
        grads[stack.begin : stack.begin + len(values)] = values
        return grads


_MATRICES: WeakKeyDictionary[Plan, _Matrices] = WeakKeyDictionary()


def _step(optimizer: Any, engine: Engine, measured: Measured) -> None:
    engine.update(measured, functools.partial(_update, optimizer.param_groups))


def _update(
    groups: Sequence[Mapping[str, Any]], plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit
) -> None:
    """Steps the optimizer's plan, as `Backend.step`. Nothing waits for a GPU: both rules skip if the outcome does."""
    for group, rule in zip(groups, plan.rules, strict=True):
        if rule is MuonRule:
            _check_iteration(group)
    if plan not in _MATRICES:
        _MATRICES[plan] = _Matrices(plan)
    matrices, step = _MATRICES[plan], plan.backend.step
    commit.begin()
    applied, coefficients = Outcome(outcome.values.clone()), outcome.coefficients
    applied.values[:1].fill_(1.0)  # the first rule applies the coefficient
    scaled = replace(outcome, coefficients=None if coefficients is None else coefficients[matrices.places])
    of_first = [hypers[stack.group] for stack in matrices.stacks]
    of_last = [_of_last(groups[stack.group], plan.rows[stack.rows[0]].tensor.shape) for stack in matrices.stacks]
    for stack in matrices.stacks:
        stack_grads, group = [grads[row] for row in stack.rows], groups[stack.group]
        if any(grad is not None for grad in stack_grads):
            step(matrices.first, matrices.only(stack, stack_grads), of_first, scaled)
            factors = orthogonalized(stack.memory, group["ns_steps"], group["ns_coefficients"], group["eps"])
            both = zip(stack_grads, stack.laid_out(factors), strict=True)
            stack_grads = [None if grad is None else matrix for grad, matrix in both]
            step(matrices.last, matrices.only(stack, stack_grads), of_last, applied)
    others = Grads([None if row.rule is MuonRule else grad for row, grad in zip(plan.rows, grads, strict=True)])
    if any(grad is not None for grad in others):
        step(plan, others, hypers, outcome)
    commit.end()


def _stacks(plan: Plan) -> list[_Stack]:
    """Makes stacks of at most `STACK` elements; those on one device take turns in one memory, the largest first."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, row in enumerate(plan.rows):
        if row.rule is MuonRule and row.has_state:
            _check_matrix(row.param)
            if row.tensor.numel():
                kind = row.group, row.tensor.shape, row.tensor.is_contiguous(), row.tensor.device
                kinds.setdefault(kind, []).append(index)
    pieces = [
        (kind, rows[start : start + most])
        for kind, rows in kinds.items()
        for most in [max(1, STACK // kind[1].numel())]
        for start in range(0, len(rows), most)
    ]
    memory: dict[torch.device, Tensor] = {}
    stacks, begin = list[_Stack](), 0
    for kind, rows in sorted(pieces, key=lambda piece: -len(piece[1]) * piece[0][1].numel()):
        group, shape, is_contiguous, device = kind
        size = len(rows) * shape.numel()
        if device not in memory:
            memory[device] = torch.empty(size, dtype=torch.float32, device=device)
        matrices = memory[device][:size].view(len(rows), *(shape if is_contiguous else shape[::-1]))
        stacks.append(_Stack(group, rows, begin, not is_contiguous, matrices))
        begin += len(rows)
    return stacks


def _of_last(group: Mapping[str, Any], shape: torch.Size) -> tuple[Any, ...]:
    ratio = math.sqrt(max(1.0, shape[0] / shape[1]))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(shape))
    return group["lr"], group["weight_decay"], ratio


def _check_matrix(param: Tensor) -> None:
    if not isinstance(param, Tensor):
        return  # torch names the error
    if param.ndim != 2:
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()}; "
            "give it to a group with use_muon=False, which is AdamW's"
        )
    shard = shards.shard_of(param)
    if shard is not None and shard.groups:
        raise ValueError(
            f"Muon orthogonalizes whole matrices, and a parameter of shape {list(param.shape)} is a DTensor, spread "
            "over processes; leave it out of fully_shard (ignored_params), or give it to a group with use_muon=False"
        )


def _check_iteration(group: Mapping[str, Any]) -> None:
    if group["ns_steps"] >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")


# ---- the optimizer --------------------------------------------------------------------------------------------------


@takes_settings
class Muon(FusedOptimizer, TorchMuon):
    """Muon for matrices, and AdamW for all other parameters, with one window, one norm and one clip over both.

        m <- momentum m + (1 - momentum) g
        d <- momentum m + (1 - momentum) g          (without nesterov: m)
        X <- d / max(|d|, eps), orthogonalized by ns_steps Newton-Schulz iterations
        p <- p (1 - lr weight_decay) - lr ratio X

    Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), in torch's form; "match_rms_adamw": Liu et al. 2025
    (arXiv:2502.16982).

    Without groups of AdamW's it replaces `torch.optim.Muon`: same arguments, group keys, state names and checkpoints.
    Groups with `use_muon=False` take AdamW's options, defaults and states. Give them embeddings, output layers, gains
    and biases:

    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 9))
    >>> hidden = [model[1].weight]
    >>> others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    >>> groups = [{"params": hidden, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 3e-4}]
    >>> optimizer = Muon(groups, max_grad_norm=1.0)

    Args:
        params: matrices, or parameter groups; fp32, bf16 or fp16, and gradients may have another of these dtypes; or
            fp64 (`backend="torch"`), whose orthogonal factors are bf16 like all others.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, with torch's texts; wrong settings; parameters of other dtypes; a
            parameter of a Muon group that is no matrix, or is spread over processes (DTensor).
        RuntimeError: a backend asked for by name cannot run.
    """

    rules = (MuonRule, *Adam.rules)
    _own_step: ClassVar[OwnStep | None] = staticmethod(_step)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None:
        peer: Any = TorchMuon  # checks; given the parameters, it would refuse AdamW's
        checked = peer(
            [torch.empty(0, 0)], lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        )
        torch.optim.Optimizer.__init__(self, params, checked.defaults)
        self._configure(chosen(type(self).__name__, self.defaults, **settings))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint, as `FusedOptimizer` does.

        Raises:
            ValueError: a group is Muon's in one and AdamW's in the other; and as `FusedOptimizer.load_state_dict`.
        """
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        groups = groups if isinstance(groups, list) else []  # else refused below
        for index, (group, loaded) in enumerate(zip(self.param_groups, groups, strict=False)):
            if isinstance(loaded, Mapping) and MuonRule.fits(group) != MuonRule.fits(loaded):
                raise ValueError(
                    f"group {index} is Muon's in one of checkpoint and optimizer, and AdamW's in the other; make the "
                    "optimizer with the checkpoint's use_muon"
                )
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as `FusedOptimizer` does; with `use_muon=False` one of AdamW's.

        Raises:
            ValueError: as the constructor, and as `FusedOptimizer.add_param_group`.
        """
        if isinstance(param_group, dict) and MuonRule.fits(param_group):
            members = param_group["params"]
            if not isinstance(members, Tensor | set):
                param_group["params"] = members = list(members)
            for param in [members] if isinstance(members, Tensor) else members:
                _check_matrix(param[1] if isinstance(param, tuple) else param)
        elif isinstance(param_group, dict):
            names = inspect.signature(TorchAdamW).parameters.keys() - {"params"}
            options = {name: value for name, value in param_group.items() if name in names}
            for name, value in TorchAdamW([torch.empty(0)], **options).defaults.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
