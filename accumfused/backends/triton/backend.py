"""Launches the Triton kernels on torch's current stream; with TRITON_INTERPRET=1 they run on a CPU too, slowly.

The kernels read a plan as a table of 64-bit words: a ticket, then a row per parameter (see memory.py). They need no
native module.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.backends.cpu import address, as_number_and_address, squares_of
from accumfused.backends.triton import kernels, memory, rules
from accumfused.backends.triton.step import step_kernel
from accumfused.core.plan import Plan
from accumfused.core.protocol import Fold, Hypers, Outcome, Scaling, at_hand
from accumfused.core.rows import Grads, has_memory
from accumfused.formats.kinds import DTYPES, Format, Storage
from accumfused.formats.numeric import ieee
from accumfused.rule import Rule

_NO_SLOTS = Storage(None, None, [], None, [], []).slots()

_PROGRAMS_PER_MULTIPROCESSOR = 4  # of 256 threads, as in csrc/cuda
_INTERPRETED_PROGRAMS = 3

OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # for every kernel; no contraction into FMA
# For a step that rounds stochastically. Adam's would take 190 registers a thread for INT8 states, so one program would
# fill a multiprocessor. With 128 registers two fit, and hardly any spill. (AMD's compiler does not know the option.)
NOISY_OPTIONS = OPTIONS if torch.version.hip else {**OPTIONS, "maxnreg": 128}


@dataclass
class _Sent:
    """A copy of words on the device, for calls on one stream."""

    words: list[int]
    stream: int
    copy: Tensor  # int64


@dataclass
class _Kept:
    """The backend's data of one plan, which lasts as long as the plan."""

    kinds: list[tuple[type[Rule], Format]]  # all kinds of the rows
    rows: list[tuple[int, ...]]  # each row's words, up to ORIGIN
    sent: dict[str, _Sent] = field(default_factory=dict)  # the "rows" and "hypers" of the last call

    def table(self, grads: Grads | None, accumulators: Grads | None = None, held: list[int] | None = None) -> list[int]:
        """The ticket, and every row's words in the order of memory.py."""
        words = [0]
        nothing: Grads = [None] * len(self.rows)
        rows = zip(self.rows, grads or nothing, accumulators or nothing, held or [0] * len(nothing), strict=True)
        for fixed, grad, accumulator, weight in rows:
            dtype = memory.NO_GRAD.value if grad is None else DTYPES.index(grad.dtype)
            words += (*fixed, address(grad), address(accumulator), weight, dtype)
        return words


