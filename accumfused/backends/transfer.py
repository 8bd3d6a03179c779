"""Transfers between a card and the host: slots of host memory, copies, and the thread that works on what has arrived.

A slot is filled by copies on a stream of their own, which waits for the work before it. The worker waits for the copy,
computes, perhaps copies back, and returns the slot. Tasks run one after the other, in the order in which they came.
Where the card is the CPU, a copy is over when the call returns, and all else is the same.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self.sent: Wait = _nothing  # waits until what went back from here has left
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def places_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns memory for copies of dense tensors, each in its layout."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if self._memory is None or self._memory.nbytes < sum(sizes):
            self._memory = None  # before its successor comes
            pins = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pins)
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

    def down(self, sources: Sequence[Tensor], places: Sequence[Tensor]) -> Wait:
        """Begins to copy tensors to the host, after all work so far; returns the call that waits for it.

        The sources may be freed at once.
        """
        return self._copy(sources, places, "down", [source.device for source in sources])

    def up(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        """Begins to copy tensors back from the host, which must not change them before the returned call has waited."""
        return self._copy(sources, targets, "up", [target.device for target in targets])

    def join(self) -> None:
        """Makes the current stream of each card wait for all copies to it."""
        for (device, way), stream in self._streams.items():
            if way == "up":
                torch.cuda.current_stream(device).wait_stream(stream)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor], way: str, cards: list[torch.device]) -> Wait:
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
            with torch.cuda.stream(stream):
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                    if way == "down":
                        source.record_stream(stream)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
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
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._under_way: deque[Future[None]] = deque()
        self._failure: BaseException | None = None
        self._executor: ThreadPoolExecutor | None = None  # its thread ends with it, and with the interpreter
        self._process = os.getpid()
        self.drop(memory=False)

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
        slot.sent()
        slot.sent = _nothing
        return slot

    def submit(self, slot: Slot, task: Callable[..., Any], *args: Any) -> None:
        """Has the task run after all before it; then the slot is free."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "accumfused-offload")
        future = self._executor.submit(self._run, [partial(task, *args)])
        future.add_done_callback(partial(_free, self._free, slot))
        self._under_way.append(future)

    def wait(self) -> None:
        """Waits for all tasks.

        Raises:
            RuntimeError: one has failed; or the process was forked, and its parent has the thread.
        """
        if self._under_way or self._failure is not None:
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
        self._free = queue.SimpleQueue()  # a call that was interrupted has kept one
        for slot in self.slots:
            self._free.put(slot)

    def _settle(self) -> None:
        while self._under_way:
            self._under_way[0].result()  # which may be interrupted
            self._under_way.popleft()

    def _run(self, task: list[Callable[[], Any]]) -> None:
        run = task.pop()  # which would live on beside its end, and its tensors with it
        if self._failure is not None:
            return
        try:
            with torch.no_grad():
                run()
        except BaseException as error:
            self._failure = error.with_traceback(None)  # whose frames would keep memory that has run out

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


def _free(slots: queue.SimpleQueue[Slot], slot: Slot, _: Future[None]) -> None:
    slots.put(slot)
