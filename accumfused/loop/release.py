"""Gradient release: backward folds gradients into the window, so they never all exist at once.

autograd calls a hook when a parameter's `p.grad` is complete. The hook puts the gradient in a bucket, and folds and
releases a full bucket. The end of the micro-batch folds the rest: accumulate(), the optimizer's backward(), or step().
autograd may call a hook twice in a backward (nested checkpoints), or never (unused parameters).
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

    Sums, norm, clipping and skips stay the same. The weight of a micro-batch must be in its loss: call
    `optimizer.backward(loss, weight)` in place of `accumulate(weight)`. A loop without windows keeps working: its step
    closes a window of one micro-batch, so it checks the norm, and leaves None in `p.grad`.

    Args:
        optimizer: an optimizer of this package (`accumfused.fuse` converts others). Copies of it do not release.
        bucket_bytes: bytes of gradients in a full bucket, which is folded; 1 folds each gradient by itself.

    Returns:
        A handle; `remove()` or the end of a `with` block ends the release.

    Raises:
        TypeError: the optimizer is of another package; `bucket_bytes` is no whole number.
        ValueError: `bucket_bytes` is below 1.
        RuntimeError: a window is open; the optimizer, or another with the same parameter, releases already; parameters
            are FSDP's; several processes and no `process_group` (`accumfused.attach_ddp` gives one), since another
            reduction misses released gradients. backward() raises it outside `no_sync()` of an attached DDP.

    Examples:
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
        raise RuntimeError(
            "the optimizer's gradients are released already; call remove() on that handle first (to have both, call "
            "release_gradients() before fuse_linears())"
        )
    optimizer.engine.refuse_open("release_gradients()")
    release = GradientRelease(optimizer, operator.index(bucket_bytes))
    release.follow()
    optimizer.engine.release = release
    return release


class GradientRelease:
    """The handle that `release_gradients` returns.

    With buckets of 0 bytes it takes only contributions, and gradients stay in `p.grad`: see loop/linears.py.
    """

    def __init__(self, optimizer: FusedOptimizer, bucket_bytes: int) -> None:
        self._optimizer = optimizer
        self.bucket_bytes = bucket_bytes
        self._hook = _Hook(self)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._members: dict[int, int] = {}  # ids of the parameters in the window -> rows, during a micro-batch
        self._buckets: dict[torch.device, _Bucket] = {}  # each has one thread of autograd's
        self._streams: set[torch.cuda.Stream] = set()  # they wrote gradients or sums in this micro-batch
        self._running: set[int] = set()  # backward passes that have not ended, or have raised
        self._expected: tuple[float | Tensor | None, bool] = (None, False)  # weight and last of optimizer.backward()

    def remove(self) -> None:
        """Ends the release: gradients stay in `p.grad` again. A second call does nothing.

        Raises:
            RuntimeError: a window is open.
        """
        if self._optimizer.engine.release is self:
            self._optimizer.engine.refuse_open("remove()")
            self.unhook()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Calls `remove()`. An exception ends the release even in an open window, and drops a half-folded window."""
        if kind is None:
            self.remove()
        elif self._optimizer.engine.release is self:
            if self._optimizer.engine.window.entered:
                self._optimizer.zero_grad()
            self.unhook()

    def unhook(self) -> None:
        """Ends the release, also in an open window."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._optimizer.engine.release is self:
            self._optimizer.engine.release = None

    # ---- the optimizer calls these ----------------------------------------------------------------------------------

    def follow(self, params: Iterable[Any] | None = None) -> list[Tensor]:
        """Hooks parameters (None: the optimizer's) that are new, or newly require a gradient.

        The gradient of a parameter without a hook stays in `p.grad` until the micro-batch ends.

        Returns:
            The newly hooked parameters.
        """
        if not self.bucket_bytes:
            return []
        given = self._optimizer.engine.plans.params if params is None else params
        return self.claim(
            param for param in given if isinstance(param, Tensor) and param.requires_grad and param.is_leaf
        )

    def claim(self, params: Iterable[Any]) -> list[Tensor]:
        """Hooks parameters, so that nobody else takes their gradients.

        Returns:
            The newly hooked parameters.

        Raises:
            RuntimeError: somebody else does already, or reduces them later.
        """
        new = [param for param in params if self._hook not in _hooks(param)]
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
        """Holds the weight and `last` while the optimizer's own backward() runs, which knows both beforehand."""
        self._expected = weight, last
        try:
            yield
        finally:
            self._expected = None, False

    def end(self, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Prepares the end of a micro-batch: refuses a weight that comes after its gradients were folded."""
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
        """Makes a window of one micro-batch from the gradients of a loop that calls no accumulate()."""
        window = self._optimizer.engine.window
        self._refuse_unfinished()
        if not window.entered:
            new = self.follow()
            if window.phase is not Phase.IDLE or all(param.grad is None for param in new):
                return  # otherwise a parameter that was frozen has a gradient, which no hook has seen
        elif not window.is_first_entered:
            self._optimizer.engine.refuse_live(1)
        self._optimizer.engine.fold(None, in_loss=False, last=False)

    def _refuse_unfinished(self) -> None:
        if self._running:
            raise RuntimeError(
                "a backward() ended early, by an exception, and a part of its gradients is in the window; call "
                "optimizer.zero_grad() and begin the window again"
            )

    def forget(self) -> None:
        """Forgets the micro-batch, which is over."""
        self._buckets.clear()
        self._running.clear()
        self._streams.clear()

    # ---- autograd calls these ---------------------------------------------------------------------------------------

    def take(self, param: Tensor) -> None:
        """Takes a complete or partial gradient, on autograd's thread and stream; folds the bucket if it is full.

        Raises:
            RuntimeError, TypeError, ValueError: as `accumulate()`; backward() passes them on.
        """
        with self._lock:  # keep this cheap: models have thousands of parameters
            window, grad = self._optimizer.engine.window, param.grad
            if grad is None:
                return
            if not window.entered:
                try:
                    self._enter(param)
                except BaseException:
                    param.grad = None  # the first of its backward: the window is as before it
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
                bucket.bytes += grad.nbytes if grad.layout == torch.strided else self.bucket_bytes  # to be refused
            del grad
            if bucket.bytes >= self.bucket_bytes:
                self._fold(bucket)

    def contribute(self, param: Tensor) -> tuple[Tensor, bool] | None:
        """Gives the accumulator to a backward that adds this parameter's gradient itself: see `Sums.contribute`.

        None: the gradient has to come through autograd, for hooks of others, say.

        Raises:
            RuntimeError, TypeError, ValueError: as `accumulate()`; zero_grad() goes on from there.
        """
        if has_hooks(param):
            return None
        with self._lock:
            self._watch_backward()  # a backward that is refused here has left other gradients in p.grad
            window = self._optimizer.engine.window
            if not window.entered:
                self._enter(param)
            row = self._members.get(id(param))
            if not window.entered or row is None or window.plan is None:
                return None
            given = window.sums.contribute(window.plan, row, window.place)
            if param.is_cuda:
                self._join_streams()
                self._streams.add(torch.cuda.current_stream(param.device))
            return given

    @torch.no_grad()
    def _enter(self, param: Tensor) -> None:
        """Begins a micro-batch, unless p.grad is a closed window's accumulator, which accumulate() will refuse."""
        optimizer, weight = self._optimizer, self._expected[0]
        window = optimizer.engine.window
        try:
            prepared = optimizer.engine.plans.current()
            current = prepared.plan
            grads, _ = current.gradients()
            self._members = {id(member): row for row, member in enumerate(current.params)}
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
        """Remembers the backward pass until it ends; one that raises never ends, and its gradients are incomplete."""
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
        """Makes the current streams wait for those that wrote gradients or sums in this micro-batch.

        autograd runs each hook on the stream of its parameter's gradient; these may differ. Work after backward() waits
        for all of them, and they wait for the work before.
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
                    param.grad.record_stream(current)  # otherwise torch would reuse its memory too early


@dataclass
class _Bucket:
    params: dict[int, Tensor] = field(default_factory=dict)  # by id: their p.grad waits
    bytes: int = 0  # of their gradients


class _Hook:
    """A hook with a weak reference: autograd holds it, where Python's collector would never free a strong one."""

    def __init__(self, release: GradientRelease) -> None:
        self.release = weakref.ref(release)

    @_disable_dynamo
    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None and release.bucket_bytes:
            release.take(param)


def has_hooks(param: Tensor) -> bool:
    """Whether somebody else's hooks expect the parameter's gradient."""
    if not param._backward_hooks and not param._post_accumulate_grad_hooks:
        return False  # as a rule: layers ask this in each backward
    return bool(param._backward_hooks) or not all(isinstance(hook, _Hook) for hook in _hooks(param))


def _hooks(param: Tensor) -> list[Any]:
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())
