"""What the engine and its backends say to each other: folds, the inputs of a coefficient, outcomes, commits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from accumfused.arguments import checked_positive
from accumfused.core.rows import Grads
from accumfused.formats.shards import replicated
from accumfused.rules import Rule

Hypers = list[tuple[float | Tensor, ...]]  # per group, in the order of its rule's `hypers`; a tensor has one element
Number = float | Tensor  # a tensor has one element, which nobody reads
Call = partial  # of a C function


def run(calls: Iterable[Call[Any]]) -> None:
    """Calls C functions one after the other. No bytecode runs in between, so Python delivers no signal there."""
    deque(map(partial.__call__, calls), maxlen=0)


@dataclass(frozen=True)
class Commit:
    """What becomes true together with a verb's writes, as calls of C functions.

    Ctrl-C raises between two bytecodes. So where one call is the whole launch, all is as before it or as after it.

    Args:
        ends: what is true when all is written.
        begins: where a verb launches in several calls: what is true when only some is.
    """

    ends: Sequence[Call[Any]] = ()
    begins: Sequence[Call[Any]] = ()

    def with_launch(self, launch: Call[Any]) -> None:
        """Runs a launch that is one call of a C function."""
        run([launch, *self.ends])

    def begin(self) -> None:
        """Before the first write of several."""
        run(self.begins)

    def end(self) -> None:
        """Behind the last one."""
        run(self.ends)


ALONE = Commit()  # nothing follows a verb


@dataclass
class Fold:
    """One launch of `accumulate`.

    sum <- sum + factor * grad; with `overwrites` sum <- factor * grad, where a gradient may be the sum itself. A factor
    of 0 leaves a sum as it is, overwrites it with 0, and reads no gradient: NaN times 0 is NaN.

    Args:
        grads: None: the sum is left alone, but for `before`.
        sums: in their rows' `Format.dtype`; None: left alone.
        factor: rounded once to the plan's dtype; a tensor is fp64, of shape [].
        before: while this is 0 the sums hold nothing: they become their gradients, or 0 without one. fp64, shape [].
    """

    grads: Grads
    sums: Grads
    factor: Number
    before: Tensor | None = None
    overwrites: bool = False

    @property
    def copies(self) -> bool:
        """Whether gradients are copied as they are; nothing is measured then."""
        return self.overwrites and not isinstance(self.factor, Tensor) and self.factor == 1.0

    def tensors(self) -> list[Tensor]:
        """The numbers that the device holds."""
        return [number for number in (self.factor, self.before) if isinstance(number, Tensor)]

    def refuse_overwritten(self) -> None:
        """Refuses gradients in the memory of their sums, for backends without a table (a table checks that)."""
        for row, (grad, accumulator) in enumerate(zip(self.grads, self.sums, strict=True)):
            if grad is None or accumulator is None or self.overwrites or not grad.numel():
                continue
            if grad.data_ptr() == accumulator.data_ptr():
                raise overwritten(row)


@dataclass
class Scaling:
    """The inputs of the coefficient, beside the norm: see `Backend.norm`."""

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
            known = self.device_normalization
            # The product of two negative divisors would look valid.
            self.device_normalization = (
                divisor if known is None else torch.where(divisor > 0, known * divisor, math.nan)
            )
        else:
            self.normalization *= divisor


@dataclass
class Outcome:
    """One step's numbers on the device: `values` is [coefficient, norm, skipped], in the plan's dtype."""

    values: Tensor
    normed: bool = True
    spends_grads: bool = False  # nobody reads the gradients after the step, so it may overwrite them
    coefficients: Tensor | None = None  # [rows]: each row's own, in place of the one
    is_above: Tensor | None = None  # bool, shape []: skipped because of a finite norm alone
    history: Tensor | None = None  # of clipping, with this step's norm: kept if the step is made

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
        return self.skipped if self.is_above is None else self.skipped & ~self.is_above


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


class Release(Protocol):
    """Takes gradients, or sums, during backward: see loop/contributions.py."""

    def follow(self, params: Any = None) -> Any: ...
    def expecting(self, weight: Number | None, last: bool) -> AbstractContextManager[None]: ...
    def end(self, weight: Number | None, *, in_loss: bool) -> None: ...
    def end_before_step(self) -> None: ...
    def forget(self) -> None: ...
    def contribute(self, param: Tensor) -> tuple[Tensor, bool] | None: ...


@dataclass(frozen=True)
class Divisors:
    """The divisors of one step beside its window's weights, and the flag by which a scaler skips it."""

    normalizer: Number | None = None
    grad_scale: Number | None = None
    found_inf: Number | None = None  # not 0 if a gradient is not finite; None: nobody has checked
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
        """These divisors and the flag, on a device, for an outcome of this dtype."""
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
    """A number, or an fp32 or fp64 tensor here that a kernel reads, so that a graph's replay follows its changes."""
    if not isinstance(value, Tensor) or (value.device != device and value.device.type == "cpu"):
        return float(value)
    value = moved(value, device)
    return value if value.dtype in (torch.float32, torch.float64) else value.double()


def overwritten(row: int) -> RuntimeError:
    """The error of a gradient in memory that the window has adopted: its accumulator holds no sum any more."""
    return RuntimeError(
        f"the gradient of parameter {row} lies where the window's sum does, so one has overwritten the other; call "
        "zero_grad(), and give every micro-batch a gradient in memory of its own (p.grad = buffer.clone())"
    )
