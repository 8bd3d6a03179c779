"""Launches the Triton kernels on torch's current stream; with TRITON_INTERPRET=1 they run on a CPU too, slowly.

The kernels read a plan as a table of 64-bit words: a ticket, then a row per parameter (see memory.py). A call adds its
operands to the plan's rows, and sends the table if they are not the last call's. No native module is needed.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.backends.cpu import address
from accumfused.backends.cuda import current_stream
from accumfused.backends.triton import kernels, memory, numeric
from accumfused.backends.triton.step import step_kernel
from accumfused.core.graphs import is_capturing
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling, at_hand
from accumfused.core.rows import Grads, has_memory
from accumfused.formats.kinds import DTYPES, Format, Storage
from accumfused.formats.numeric import ieee
from accumfused.rules import Rule, to_triton

_NO_SLOTS = Storage(None, None, None, [], []).slots()
_DTYPES = {dtype: index for index, dtype in enumerate(DTYPES)}

_PROGRAMS_PER_MULTIPROCESSOR = 4  # of kernels that have not been loaded; on AMD's GPUs, which tell less, of all
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # for every kernel of 32-lane warps; no contraction into FMA
# Warps of 64 lanes (AMD's CDNA; RDNA has 32): with 8 of them a thread had 2 elements of a row, so the norm had no
# 16-byte load. gfx942's machine code has been read, no such card has been timed.
WIDE_OPTIONS = {**OPTIONS, "num_warps": 4}
# Registers a thread, which decide how many programs fit a multiprocessor; with these hardly any spill. A step that
# rounds stochastically: Adam's would take 190 for INT8 states, so one program would fit; with 128 two do. A fold would
# take 98 for the noise of sums in bfloat16, and two would fit; with 80 three do, as without noise.
# (AMD's compiler does not know the option.)
NOISY_STEP_REGISTERS, FOLD_REGISTERS = 128, 80


@dataclass
class _PlanWords:
    """The words of one plan, which last as long as the plan."""

    kinds: list[tuple[type[Rule], Format]]  # all kinds of the rows
    rows: Tensor  # int64, on the host: the ticket's row and all others, without operands
    stream: int  # that made the plan
    # The last copy on the device of each kind of words, with its source: stream and words.
    sent: dict[str, tuple[tuple[int, list[int]], Tensor]] = field(default_factory=dict)


class TritonBackend:
    name = "triton"
    measures_folds = True

    def __init__(self) -> None:
        self._captured: list[Tensor] = []  # words on the host: a graph's replay sends them again
        self._words_of: WeakKeyDictionary[Plan, _PlanWords] = WeakKeyDictionary()
        self._programs: dict[tuple[Any, ...], int] = {}  # that a device holds at once, of a kernel with its constants

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    def prepare(self, plan: Plan) -> None:
        """Adds the native module's table if it loads: the table tells whether a plan still holds, kernels ignore it."""
        if compiled.unavailable is None:
            plan.add_table(compiled.module.Table)
        else:
            plan.reader.remember()
        self._words_of[plan] = _words_of(plan)

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        grads, sums = _addresses(fold.grads), _addresses(fold.sums)
        if any(map(operator.eq, grads, sums)):
            fold.refuse_overwritten()
        factor, at = (1.0, fold.factor.data_ptr()) if isinstance(fold.factor, Tensor) else (fold.factor, 0)
        with self._on(plan, [partials]):
            table = self._send(plan, "fold", [*grads, *_dtypes(fold.grads), *sums, *_dtypes(fold.sums)])
            commit.begin()
            self._launch(
                kernels.accumulate_kernel, plan, plan.chunks,
                table, len(plan.rows), plan.chunks, _bits(factor), at, address(fold.before), int(fold.overwrites),
                int(fold.copies), partials, address(fold.words), fold.salt, registers=FOLD_REGISTERS,
            )  # fmt: skip
        commit.end()

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = Outcome(torch.empty(3, dtype=torch.float32, device=plan.device), normed=partials is not None)
        read = None if partials is None else grads
        chunks_to_read = 0 if read is None else plan.chunks
        limit = scaling.max_grad_norm
        # A tensor without elements has no address, and without an address the kernel takes no norm.
        sums = partials if partials is None or partials.numel() else outcome.values
        with self._on(plan, [partials], *([] if read is None else [read])):
            table = self._send(plan, "ticket", [0]) if read is None else self._send(plan, "step", _operands(read))
            self._launch(
                kernels.norm_kernel, plan, chunks_to_read,
                table, len(plan.rows), plan.chunks, chunks_to_read, address(sums), _bits(scaling.normalization),
                address(scaling.device_normalization), address(scaling.found_inf), int(limit is not None),
                _bits(limit or 0.0), int(scaling.skips_nonfinite), outcome.values, address(scaling.skips),
            )  # fmt: skip
        return outcome

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        squares = torch.zeros(len(bounds) - 1, dtype=torch.float64, device=plan.device)
        if partials.numel() and len(squares):
            with self._on(plan, [partials, bounds]):
                self._launch(kernels.segment_norms_kernel, plan, len(squares), partials, bounds, len(squares), squares)
        return squares

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        """Launches once per kind of row: nearly always once, twice if small states stay fp32."""
        numbers = [[at_hand(value, plan.device) for value in values] for values in hypers]
        words = [word for values in numbers for word in _hyper_words(values)]
        with self._on(plan, [outcome.coefficients], grads):
            table = self._send(plan, "step", _operands(grads))
            hyper_table = self._send(plan, "hypers", words)
            commit.begin()
            for index, kind in enumerate(self._words_of[plan].kinds):
                self._launch(
                    step_kernel, plan, plan.chunks,
                    table, len(plan.rows), plan.chunks, hyper_table, index, outcome.values,
                    address(outcome.coefficients), constants=constants(*kind), registers=step_registers(kind[1]),
                )  # fmt: skip
        commit.end()

    def _on(self, plan: Plan, used: Iterable[Tensor | None], *lists: Grads) -> contextlib.AbstractContextManager[Any]:
        """Sets the current device, on which Triton launches, or the float mode, which its interpreter takes over.

        Another stream may have made the tensors in `used`, and gradients in `lists`: torch keeps their memory until
        this stream has read it. (What folds read, and what a window lets go of, the window keeps.)
        """
        stream, captures = _stream(plan.device)
        if (stream or self._words_of[plan].stream) and not captures:
            plan.record(*lists)
            for tensor in used:
                if tensor is not None:
                    tensor.record_stream(torch.cuda.current_stream(plan.device))
        return torch.cuda.device(plan.device) if plan.device.type == "cuda" else ieee()

    def _send(self, plan: Plan, key: str, words: list[int]) -> Tensor:
        """Copies words to the plan's device; "fold", "step": its rows, with the words as their operands.

        It returns the last call's copy if nothing has changed. A kernel may still read that one, so changed words go
        into fresh memory. A capturing graph gets its own copy, which its replay sends again.
        """
        plan_words, (stream, captures) = self._words_of[plan], _stream(plan.device)
        made_of = stream, words
        if not captures and key in plan_words.sent and plan_words.sent[key][0] == made_of:
            return plan_words.sent[key][1]
        operands = torch.frombuffer(array("q", words), dtype=torch.int64)
        table = plan_words.rows if key in ("fold", "step") else operands
        host = torch.empty_like(table, pin_memory=plan.device.type == "cuda").copy_(table)
        if table is plan_words.rows:
            columns = operands.view(-1, len(plan.rows)).T
            host[1:, memory.GRAD.value :][:, : columns.shape[1]] = columns
        copy = host.to(plan.device, non_blocking=True)
        if captures:
            self._captured.append(host)
        else:
            plan_words.sent[key] = made_of, copy
        return copy

    def _launch(
        self, kernel: Any, plan: Plan, chunks: int, *args: Any, constants: tuple[Any, ...] = (),
        registers: int | None = None,
    ) -> None:  # fmt: skip
        """Launches as many programs as run at once; at least one, because the last one finishes the work.

        How many do is known when the kernel has been loaded, which its first launch does.
        """
        key = kernel, plan.device, constants
        most = self._programs.get(key)
        programs = max(1, min(chunks, most or resident_programs(plan.device)))
        loaded = kernel[(programs,)](*args, *constants, **options(lanes(plan.device), registers))
        if most is None:
            self._programs[key] = resident_programs(plan.device, loaded)


