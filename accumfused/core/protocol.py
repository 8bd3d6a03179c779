"""What the engine says to its partners, and they to it: backends, exchanges, optimizers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from accumfused.arguments import checked_positive
from accumfused.core.rows import Grads, overwritten
from accumfused.formats.shards import replicated
from accumfused.rules import Rule

if TYPE_CHECKING:
    from accumfused.core.plan import Plan

Hypers = list[tuple[float | Tensor, ...]]  # per group, in the order of its rule's `hypers`; a tensor has one element
Number = float | Tensor  # a tensor has one element, and is not read
Call = partial  # of a C function


def run(calls: Iterable[Call[Any]]) -> None:
    """Calls C functions one after the other. No bytecode runs in between, so Python delivers no signal there."""
    deque(map(partial.__call__, calls), maxlen=0)


@dataclass(frozen=True)
class Commit:
    """Records what a verb has written, together with the writes: a draft takes the window's place, say.

    Ctrl-C raises between two bytecodes, so never within `run`, which is one call of a C function. After Ctrl-C during a
    step (a fold is alike) the next call finds

        before any launch:         no weight written, the window open; the step can be made again
        at the only launch:        the same, or all weights written and the window over: `run` makes both or neither
        between several launches:  some weights written, the window BROKEN: it refuses all calls but zero_grad()
        after the last launch:     all weights written, and the window over, or BROKEN until `end` has run

    "cpu" and "cuda" have one launch. "triton", "torch", several devices, Muon and measured steps have several. An error
    that a launch raises is as Ctrl-C before it.

    Args:
        ends: calls of C functions that record that all is written.
        begins: calls that record, before the first of several launches, that only some may be written.
    """

    ends: Sequence[Call[Any]] = ()
    begins: Sequence[Call[Any]] = ()

    def with_launch(self, launch: Call[Any]) -> None:
        """Makes the only launch, a call of a C function, and records it, in one call."""
        run([launch, *self.ends])

    def begin(self) -> None:
        """Records that a first launch of several follows."""
        run(self.begins)

    def end(self) -> None:
        """Records that the last launch is made, or that there is none to make."""
        run(self.ends)


ALONE = Commit()  # records nothing


@dataclass
class Fold:
    """The operands of one launch of `accumulate`.

    sum <- sum + factor * grad; with `overwrites` sum <- factor * grad, where a gradient may be the sum itself. A factor
    of 0 leaves a sum as it is, overwrites it with 0, and reads no gradient: NaN times 0 is NaN.

    Args:
        grads: None: the sum stays as it is, but for `before`.
        sums: in fp32 (fp64), or in bf16, rounded at each addition; None: there is none to write.
        factor: rounded once to the plan's dtype; a tensor is fp64, of shape [].
        before: the window's total weight before this micro-batch, fp64, shape []. While it is 0 the sums hold nothing:
            they become their gradients, or 0 without one. None: the sums hold something.
    """

    grads: Grads
    sums: Grads
    factor: Number
    before: Tensor | None = None
    overwrites: bool = False
    words: Tensor | None = None  # int64 [plan.chunks], `SumNoise.words`; None: sums in bf16 are rounded to nearest
    salt: int = 0  # of this process, for them

    @cached_property
    def copies(self) -> bool:
        """Whether gradients are copied as they are; nothing is measured then."""
        if not self.overwrites or isinstance(self.factor, Tensor) or self.factor != 1.0:
            return False
        return self.words is None or not any(
            s is not None and s.dtype is torch.bfloat16 and g is not None and g.dtype is not s.dtype
            for g, s in zip(self.grads, self.sums, strict=True)
        )

    def part(self, grads: Grads, sums: Grads, **others: Any) -> Fold:
        """Returns a fold of some rows, which is measured, or not, as the whole is."""
        part = replace(self, grads=grads, sums=sums, **others)
        part.copies = self.copies
        return part

    def tensors(self) -> list[Tensor]:
        """Lists the numbers that the device holds."""
        return [number for number in (self.factor, self.before, self.words) if isinstance(number, Tensor)]

    def refuse_overwritten(self) -> None:
        """Refuses gradients in the memory of their sums, for backends without a table (a table checks that)."""
        for row, (grad, accumulator) in enumerate(zip(self.grads, self.sums, strict=True)):
            if grad is None or accumulator is None or self.overwrites or not grad.numel():
                continue
            if grad.data_ptr() == accumulator.data_ptr():
                raise overwritten(row)


@dataclass
class Scaling:
    """The inputs of the coefficient, except the norm: see `Backend.norm`."""

    device: torch.device
    normalization: float = 1.0
    device_normalization: Tensor | None = None  # fp64, shape []; multiplies it
    max_grad_norm: float | None = None
    skips_nonfinite: bool = False
    found_inf: Tensor | None = None  # fp32, shape []
    skips: Tensor | None = None  # int64, shape []: counts skipped steps
    dtype: torch.dtype = torch.float32  # of the outcome

    def normalize(self, divisor: float | Tensor) -> None:
        """Divides the gradients by one more number; a tensor is not read."""
        if isinstance(divisor, Tensor):
            divisor = on_device(divisor, self.device, torch.float64)
            product = self.device_normalization
            # The product of two negative divisors would look valid.
            self.device_normalization = (
                divisor if product is None else torch.where(divisor > 0, product * divisor, math.nan)
            )
        else:
            self.normalization *= divisor


@dataclass
class Outcome:
    """One step's numbers on the device: `values` is [coefficient, norm, skipped], in the plan's dtype."""

    values: Tensor
    normed: bool = True
    spends_grads: bool = False  # the step may overwrite the gradients, which are not read after it
    coefficients: Tensor | None = None  # [rows]: each row's own, in place of the one
    is_above: Tensor | None = None  # bool, shape []: skipped because of a finite norm alone
    dropped: Tensor | None = None  # bool, shape []: the window left out a micro-batch that was not finite
    history: Tensor | None = None  # of clipping, with this step's norm; it counts if the step is made

    @property
    def coefficient(self) -> Tensor:
        return self.values[0]

    def coefficient_of(self, row: int) -> Tensor:
        return self.values[0] if self.coefficients is None else self.coefficients[row]

    @property
    def norm(self) -> Tensor:
        return self.values[1]

    @property
    def skipped(self) -> Tensor:
        return self.values[2] != 0

    @property
    def overflowed(self) -> Tensor:
        """Whether a loss scale is too large for the step's gradients, those of dropped micro-batches among them."""
        overflowed = self.skipped if self.is_above is None else self.skipped & ~self.is_above
        return overflowed if self.dropped is None else overflowed | self.dropped.to(overflowed.device)


