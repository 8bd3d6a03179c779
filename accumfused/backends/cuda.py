"""The CUDA kernels: csrc/cuda, over a copy of the plan's table on the GPU, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.backends.cpu import address, number
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling, at_hand
from accumfused.core.rows import Grads
from accumfused.rules import compile

_NONE = (0.0, 0, 0)  # in the place of a hyper-parameter that only other groups' rules have


class CudaBackend:
    """Runs the kernels of `module`, `_C.cuda` or an emulation of it; `table` is the class of that module's tables."""

    name = "cuda"
    measures_folds = True

    def __init__(self, module: Any = None, table: Any = None) -> None:
        self._c = module or compiled.module.cuda
        self._table = table or compiled.module.Table
        # GPU copies of a plan's table, by the id of the capturing graph (0: eager), with the stream that made each.
        self._copies: WeakKeyDictionary[Plan, dict[int, tuple[Tensor, Any, int]]] = WeakKeyDictionary()

    def prepare(self, plan: Plan, param_groups: Any, state: Any) -> None:
        plan.add_table(self._table, param_groups, state)
        self._copies[plan] = {}
        plan.functors = list(map(compile.index, plan.rules))

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        plan.point_at(fold.grads, fold.sums, overwrites=fold.overwrites)
        copy, stream = self._on_device(plan, lambda: [*fold.tensors(), partials, *fold.grads, *fold.sums])
        commit.with_launch(partial(
            copy.accumulate, plan.table, stream, number(fold.factor), address(fold.before), fold.overwrites,
            partials.data_ptr(),
        ))  # fmt: skip

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = Outcome(torch.empty(3, dtype=torch.float32, device=plan.device), normed=partials is not None)
        reads = partials is not None and grads is not None
        if reads:
            plan.point_at(grads)  # type: ignore[arg-type]
        copy, stream = self._on_device(plan, lambda: [partials, *(grads or [])])
        copy.norm(plan.table, stream, (
            reads, address(partials), scaling.normalization, address(scaling.device_normalization),
            address(scaling.found_inf), outcome.normed, scaling.max_grad_norm, scaling.skips_nonfinite,
            outcome.values.data_ptr(), address(scaling.skips),
        ))  # fmt: skip
        return outcome

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        squares = torch.empty(len(bounds) - 1, dtype=torch.float64, device=plan.device)
        copy, stream = self._on_device(plan, lambda: [partials, bounds])
        copy.segment_norms(stream, partials.data_ptr(), bounds.data_ptr(), len(squares), squares.data_ptr())
        return squares

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        plan.point_at(grads)
        copy, stream = self._on_device(plan, lambda: [*grads, outcome.coefficients])
        kept = [[at_hand(value, plan.device) for value in values] for values in hypers]
        stride = max(map(len, kept), default=0)
        flat = [hyper for values in kept for hyper in (*map(_hyper, values), *[_NONE] * (stride - len(values)))]
        commit.with_launch(partial(
            copy.step, plan.table, stream, flat, plan.functors, outcome.values.data_ptr(),
            address(outcome.coefficients),
        ))  # fmt: skip

    def _on_device(self, plan: Plan, used: Callable[[], Iterable[Tensor | None]]) -> tuple[Any, int]:
        """The table's copy for this call, and the stream; another stream may have made the tensors of `used()`.

        One copy serves all eager calls. A captured graph has its own copy, because its replays write it at any time.
        """
        index, stream = current_stream(plan.device)
        capture = self._c.capture_id(index, stream) if stream else 0  # the default stream cannot be captured
        known = self._copies[plan]
        if capture not in known:
            for old in [key for key in known if key != 0]:
                del known[old]
            groups = len(plan.rules)
            stride = max((len(rule.hyper_names) for rule in plan.rules), default=0)
            size = self._c.DeviceTable.bytes(plan.table, groups, stride)
            memory = torch.empty(size, dtype=torch.uint8, device=plan.device)
            known[capture] = (memory, self._c.DeviceTable(index, memory.data_ptr(), groups, stride), stream)
        memory, copy, made_on = known[capture]
        if (stream or made_on) and capture == 0:
            # Otherwise torch would reuse freed memory on the stream that made it, before this call has ended.
            for tensor in (memory, *(tensor for tensor in used() if tensor is not None)):
                tensor.record_stream(torch.cuda.current_stream(plan.device))
        return copy, stream


def current_stream(device: torch.device) -> tuple[int, int]:
    """The device's index, and torch's stream there."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream


def _hyper(value: float | Tensor) -> tuple[float, int, int]:
    if not isinstance(value, Tensor):
        return value, 0, 0
    return (0.0, value.data_ptr(), 0) if value.dtype == torch.float32 else (0.0, 0, value.data_ptr())
