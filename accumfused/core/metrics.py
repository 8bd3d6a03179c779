"""Norms and ratios of every tensor, group, and all.

In: the chunks' sums of squares of gradients, which the norm has taken; and those of weights and of their changes, which
the same verb takes of copies. A measured step goes over a few parameters at a time, so the copies stay small. Out: one
small tensor on the device, whose names are on the host. Nothing waits for the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused.core.norm import Measured, divisor_of, norms
from accumfused.core.observer import Observer
from accumfused.core.plan import Plan
from accumfused.core.protocol import Commit, Hypers, Outcome, Scaling, Step, moved
from accumfused.core.rows import Grads, Row
from accumfused.core.window import Window
from accumfused.formats.convert import load_weights
from accumfused.formats.numeric import ieee
from accumfused.rules.on_tensors import square_root

_Layout = tuple[tuple[Tensor, ...], Tensor, tuple[str, ...]]  # bounds, sums, names

_OF_EACH = ("grad_norm", "param_norm", "update_norm", "update_ratio")
_SUMS = 3  # of squares of gradients, of weights before the step, and of their changes
# Elements of the weights that are copied at a time. On a CPU they stay in a core's cache; elsewhere they take some
# 170 MiB, with what it takes to decode them.
_COPIED = {"cpu": 2**18}
_MOST_COPIED = 2**23
_OF_STEP = ("clip", "clip_share", "skipped_steps")


@dataclass(frozen=True)
class Metrics:
    """The numbers of one step; `str()` makes a table of them.

    Attributes:
        values: fp64, [len(names)], on the device; to read it waits for the device.
        names: of each value: "grad_norm", "group0/grad_norm", "layer.weight/grad_norm"... docs/guide/metrics.md lists
            them.
    """

    values: Tensor
    names: tuple[str, ...]

    def as_dict(self) -> dict[str, float]:
        """Returns the values by name; waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def __str__(self) -> str:
        """Makes a table with a line for all parameters, each group and each tensor; waits for the device."""
        numbers = self.as_dict()
        prefixes = [name.removesuffix(_OF_EACH[0]) for name in self.names if name.endswith(_OF_EACH[0])]
        names = [prefix.rstrip("/") or "all" for prefix in prefixes]
        width = max(map(len, names))
        lines = [" ".join([" " * width, *(f"{name:>12}" for name in _OF_EACH)])]
        for name, prefix in zip(names, prefixes, strict=True):
            lines.append(" ".join([name.ljust(width), *(f"{numbers[prefix + column]:12.4g}" for column in _OF_EACH)]))
        return "\n".join([*lines, ", ".join(f"{name} {numbers[name]:.4g}" for name in _OF_STEP)])


@dataclass
class _Measurement:
    """A measured step that is over."""

    sums: list[Tensor]  # fp64 [_SUMS, segments]: of all, of groups, of tensors
    scaling: Scaling
    skipped: Tensor
    coefficient: Tensor  # the smallest one
    clips: Tensor  # int64 [2]: clipped steps, and all that were measured and made
    skips: Tensor
    names: tuple[str, ...]

    def metrics(self) -> Metrics:
        with ieee():
            grads, params, changes = torch.cat(self.sums, dim=1)
            divisor, inverse = divisor_of(self.scaling)
            param_norm, change = (square_root(squares.to(self.scaling.dtype)).double() for squares in (params, changes))
            ratio = torch.where(param_norm == 0, 0.0, change / param_norm)
            param_norm = torch.where(self.skipped, torch.nan, param_norm)
            change, ratio = (torch.where(self.skipped, 0.0, number) for number in (change, ratio))
            of_each = torch.stack(
                [norms(grads, divisor, inverse, self.scaling.dtype), param_norm, change, ratio], dim=1
            )
            is_clipped = (self.coefficient < inverse.to(self.scaling.dtype)) & ~self.skipped
            clip = torch.where(is_clipped, self.coefficient.double() * divisor, 1.0)
            clipped, every = self.clips.double().unbind()
            share = torch.where(every > 0, clipped / every, 0.0)
            values = torch.cat([of_each.view(-1), torch.stack([clip, share, self.skips.double()])])
        return Metrics(values, self.names)