class Backend(Protocol):
    """Runs the three verbs: accumulate, norm and step."""

    name: str
    measures_folds: bool  # else `norm` is given the accumulators

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has captured a launch: its replays read and write the same memory."""

    def prepare(self, plan: Plan) -> None:
        """Adds this backend's tables to a new plan."""

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        """Adds gradients to sums. If it measures folds, and does not copy, it writes the squares of sums into partials.

        Those of rows without a gradient stay right: they are 0 where `before` makes the sum 0. In the plan's dtype,
        [plan.chunks].
        """

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        """Reduces the sums of squares to one coefficient on the device.

        norm = sqrt(sum(partials)) / normalization
        coefficient = min(1, max_grad_norm / (norm + 1e-6)) / normalization

        Args:
            grads: gradients whose sums of squares partials lack, if any; None leaves a row's partials alone.
            partials: None: it takes no norm, and only the normalization enters.
        """

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        """Adds up the sums of squares of runs of chunks, each run as `norm` does all chunks: fp64 [segments].

        Args:
            partials: as `norm` leaves them.
            bounds: int64 [segments + 1], on the plan's device; segment i begins at chunk bounds[i] and ends before
                bounds[i + 1].
        """

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        """Updates parameters, states and step counts; writes nothing if the outcome is a skip."""


