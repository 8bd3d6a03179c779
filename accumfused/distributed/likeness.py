"""Likeness: whether all processes have the same parameters and settings, told by 16 numbers of a message.

The message is one that travels anyway, so nothing waits for a device: where the processes differ, the window's divisor
is NaN, all of them skip its step, and each raises in its next window. On a CPU, where there is nothing to wait for,
they raise at once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accumfused.clip import LIMIT
from accumfused.core.graphs import is_capturing
from accumfused.core.plan import Plan
from accumfused.formats.kinds import SEED
from accumfused.settings import Settings

NUMBERS = 16  # each byte of a digest, and its square: as fp64 their sums are exact for 200,000 processes

_SHARED = (
    "max_grad_norm", "clip", "skip_above", "nonfinite", "master_weights", "state_dtype", "state_dtype_min_numel",
    "reduce_dtype", "noise_scale", "sum_dtype",
)  # fmt: skip

_REMEDY = (
    "give the optimizers of all processes the same parameters in the same order, and the same settings (rounding_seed "
    "too), and change them in all processes before the same window"
)

Description = list[tuple[str, str]]  # names of what is the same in all processes, and its values


class Likeness:
    """What this process's optimizer is, and whether the others are alike.

    Args:
        groups: the process groups over which, one after another, a message is added up.
        size: the number of all their processes.
    """

    def __init__(self, groups: Sequence[Any], size: int) -> None:
        self.groups, self.size = groups, size
        self.is_agreed = False  # all processes were alike once, and have not differed since
        self.has_changed = False  # since then, here
        self._key: tuple[Any, ...] = ()  # what the description was made for
        self._description: Description = []
        self._agreed: Description = []
        self._numbers = torch.empty(0, dtype=torch.float64, device="cpu")
        self._differ: Tensor | None = None  # the answer to the last message, or its copy on the host
        self._arrived: torch.cuda.Event | None = None  # recorded after the copy

    def describe(self, plan: Plan, settings: Settings, marks: Sequence[object], seed: int) -> None:
        """Describes this process's optimizer anew if it may be another.

        Args:
            marks: what plans do not tell of each parameter: whether it requires a gradient.
            seed: of the noise of parameters without a state.
        """
        groups = plan.optimizer().param_groups if plan.optimizer is not None else []
        shared = [(name, getattr(settings, name)) for name in _SHARED]
        limits = [group.get(LIMIT) for group in groups]
        if self._key and self._key[0]() is plan and self._key[1:] == (marks, shared, limits, seed):
            return
        self._key = weakref.ref(plan), marks, shared, limits, seed
        rows = [
            (
                tuple(row.param.shape), tuple(row.param.stride()), str(row.param.dtype), mark, row.rule.__name__,
                row.form.needs_noise and int(row.entries.get(SEED, seed)),
            )
            for row, mark in zip(plan.rows, marks, strict=True)
        ]  # fmt: skip
        self._description = [
            ("the number of parameters", str(len(rows))),
            *((name, str(value)) for name, value in shared),
            ("max_grad_norm of the groups", str(limits)),
            ("the seed of sums in bf16", str(plan.rounds_sums and plan.seed)),
            *((f"parameter {index}", str(row)) for index, row in enumerate(rows)),
        ]
        self.has_changed = self.is_agreed and self._description != self._agreed
        digest = hashlib.blake2b(repr(self._description).encode(), digest_size=NUMBERS // 2).digest()
        numbers = [float(power) for byte in digest for power in (byte, byte * byte)]
        self._numbers = torch.tensor(numbers, dtype=torch.float64, device=plan.device)

    def write(self, numbers: Tensor) -> None:
        """Adds this process's numbers to those of a message: fp64 [16]."""
        numbers.add_(self._numbers)

    def read(self, sums: Tensor) -> Tensor:
        """Tells from the sums of all processes' numbers whether some differ: bool, shape [].

        All n bytes are equal where n times the sum of their squares is the square of their sum.
        """
        sums, squares = sums.view(-1, 2).unbind(1)
        differ = (sums * sums != squares * self.size).any()
        if is_capturing(differ.device):
            return differ
        self._differ, self._arrived = differ, None
        if differ.is_cuda:
            self._differ = torch.empty_like(differ, device="cpu", pin_memory=True).copy_(differ, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(differ.device))
        return differ

    def have_differed(self) -> bool:
        """Tells whether the processes differed in the last message; it waits for that one."""
        if self._differ is None or is_capturing(self._numbers.device):
            return False
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._differ)

    def agree(self) -> None:
        """Notes that all processes are alike, and as this one is."""
        self.is_agreed, self.has_changed, self._agreed, self._differ = True, False, self._description, None

    def compare(self) -> None:
        """Sends each process the others' descriptions: if they are known to differ, or before anything is known.

        Raises:
            ValueError: on every process, if they differ.
        """
        differed, self.is_agreed, self._differ = self._differ is not None, False, None
        every: list[tuple[Any, list[Description]]] = []
        for group in self.groups:  # all of them: a process whose own group is alike belongs to another that waits
            descriptions: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(descriptions, self._description, group=group)
            every.append((group, descriptions))
        for group, (first, *others) in every:
            for place, other in enumerate(others, 1):
                _refuse_difference(first, other, dist.get_process_group_ranks(group), place)
        if differed:  # elsewhere in the mesh, or no longer
            raise ValueError(
                "parameters or settings of some processes differ, or have differed in the last window, whose step all "
                f"have skipped; {_REMEDY}"
            )
        self.agree()


def _refuse_difference(first: Description, other: Description, ranks: list[int], place: int) -> None:
    for (name, mine), (_, theirs) in zip(first, other, strict=False):
        if mine != theirs:
            raise ValueError(
                f"{name} is {theirs} in process {ranks[place]} and {mine} in process {ranks[0]} (of a parameter: "
                "shape, strides, dtype, whether it requires a gradient, its rule, the seed of its noise if there is "
                f"any); {_REMEDY}"
            )