class Meter(Observer):
    """Measures every n-th step of an optimizer.

    Args:
        every: n.

    Attributes:
        steps: how many the training has made; see `FusedOptimizer.set_metrics_step`.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.steps = 0
        # Of each chunk of a step that waits for its update: [_SUMS, chunks], in the plan's dtype. None: not measured.
        self._sums: Tensor | None = None
        self._failure: Exception | None = None  # of a measurement, after some weights were written
        self._clips: Tensor | None = None
        self._last: _Measurement | None = None
        self._layouts: WeakKeyDictionary[Plan, _Layout] = WeakKeyDictionary()

    def takes_norm(self, plan: Plan) -> bool:
        """Tells whether the step to come is measured.

        Raises:
            RuntimeError: parameters are shards.
        """
        if plan.is_spread:
            raise RuntimeError("parameters are DTensors, and metrics do not add up over shards; leave metrics= out")
        return (self.steps + 1) % self._every == 0

    def before_step(self, measured: Measured, window: Window, groups: Sequence[Mapping[str, Any]]) -> None:
        """Begins to measure, if it is this step's turn."""
        plan, partials = measured.plan, measured.partials
        if partials is None or not self.takes_norm(plan):
            return
        if plan not in self._layouts:
            sums = torch.empty(_SUMS, plan.chunks, dtype=plan.dtype, device=plan.device)
            self._layouts[plan] = _bounds(plan), sums, _names(plan, groups)
        sums = self._layouts[plan][1].zero_()
        sums[0].copy_(partials)
        self._sums = sums

    def around(self, step: Step) -> Step:
        """Returns the step, or one that also takes the norms of the weights and of their changes."""
        return step if self._sums is None else partial(self._step_in_runs, step, self._sums)

    def _step_in_runs(
        self, step: Step, sums: Tensor, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit
    ) -> None:
        """Makes the step of some rows at a time, and takes the squares of their weights and changes.

        Once some weights are written, a measurement that fails (out of memory, say) ends the measuring alone.
        """
        nothing, (_, of_weights, of_changes) = Scaling(plan.device), sums.unbind()
        self._failure = None
        for number, run in enumerate(_runs(plan, grads)):
            some = Grads([grad if k in run else None for k, grad in enumerate(grads)])
            copies: Grads | None = None
            try:
                if self._failure is None:
                    copies = Grads(
                        [None if g is None else _weights(r).clone() for g, r in zip(some, plan.rows, strict=True)]
                    )
                    plan.backend.norm(plan, copies, of_weights, nothing)
            except Exception as error:
                if number == 0:  # nothing is written
                    raise
                self._failure, copies = error, None
            if number == 0:
                commit.begin()
            step(plan, some, hypers, outcome, Commit())
            if copies is None:
                continue
            try:
                for row, copy in zip(plan.rows, copies, strict=True):
                    if copy is not None:
                        torch.sub(_weights(row), copy, out=copy)
                plan.backend.norm(plan, copies, of_changes, nothing)
            except Exception as error:
                self._failure = error
        commit.end()

    def after_step(self, measured: Measured) -> None:
        """Adds up the sums if the step was measured; the rest can wait until it is read.

        Raises:
            Exception: that of a measurement; the metrics stay those of the last step that was measured.
        """
        plan, outcome = measured.plan, measured.outcome
        self.steps += 1
        if self._sums is None:
            return
        scaling, sums, self._sums = measured.scaling, self._sums, None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        bounds, _, names = self._layouts[plan]
        squares = [plan.backend.segment_norms(plan, sums.view(-1), bound).view(_SUMS, -1) for bound in bounds]
        clip = outcome.coefficient if outcome.coefficients is None else outcome.coefficients.amin()
        inverse: Any = 1.0 / scaling.normalization
        if scaling.device_normalization is not None:
            inverse = divisor_of(scaling)[1].to(scaling.dtype)
        is_made = ~outcome.skipped
        counts = torch.stack([(clip < inverse) & is_made, is_made])
        self._clips = counts.long() if self._clips is None else self._clips.to(counts.device) + counts
        self._last = _Measurement(squares, scaling, outcome.skipped, clip, self._clips, plan.skips.count.clone(), names)

    def read(self) -> Metrics | None:
        """Returns the metrics of the last measured step; None: there was none yet."""
        return None if self._last is None else self._last.metrics()


def _runs(plan: Plan, grads: Grads) -> Iterator[range]:
    """Yields ranges of rows whose weights are copied together: few elements, or one row."""
    begin = elements = 0
    most = _COPIED.get(plan.device.type, _MOST_COPIED)
    for index, (row, grad) in enumerate(zip(plan.rows, grads, strict=True)):
        size = 0 if grad is None else row.tensor.numel()
        if elements and elements + size > most:
            yield range(begin, index)
            begin, elements = index, 0
        elements += size
    yield range(begin, len(plan.rows))


@ieee()
def _weights(row: Row) -> Tensor:
    """Loads a parameter as the step sees it: fp32, from its master if it has one."""
    storage, tensor = row.storage, row.tensor.detach()
    master = None if storage is None else storage.master
    return load_weights(row.form, tensor, None if master is None else moved(master, tensor.device))


def _bounds(plan: Plan) -> tuple[Tensor, ...]:
    """Returns the bounds of all, of the groups, and of the tensors, in `_SUMS` concatenated lists of chunks."""
    tensors = [row.first_chunk for row in plan.rows]
    of_groups = [row.group for row in plan.rows]
    groups = [[*tensors, plan.chunks][bisect_left(of_groups, group)] for group in range(len(plan.rules))]
    parts = [k * plan.chunks for k in range(_SUMS)]
    bounds = [[part + first for part in parts for first in firsts] for firsts in ([0], groups, tensors)]
    return tuple(
        torch.tensor([*firsts, _SUMS * plan.chunks], dtype=torch.int64, device=plan.device) for firsts in bounds
    )


def _names(plan: Plan, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    tensors = [name for group in groups for name in group.get("param_names", ())]
    if len(tensors) != len(plan.rows):
        tensors = [f"param{index}" for index in range(len(plan.rows))]
    prefixes = ["", *(f"group{index}/" for index in range(len(groups))), *(f"{name}/" for name in tensors)]
    return (*(prefix + name for prefix in prefixes for name in _OF_EACH), *_OF_STEP)