class Pending(Protocol):
    """Folds that a backend makes while the loop goes on, in their order: see backends/offload.py."""

    @property
    def nbytes(self) -> int:
        """The memory through which their gradients travel."""

    def wait(self) -> None:
        """Waits for all folds so far.

        Raises:
            RuntimeError: one of them has failed, so the window is lost; `drop` ends that.
        """

    def drop(self, *, memory: bool) -> None:
        """Ends the window whose folds these are: forgets a failure; and lets go of its memory, if asked."""


@dataclass
class Segments:
    """The runs of rows that have a norm: parameter groups, or single rows."""

    bounds: Tensor  # int64 [segments + 1]: their first chunks, and the number of all
    row_bounds: Tensor  # int64 [rows + 1]: the rows' first chunks, and the number of all
    first_rows: Tensor | None  # int64 [segments + 1]: their first rows, and the number of all; None: rows are segments
    of_rows: Tensor | None  # int64 [rows]: each row's segment; None: rows are segments

    @classmethod
    def of(cls, plan: Plan, *, per_group: bool) -> Segments:
        """Makes the segments of a plan; their tensors lie on its device."""

        def tensor(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=plan.device)

        chunks = [*(row.first_chunk for row in plan.rows), plan.chunks]
        if not per_group:
            return cls(tensor(chunks), tensor(chunks), None, None)
        groups = [row.group for row in plan.rows]
        first = [bisect_left(groups, group) for group in range(len(plan.rules) + 1)]
        return cls(tensor([chunks[row] for row in first]), tensor(chunks), tensor(first), tensor(groups))


@dataclass(frozen=True)
class Agreement:
    """The agreement of several processes on a window that ends.

    Attributes:
        divisor: of the window's sums, once they are added up: fp64, shape [].
        missing: flags parameters that have gradients in other processes only.
        others_close: whether the others close the window with `last`: bool, shape []. None: this process has
            micro-batches, so it knows.
        stand_ins: what this process adds up in place of its sums, because its parameters have become others than those
            of all processes; None: its sums.
    """

    divisor: Tensor
    missing: list[bool]
    others_close: Tensor | None = None
    stand_ins: list[Tensor] | None = None