class TritonBackend:
    name = "triton"
    measures_folds = True

    def __init__(self) -> None:
        self._captured: list[tuple[Tensor, Tensor]] = []  # words on the host, their copy: a graph's replay reads both
        self._kept: WeakKeyDictionary[Plan, _Kept] = WeakKeyDictionary()

    def prepare(self, plan: Plan, param_groups: Any, state: Any) -> None:
        """Adds the native module's table if it loads: the table tells whether a plan still holds, kernels ignore it."""
        if compiled.unavailable is None:
            plan.add_table(compiled.module.Table, param_groups, state)
        self._kept[plan] = _kept(plan)

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor) -> None:
        fold.refuse_overwritten()
        number, at = as_number_and_address(fold.scale)
        with _on(plan.device):
            table = self._send(plan, "rows", self._kept[plan].table(fold.grads, fold.accumulators, fold.held))
            _launch(
                kernels.accumulate_kernel, plan, plan.chunks,
                table, len(plan.rows), plan.chunks, fold.weights, fold.weight, _bits(number), at, partials,
                *squares_of(fold), fold.squares is not None,
            )  # fmt: skip

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        outcome = Outcome(torch.empty(3, dtype=torch.float32, device=plan.device), normed=partials is not None)
        reads = grads is not None and partials is not None
        chunks_to_read = plan.chunks if reads else 0
        limit = scaling.max_grad_norm
        # A tensor without elements has no address, and without an address the kernel takes no norm.
        sums = partials if partials is None or partials.numel() else outcome.values
        with _on(plan.device):
            table = self._send(plan, "rows", self._kept[plan].table(grads if reads else None))
            _launch(
                kernels.norm_kernel, plan, chunks_to_read,
                table, len(plan.rows), plan.chunks, chunks_to_read, address(sums), _bits(scaling.normalization),
                address(scaling.device_normalization), address(scaling.found_inf), int(limit is not None),
                _bits(limit or 0.0), int(scaling.skips_nonfinite), outcome.values, address(scaling.skips),
            )  # fmt: skip
        return outcome

    def count(self, plan: Plan, grads: Grads, partials: Tensor, counts: Tensor) -> None:
        if partials.numel():
            with _on(plan.device):
                table = self._send(plan, "rows", self._kept[plan].table(grads))
                arguments = table, len(plan.rows), plan.chunks, partials, counts
                _launch(kernels.count_kernel, plan, plan.chunks, *arguments)

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        squares = torch.zeros(len(bounds) - 1, dtype=torch.float64, device=plan.device)
        if partials.numel() and len(squares):
            with _on(plan.device):
                _launch(kernels.segment_norms_kernel, plan, len(squares), partials, bounds, len(squares), squares)
        return squares

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome) -> None:
        """Launches once per kind of row: nearly always once, twice if small states stay fp32."""
        kept = [[at_hand(value, plan.device) for value in values] for values in hypers]
        words = [word for values in kept for word in _hyper_words(values)]
        with _on(plan.device):
            table = self._send(plan, "rows", self._kept[plan].table(grads))
            hyper_table = self._send(plan, "hypers", words)
            for index, kind in enumerate(self._kept[plan].kinds):
                _launch(
                    step_kernel, plan, plan.chunks,
                    table, len(plan.rows), plan.chunks, hyper_table, index, outcome.values,
                    address(outcome.coefficients), address(outcome.changes),
                    *constants(*kind, measured=outcome.changes is not None),
                    options=NOISY_OPTIONS if kind[1].needs_noise else OPTIONS,
                )  # fmt: skip

    def _send(self, plan: Plan, key: str, words: list[int]) -> Tensor:
        """A copy of the words on the plan's device; unchanged words reuse the last call's copy.

        A kernel may still read the old copy, so changed words go into fresh memory. A capturing graph gets its own
        copy, which its replay sends again.
        """
        if plan.device.type != "cuda":
            return torch.tensor(words, dtype=torch.int64, device=plan.device)
        captures = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(plan.device).cuda_stream
        sent = self._kept[plan].sent.get(key)
        if not captures and sent is not None and sent.stream == stream and sent.words == words:
            return sent.copy
        host = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=True)
        copy = host.to(plan.device, non_blocking=True)
        if captures:
            self._captured.append((host, copy))
        else:
            self._kept[plan].sent[key] = _Sent(words, stream, copy)
        return copy


def constants(rule: type[Rule], form: Format, measured: bool = False) -> tuple[Any, ...]:
    """The constants that Triton compiles into the step's kernel, in the order of its arguments."""
    first_moments = sum(name not in rule.second_moments for name in rule.states)
    numbers = (
        len(rule.tensor_states),
        len(rule.states),
        first_moments,
        int(form.weights),
        int(form.states),
        form.needs_noise,
        measured,
    )
    return *rules.compiled(rule), *numbers


def _launch(kernel: Any, plan: Plan, chunks: int, *args: Any, options: dict[str, Any] = OPTIONS) -> None:
    """Launches at least one program, because the last one finishes the work."""
    on_gpu = plan.device.type == "cuda"
    limit = _resident_programs(plan.device) if on_gpu else _INTERPRETED_PROGRAMS
    kernel[(max(1, min(chunks, limit)),)](*args, **options)


@functools.cache
def _resident_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_MULTIPROCESSOR


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Sets the current device, on which Triton launches, or the float mode, which its interpreter takes over."""
    return torch.cuda.device(device) if device.type == "cuda" else ieee()


def _kept(plan: Plan) -> _Kept:
    kinds = list(dict.fromkeys((row.rule, row.form) for row in plan.rows))
    rows = []
    for row in plan.rows:
        slots = _NO_SLOTS if row.storage is None else row.storage.slots()
        param, kind = row.tensor.data_ptr() if has_memory(row.tensor) else 0, kinds.index((row.rule, row.form))
        words = row.tensor.numel(), row.first_chunk, row.group, kind, row.origin
        rows.append((param, *map(address, slots), *words))
    return _Kept(kinds, rows)


def _hyper_words(values: list[float | Tensor]) -> list[int]:
    """A group's hyper-parameters, three words each: a number's bits, an fp32 number's address, an fp64 number's."""
    words = [0] * (memory.MAX_HYPERS.value * memory.HYPER_WORDS.value)
    for index, value in enumerate(values):
        kind = 0 if not isinstance(value, Tensor) else 1 if value.dtype == torch.float32 else 2
        words[index * memory.HYPER_WORDS.value + kind] = value.data_ptr() if isinstance(value, Tensor) else _bits(value)
    return words


def _bits(number: float) -> int:
    """The bits of an fp64 number, as a signed 64-bit integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
