"""Transfers between a card and the host: slots of host memory, copies, and the thread that works on what has arrived.

A slot is filled by copies on a stream of their own, which waits for the work before it. The worker waits for the copy,
computes, perhaps copies back, and returns the slot. Tasks run one after the other, in the order in which they came.
Where the card is the CPU, a copy is over when the call returns, and all else is the same.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.core.streams import has_streams

Wait = Callable[[], None]

SLOTS = 3  # one is filled, one is worked on, one goes back
_ALIGNMENT = 64  # bytes: that of the kernels' widest accesses


class Slot:
    """Host memory for a run of tensors."""

    def __init__(self) -> None:
        self.filled: Wait = _nothing  # waits until all that was on its way has come
        self.sent: Wait = _nothing  # waits until what went back from here has left
        self._memory: Tensor | None = None
        self._is_pinned = False

    @property
    def nbytes(self) -> int:
        """Its memory in bytes. torch takes a power of two of pinned memory."""
        size = 0 if self._memory is None else self._memory.nbytes
        return 1 << (size - 1).bit_length() if size and self._is_pinned else size

    def places_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns memory for copies of dense tensors, each in its layout."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        pins = self._is_pinned or any(tensor.is_cuda for tensor in tensors)
        if self._memory is None or self._memory.nbytes < sum(sizes) or pins is not self._is_pinned:
            self._memory = None  # before its successor comes
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pins)
            self._is_pinned = pins
        places, offset = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype)
            places.append(flat.as_strided(tensor.shape, tensor.stride()))
            offset += size
        return places


class Copies:
    """Copies of one direction each, on streams of their own: a card sends and receives at a time."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def down(self, sources: Sequence[Tensor], places: Sequence[Tensor], *, stays: bool = False) -> Wait:
        """Begins to copy tensors to the host, after all work so far; returns the call that waits for it.

        The sources may be freed at once.

        Args:
            stays: their memory may be written again, by work on the current streams, which wait.
        """
        return self._copy(sources, places, "down", [source.device for source in sources], stays=stays)

    def up(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        """Begins to copy tensors back from the host, which must not change them before the returned call has waited."""
        return self._copy(sources, targets, "up", [target.device for target in targets])

    def join(self) -> None:
        """Makes the current stream of each card wait for all copies to it."""
        for (device, way), stream in self._streams.items():
            if way == "up":
                torch.cuda.current_stream(device).wait_stream(stream)

    def _copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], way: str, cards: list[torch.device], *,
        stays: bool = False,
    ) -> Wait:  # fmt: skip
        events = list[torch.cuda.Event]()
        for card in dict.fromkeys(cards):
            pairs = [pair for pair, here in zip(zip(sources, targets, strict=True), cards, strict=True) if here == card]
            if not has_streams(card):
                for source, target in pairs:
                    target.copy_(source)
                continue
            stream = self._streams.get((card, way))
            if stream is None:
                stream = self._streams[card, way] = torch.cuda.Stream(card)  # type: ignore[no-untyped-call]
            if way == "down":  # the host has waited for what goes up
                stream.wait_stream(torch.cuda.current_stream(card))
            with torch.cuda.device(card), torch.cuda.stream(stream):  # else it would leave the thread at card 0
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                    if way == "down":
                        source.record_stream(stream)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a wait takes no core
                event.record(stream)
            if stays:
                torch.cuda.current_stream(card).wait_event(event)
            events.append(event)
        return _waiting(events) if events else _nothing


def _waiting(events: list[torch.cuda.Event]) -> Wait:
    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def _nothing() -> None:
    """There is nothing to wait for."""


class Worker:
    """A thread that runs tasks in turn, each with a slot. After one has failed, none runs until `drop`."""

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(SLOTS)]
        self._is_idle = True  # no task was submitted since the last wait
        self._failure: BaseException | None = None
        self._executor: ThreadPoolExecutor | None = None  # its thread ends with it, and with the interpreter
        self._process = os.getpid()
        self._fill()

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def take(self) -> Slot:
        """Returns a free slot, once there is one.

        Raises:
            RuntimeError: as `wait`.
        """
        self.check()
        slot = self._free.get()
        slot.filled()  # also after a failure, when nobody has waited
        slot.sent()
        slot.filled = slot.sent = _nothing
        return slot

    def submit(self, slot: Slot, task: Callable[..., Any], *args: Any) -> None:
        """Has the task run after all before it; then the slot is free."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "accumfused-offload")
        self._is_idle = False
        self._executor.submit(self._run, [slot, self._free, partial(task, *args)])

    def wait(self) -> None:
        """Waits for all tasks.

        Raises:
            RuntimeError: one has failed; or the process was forked, and its parent has the thread.
        """
        if not self._is_idle or self._failure is not None:
            self.check()
            self._settle()
            self.check()

    def drop(self, *, memory: bool) -> None:
        """Waits for all tasks, and forgets a failure.

        None is left out: their sums are wanted no more, but each has counted the words of rounding noise.
        """
        if self._process != os.getpid():
            return
        self._settle()
        self._failure = None
        if memory:
            self.slots = [Slot() for _ in range(SLOTS)]
        self._fill()  # a call that was interrupted has kept one

    def _fill(self) -> None:
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)

    def _settle(self) -> None:
        """Waits for a task that follows all others: Ctrl-C may have come before `submit` could note its own."""
        if self._executor is not None and not self._is_idle:
            self._executor.submit(_nothing).result()
            self._is_idle = True

    def _run(self, operands: list[Any]) -> None:
        slot, free, task = operands
        operands.clear()  # the executor would keep them beyond their end, and their tensors with them
        try:
            if self._failure is None:
                with torch.no_grad():
                    task()
        except BaseException as error:
            self._failure = error.with_traceback(None)  # whose frames would keep memory that has run out
        finally:
            free.put(slot)

    def check(self) -> None:
        """Refuses to go on after a task has failed, or in a forked process."""
        if self._process != os.getpid():
            raise RuntimeError(
                "offload=True works in a thread of the process that made the optimizer, and this one was forked from "
                "it; make the optimizer here, or start the process with the spawn method"
            )
        if self._failure is not None:
            raise RuntimeError(
                f"gradients or weights could not be worked on at the host ({self._failure}), so some tensors have this "
                "micro-batch or step and some have not; call optimizer.zero_grad(), which drops the window, and go on"
            ) from self._failure