@functools.cache
def lanes(device: torch.device) -> int:
    """Returns how many threads of a device are a warp."""
    return int(torch.cuda.get_device_properties(device).warp_size) if device.type == "cuda" else 32


def options(lanes: int, registers: int | None = None) -> dict[str, Any]:
    """Returns Triton's options for warps of so many lanes.

    Args:
        registers: at most, of a thread.
    """
    if lanes == 64:
        return WIDE_OPTIONS
    return OPTIONS if registers is None or torch.version.hip else {**OPTIONS, "maxnreg": registers}


def step_registers(form: Format) -> int | None:
    """Returns how many registers a thread of a step has at most."""
    return NOISY_STEP_REGISTERS if form.needs_noise else None


def constants(rule: type[Rule], form: Format) -> tuple[Any, ...]:
    """Returns the constants that Triton compiles into the step's kernel, in the order of its arguments."""
    first_moments = sum(name not in rule.second_moments for name in rule.states)
    numbers = len(rule.states), first_moments, int(form.weights), int(form.states), form.needs_noise
    return *to_triton.compiled(rule, numeric), *numbers


def resident_programs(device: torch.device, kernel: Any = None) -> int:
    """Counts the programs of a loaded kernel that run on a device at once; about, if it has not been loaded."""
    if device.type != "cuda":
        return 3  # interpreted, one after the other
    has: Any = torch.cuda.get_device_properties(device)
    if kernel is None or torch.version.hip:
        return _PROGRAMS_PER_MULTIPROCESSOR * int(has.multi_processor_count)
    # A warp gets registers by 256; a program gets shared memory by 128 bytes, and 1 kB more.
    warps, registers = kernel.metadata.num_warps, -(-kernel.n_regs * has.warp_size // 256) * 256
    by_registers = has.regs_per_multiprocessor // (registers * warps)
    by_memory = has.shared_memory_per_multiprocessor // (-(-kernel.metadata.shared // 128) * 128 + 1024)
    by_threads = has.max_threads_per_multi_processor // (warps * has.warp_size)
    return int(has.multi_processor_count * max(1, min(by_registers, by_memory, by_threads)))


def _stream(device: torch.device) -> tuple[int, bool]:
    """torch's current stream there, and whether a graph captures it. The default stream, 0, cannot be captured."""
    stream = current_stream(device)[1]
    return stream, stream != 0 and is_capturing(device)


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _dtypes(tensors: Grads) -> list[int]:
    return [memory.NO_GRAD.value if tensor is None else _DTYPES[tensor.dtype] for tensor in tensors]


def _operands(grads: Grads) -> list[int]:
    return _addresses(grads) + _dtypes(grads)


def _words_of(plan: Plan) -> _PlanWords:
    kinds = list(dict.fromkeys((row.rule, row.form) for row in plan.rows))
    rows = [[0] * memory.WORDS.value]
    operands = [0] * (memory.WORDS.value - memory.GRAD.value)
    for row in plan.rows:
        storage, tensor = row.storage, row.tensor
        slots = _NO_SLOTS if storage is None else storage.slots()
        param, kind = tensor.data_ptr() if has_memory(tensor) else 0, kinds.index((row.rule, row.form))
        words = tensor.numel(), row.first_chunk, row.group, kind, row.origin
        rows.append([param, *_addresses(slots), *words, *operands])
    return _PlanWords(kinds, torch.tensor(rows, dtype=torch.int64, device="cpu"), _stream(plan.device)[0])


def _hyper_words(values: list[float | Tensor]) -> list[int]:
    """Makes three words of each hyper-parameter: a number's bits, an fp32 number's address, an fp64 number's."""
    words = [0] * (memory.MAX_HYPERS.value * memory.HYPER_WORDS.value)
    for index, value in enumerate(values):
        kind = 0 if not isinstance(value, Tensor) else 1 if value.dtype == torch.float32 else 2
        words[index * memory.HYPER_WORDS.value + kind] = value.data_ptr() if isinstance(value, Tensor) else _bits(value)
    return words


def _bits(number: float) -> int:
    """Returns the bits of an fp64 number, as a signed 64-bit integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
