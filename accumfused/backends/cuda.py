"""The CUDA kernels: csrc/cuda, over a copy of the plan's table on the GPU, on torch's current stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.backends.cpu import address, operands
from accumfused.core.graphs import is_capturing
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling, at_hand
from accumfused.core.rows import Grads
from accumfused.rules import compile


class CudaBackend:
    """Runs the kernels of `module`, `_C.cuda` or an emulation of it; `table` is the class of that module's tables."""

    name = "cuda"
    measures_folds = True

    def __init__(self, module: Any = None, table: Any = None) -> None:
        self._c = module or compiled.module.cuda
        self._table = table or compiled.module.Table
        self._tables: WeakKeyDictionary[Plan, _OnDevice] = WeakKeyDictionary()
        self._captured: dict[int, Tensor] = {}  # by address: memory that graphs read; they may outlive a plan

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    def prepare(self, plan: Plan) -> None:
        plan.add_table(self._table)
        plan.functors = list(map(compile.index, plan.rules))
        index, stream = current_stream(plan.device)
        host_table = plan.table_reader.table
        memory = torch.empty(self._c.DeviceTable.bytes(host_table), dtype=torch.uint8, device=plan.device)
        allocate = partial(_allocate, plan.device, self._captured)
        table = self._c.DeviceTable(index, memory.data_ptr(), host_table, stream, allocate)
        self._tables[plan] = _OnDevice(table, memory, stream)

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        rows = plan.table_reader.pointed_at(fold.grads, fold.sums, overwrites=fold.overwrites)
        table, stream = self._on_device(plan, [partials])
        commit.with_launch(partial(
            table.accumulate, rows, stream, *operands(fold, partials),
        ))  # fmt: skip

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = Outcome(torch.empty(3, dtype=torch.float32, device=plan.device), normed=partials is not None)
        reads, rows = partials is not None and grads is not None, plan.table_reader.table
        if partials is not None and grads is not None:
            plan.table_reader.pointed_at(grads)
        table, stream = self._on_device(plan, [partials], *([] if grads is None else [grads]))
        table.norm(
            rows, stream, reads, address(partials), scaling.normalization, address(scaling.device_normalization),
            address(scaling.found_inf), outcome.normed, scaling.max_grad_norm, scaling.skips_nonfinite,
            outcome.values.data_ptr(), address(scaling.skips),
        )  # fmt: skip
        return outcome

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        squares = torch.empty(len(bounds) - 1, dtype=torch.float64, device=plan.device)
        table, (stream, _) = self._on_device(plan, [partials, bounds])
        table.segment_norms(stream, partials.data_ptr(), bounds.data_ptr(), len(squares), squares.data_ptr())
        return squares

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        rows = plan.table_reader.pointed_at(grads)
        table, stream = self._on_device(plan, [outcome.coefficients], grads)
        # Tensors that are made here live until the launch.
        values = [[value if type(value) is float else at_hand(value, plan.device) for value in of] for of in hypers]
        numbers = [[value if type(value) is float else _hyper(value) for value in of] for of in values]
        commit.with_launch(partial(
            table.step, rows, stream, numbers, plan.functors, outcome.values.data_ptr(),
            address(outcome.coefficients),
        ))  # fmt: skip

    def _on_device(self, plan: Plan, used: Iterable[Tensor | None], *lists: Grads) -> tuple[Any, tuple[int, int]]:
        """Returns the table for this call, and the call's stream, with whether a graph captures it.

        Another stream may have made the tensors that the call uses. `lists` are gradients: thousands, perhaps. (What
        folds read, and what a window lets go of, the window keeps.)
        """
        data, stream = self._tables[plan], current_stream(plan.device)[1]
        captures = stream != 0 and is_capturing(plan.device)  # the default stream cannot be captured
        if captures:
            self._captured[data.memory.data_ptr()] = data.memory
        elif stream or data.stream:
            # Otherwise torch would reuse freed memory on the stream that made it, before this call has ended.
            plan.record(*lists)
            here = torch.cuda.current_stream(plan.device)
            for tensor in (data.memory, *used):
                if tensor is not None:
                    tensor.record_stream(here)
        return data.table, (stream, captures)


@dataclass
class _OnDevice:
    """A plan's table on the GPU."""

    table: Any  # a DeviceTable
    memory: Tensor
    stream: int  # that made it


def _allocate(device: torch.device, captured: dict[int, Tensor], size: int) -> tuple[int, int]:
    """Allocates memory for a graph that is being captured; returns its address, and the stream that may write it now.

    What the capturing stream allocates lies in the graph's pool, and other graphs of that pool may write there.
    """
    while True:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of the 32 that torch has
        with torch.cuda.stream(stream):
            if not is_capturing(device):
                memory = torch.empty(size, dtype=torch.uint8, device=device)
                captured[memory.data_ptr()] = memory
                return memory.data_ptr(), stream.cuda_stream


def current_stream(device: torch.device) -> tuple[int, int]:
    """Returns the device's index, and torch's stream there."""
    if device.type != "cuda":
        return 0, 0
    # As Triton and torch's Inductor ask for it: torch.cuda.current_stream() makes an object.
    return device.index, torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001


def _hyper(value: float | Tensor) -> float | tuple[int, int]:
    """Returns a number; or of a tensor, which a graph's replay reads anew, the address: of fp32, or of fp64."""
    if not isinstance(value, Tensor):
        return value
    return (value.data_ptr(), 0) if value.dtype == torch.float32 else (0, value.data_ptr())
