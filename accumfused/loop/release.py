"""Gradient release: gradients are folded into the window during backward, and never all exist at once.

autograd calls a hook for each parameter whose `p.grad` is complete. Hooks put gradients in a bucket; a full bucket is
folded and released, the rest when the micro-batch ends. Only the training loop ends one, by accumulate(), backward() or
step(): a hook may come twice in a backward (nested checkpoints), or not at all (unused parameters).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from accumfused.core.window import Phase
from accumfused.distributed import groups
from accumfused.optimizer import FusedOptimizer

BUCKET_BYTES = 32 * 2**20


def release_gradients(optimizer: FusedOptimizer, bucket_bytes: int = BUCKET_BYTES) -> GradientRelease:
    """Folds gradients into the optimizer's window during backward, bucket by bucket, and frees them there.

    Windows and steps stay what they are: the same sums, norm, clipping and skips. A weight belongs into the loss, by
    `optimizer.backward(loss, weight)` in place of `accumulate(weight)`. A loop without windows keeps working; its step
    is that of a window, so it checks the norm, and leaves None in `p.grad`.

    Args:
        optimizer: one of this package (`accumfused.fuse` makes one of others). Copies of it do not release.
        bucket_bytes: gradients are folded when so many bytes of them have come; at least 1, which folds each by itself.

    Returns:
        A handle: `remove()` ends it, and so does a `with` block.

    Raises:
        TypeError: an optimizer of another package; `bucket_bytes` that is no whole number.
        ValueError: `bucket_bytes` below 1.
        RuntimeError: a window is open; gradients of the optimizer, or of one of its parameters, are released already;
            parameters of FSDP, or several processes and no `process_group` (`accumfused.attach_ddp` gives one): what
            reduces gradients would miss those that are gone. From backward(): outside `no_sync()` of an attached DDP.

    Example:
        >>> with af.release_gradients(optimizer):
        ...     for (x, y), last in af.windows(loader, 4):
        ...         optimizer.backward(loss_of(x, y), weight=len(y))
        ...         if last:
        ...             optimizer.step()
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"release_gradients takes an optimizer of this package, got {type(optimizer).__name__}; "
            "convert it with accumfused.fuse()"
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, SupportsIndex):
        raise TypeError(f"bucket_bytes must be a whole number, got {type(bucket_bytes).__name__}")
    if operator.index(bucket_bytes) < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if optimizer.engine.release is not None:
        raise RuntimeError("the optimizer's gradients are released already; call remove() on that handle first")
    optimizer.engine.refuse_open("release_gradients()")
    release = GradientRelease(optimizer, operator.index(bucket_bytes))
    release.follow()
    optimizer.engine.release = release
    return release