class Exchange:
    """How this process's gradients, weights and norms meet those of others; here they meet none.

    distributed/exchange.py chooses the one of an optimizer: `Alone`, `Summed` or `Means`.
    """

    adds_up = False  # it adds up all processes' accumulators: p.grad is this process's own
    has_means = False  # gradients are means over processes before they are folded
    is_alone = True  # neither
    bundled_bytes = 0  # accumulators below this travel together
    rank = 0  # whose sums have rounding noise of their own

    def check(self, plan: Plan, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Refuses, before each micro-batch, gradients that it would misread (as means, say)."""

    def agree(
        self, plan: Plan, total: float | Tensor, is_weighted: bool | None, present: list[bool], *, seed: int, last: bool
    ) -> Agreement | None:
        """Agrees with other processes on a window that ends; None: there is nothing to agree on."""
        return None

    def add_up(self, flats: Iterable[Tensor]) -> None:
        """Replaces flat tensors, accumulators or fp64 numbers, by their sums over all processes."""

    def total(self, plan: Plan, total: float | Tensor, is_weighted: bool | None) -> float | Tensor:
        """Returns the sum of weights that a checkpoint of an open window holds."""
        return total

    def shares_norm(self, plan: Plan) -> bool:
        """Tells whether a norm is one over several processes: then all of them take it in each step."""
        return False

    def found_inf(self, found_inf: Tensor | None) -> Tensor | None:
        """Combines the flags of scalers in all processes that share the norm."""
        return found_inf

    def segment_norms(self, plan: Plan, partials: Tensor, segments: Segments) -> Tensor:
        """Takes norms as `Backend.segment_norms` does, over all shards of the parameters."""
        return plan.backend.segment_norms(plan, partials, segments.bounds)

    def sums_of_squares(self, plan: Plan, partials: Sequence[Tensor]) -> Tensor:
        """Adds up each of these lists of chunks' sums, over all shards of the parameters: fp64 [lists]."""
        bounds = torch.arange(len(partials) + 1, device=plan.device) * plan.chunks
        return plan.backend.segment_norms(plan, torch.cat(list(partials)), bounds)


Step = Callable[["Plan", Grads, Hypers, Outcome, Commit], None]  # as `Backend.step`


class Owner(Protocol):
    """The optimizer that an engine works for, as torch.optim shows it."""

    param_groups: list[dict[str, Any]]
    state: Any
    defaults: dict[str, Any]
    rules: ClassVar[tuple[type[Rule], ...]]
    _own_step: ClassVar[OwnStep | None]
    _engine: Any

    @classmethod
    def _rule_of(cls, group: Mapping[str, Any]) -> type[Rule]: ...
    def _refuse_gradients(self) -> None: ...


class OwnStep(Protocol):
    """An optimizer's step in place of the kernels'."""

    def __call__(self, optimizer: Any, engine: Any, measured: Any, /) -> None: ...


class DuringBackward(Protocol):
    """Takes gradients, or sums, during backward: see loop/contributions.py."""

    def follow(self, params: Any = None) -> Any: ...
    def expecting(self, weight: Number | None, last: bool) -> AbstractContextManager[None]: ...
    def end(self, weight: Number | None, *, in_loss: bool) -> None: ...
    def end_before_step(self) -> None: ...
    def forget(self) -> None: ...
    def contribute(self, param: Tensor) -> tuple[Tensor, bool] | None: ...


@dataclass(frozen=True)
class Divisors:
    """The divisors of one step, except its window's weights, and the flag by which a scaler skips it."""

    normalizer: Number | None = None
    grad_scale: Number | None = None
    found_inf: Number | None = None  # not 0 if a gradient is not finite; None: not checked
    for_scaler: bool = False  # an overflow then raises no error
    is_shared: bool = False  # the norm will be one over several optimizers

    @classmethod
    def of(cls, owner: Any, normalizer: Number | None, scaler: Divisors | None, *, is_shared: bool = False) -> Divisors:
        """Collects a step's divisors. Without `scaler` it reads the `grad_scale` and `found_inf` of torch's scalers.

        Raises:
            ValueError, TypeError: a scale that is not a number > 0.
        """
        if scaler is not None:
            scale, found_inf, for_scaler = scaler.grad_scale, scaler.found_inf, scaler.for_scaler
        else:
            scale, found_inf = getattr(owner, "grad_scale", None), getattr(owner, "found_inf", None)
            for_scaler = found_inf is not None
        if scale is not None:
            scale = checked_positive(scale, "grad_scale")
        return cls(normalizer, scale, found_inf, for_scaler, is_shared)

    def scaling(self, device: torch.device, dtype: torch.dtype) -> Scaling:
        """Moves the divisors and the flag to a device, for an outcome of this dtype."""
        scaling = Scaling(device, dtype=dtype)
        if self.found_inf is not None:
            found_inf = replicated(torch.as_tensor(self.found_inf, dtype=torch.float32))
            scaling.found_inf = on_device(found_inf, device, torch.float32)
        for divisor in (self.grad_scale, self.normalizer):
            if divisor is not None:
                scaling.normalize(divisor)
        return scaling


def on_device(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Moves a one-element tensor to the device, with shape []. Nothing waits for a GPU.

    From the CPU it goes as a number: a captured graph would copy from memory that soon holds something else.
    """
    if value.device.type == "cpu" and device.type != "cpu":
        return torch.full((), value.item(), dtype=dtype, device=device)
    return value.to(device=device, dtype=dtype, non_blocking=device.type != "cpu").reshape(())


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of another device: without a wait towards a GPU; the CPU waits, because it reads the values."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def at_hand(value: float | Tensor, device: torch.device) -> float | Tensor:
    """Returns a number, or an fp32 or fp64 tensor here that a kernel reads: a graph's replay follows its changes."""
    if not isinstance(value, Tensor) or (value.device != device and value.device.type == "cpu"):
        return float(value)
    value = moved(value, device)
    return value if value.dtype in (torch.float32, torch.float64) else value.double()