class GradientRelease:
    """What `release_gradients` returns."""

    def __init__(self, optimizer: FusedOptimizer, bucket_bytes: int) -> None:
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._hook = _Hook(self)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._members: set[int] = set()  # ids of the parameters in the window, during a micro-batch
        self._buckets: dict[torch.device, _Bucket] = {}  # one for each: what a thread folds, no other writes
        self._streams: set[torch.cuda.Stream] = set()  # that wrote gradients or sums in this micro-batch
        self._running: set[int] = set()  # backward passes that have not ended, or never will
        self._expected: tuple[float | Tensor | None, bool] = (None, False)  # by backward(): weight, last

    def remove(self) -> None:
        """Ends the release: gradients stay in `p.grad` again. A second time does nothing.

        Raises:
            RuntimeError: a window is open.
        """
        if self._optimizer.engine.release is self:
            self._optimizer.engine.refuse_open("remove()")
            self._unhook()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """As `remove()`; after an exception in any case, and a micro-batch that it left unfinished drops the window."""
        if kind is None:
            self.remove()
        elif self._optimizer.engine.release is self:
            if self._optimizer.engine.window.entered:
                self._optimizer.zero_grad()
            self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizer.engine.release = None

    # ---- what the optimizer calls -----------------------------------------------------------------------------------

    def follow(self, params: Iterable[Any] | None = None) -> list[Tensor]:
        """Hooks parameters (None: the optimizer's) that are new, or have come to require a gradient.

        Before it is hooked, a parameter's gradient stays in `p.grad` until the micro-batch ends.

        Returns:
            The parameters that were hooked.
        """
        given = self._optimizer.engine.plans.params if params is None else params
        leaves = [param for param in given if isinstance(param, Tensor) and param.requires_grad and param.is_leaf]
        new: list[Any] = [param for param in leaves if self._hook not in _hooks(param)]
        for param in new:
            if any(isinstance(hook, _Hook) and hook.release() is not None for hook in _hooks(param)):
                raise RuntimeError(
                    "the gradients of a parameter are released by another optimizer, which leaves none for this one; "
                    "give each parameter to one of them, or call remove() on that handle first"
                )
            groups.refuse_released(param, self._optimizer.engine.settings.process_group)
        self._handles += [param.register_post_accumulate_grad_hook(self._hook) for param in new]
        return new

    @contextlib.contextmanager
    def expecting(self, weight: float | Tensor | None, last: bool) -> Iterator[None]:
        """While the optimizer's own backward() runs, which knows both beforehand."""
        self._expected = weight, last
        try:
            yield
        finally:
            self._expected = None, False

    def end(self, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Before a micro-batch ends: refuses what cannot be right for gradients that are folded already."""
        self._refuse_unfinished()
        if self._optimizer.engine.window.entered and weight is not None and not in_loss:
            raise RuntimeError(
                "the gradients were folded during backward, before their weight was known; call "
                "optimizer.backward(loss, weight) in place of loss.backward() and accumulate(weight). Those that are "
                "here zero_grad() drops, and accumulate() takes as a plain sum"
            )
        self.follow()
        self._join_streams()

    def end_before_step(self) -> None:
        """A loop that calls no accumulate(): what its backward passes brought is a window of one micro-batch."""
        window = self._optimizer.engine.window
        self._refuse_unfinished()
        if not window.entered:
            new = self.follow()
            if window.phase is not Phase.IDLE or all(param.grad is None for param in new):
                return  # otherwise there are gradients of what was frozen, which no hook has seen
        elif not window.is_first_entered:
            raise RuntimeError(
                "a window is open and there is a gradient that was not accumulated; "
                "call accumulate() after the last backward(), before step()"
            )
        self._optimizer.engine.fold(None, in_loss=False, last=False)

    def _refuse_unfinished(self) -> None:
        if self._running:
            raise RuntimeError(
                "a backward() ended early, by an exception, and a part of its gradients is in the window; call "
                "optimizer.zero_grad() and begin the window again"
            )

    def forget(self) -> None:
        """The micro-batch is over."""
        self._buckets.clear()
        self._running.clear()
        self._streams.clear()

    # ---- what autograd calls ----------------------------------------------------------------------------------------

    def take(self, param: Tensor) -> None:
        """A gradient came, or a part of one: folds the bucket if it is full. In a thread and on a stream of autograd's.

        Raises:
            RuntimeError, TypeError, ValueError: as `accumulate()`; from backward() then.
        """
        with self._lock:  # nothing costly here: models have thousands of parameters
            window, grad = self._optimizer.engine.window, param.grad
            if grad is None:
                return
            if not window.entered:
                try:
                    self._enter(param)
                except BaseException:
                    param.grad = None  # the first of its backward: the window goes on as if that had not been
                    raise
            if not window.entered or id(param) not in self._members:
                return
            self._watch_backward()
            if param.is_cuda:
                self._streams.add(torch.cuda.current_stream(param.device))
            bucket = self._buckets.get(param.device)
            if bucket is None:
                bucket = self._buckets[param.device] = _Bucket()
            if id(param) not in bucket.params:
                bucket.params[id(param)] = param
                bucket.bytes += grad.nbytes if grad.layout == torch.strided else self._bucket_bytes  # to be refused
            del grad
            if bucket.bytes >= self._bucket_bytes:
                self._fold(bucket)

    @torch.no_grad()
    def _enter(self, param: Tensor) -> None:
        """Begins a micro-batch, unless this is for accumulate() to refuse: p.grad is a closed window's accumulator."""
        optimizer, weight = self._optimizer, self._expected[0]
        window = optimizer.engine.window
        try:
            prepared = optimizer.engine.plans.current()
            current = prepared.plan
            grads, _ = current.gradients()
            self._members = set(map(id, current.params))
            if id(param) not in self._members or (window.phase is Phase.CLOSED and window.is_exposed(grads)):
                return
            for ddp in optimizer.engine.attached:
                groups.refuse_synchronizing(ddp)
            if not window.is_open:
                prepared.exchange.check(current, weight, in_loss=True)
            window.begin(current, grads, weight)
            window.enter(current, weight, prepared.exchange, in_loss=True)
        finally:
            optimizer.engine.plans.let_go()

    def _watch_backward(self) -> None:
        """Remembers the backward pass until it ends: one that raises does not, and its gradients are not complete."""
        task = torch._C._current_graph_task_id()
        if task in self._running:
            return
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            return  # it runs no callbacks
        self._running.add(task)
        engine: Any = Variable._execution_engine
        engine.queue_callback(functools.partial(self._running.discard, task))

    @torch.no_grad()
    def _fold(self, bucket: _Bucket) -> None:
        weight, last = self._expected
        self._join_streams()
        try:
            self._optimizer.engine.fold(weight, in_loss=True, last=last, rows=bucket.params)
        finally:
            self._optimizer.engine.plans.let_go()
        for param in bucket.params.values():
            param.grad = None
        bucket.params.clear()
        bucket.bytes = 0

    def _join_streams(self) -> None:
        """The current streams wait for those that wrote gradients or sums in this micro-batch.

        autograd runs each hook on the stream of its parameter's gradient; they may differ. What comes after backward()
        waits for all of them, and they for what came before.
        """
        for other in list(self._streams):
            current = torch.cuda.current_stream(other.device)
            if current == other:
                continue
            current.wait_stream(other)
            self._streams.add(current)
            bucket = self._buckets.get(other.device)
            for param in [] if bucket is None else bucket.params.values():
                if param.grad is not None:
                    param.grad.record_stream(current)  # or its memory would be given away too early


@dataclass
class _Bucket:
    params: dict[int, Tensor] = field(default_factory=dict)  # by id: their p.grad waits
    bytes: int = 0  # of their gradients


class _Hook:
    """What autograd holds, which Python's collector does not see into: a strong reference would never be freed."""

    def __init__(self, release: GradientRelease) -> None:
        self.release = weakref.ref(release)

    @_disable_dynamo
    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None:
            release.take(param)


def _hooks(param: Tensor) -> list[Any]:
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())
