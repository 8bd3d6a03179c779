"""Gradient release: backward folds gradients into the window, so they never all exist at once.

autograd calls a hook when a parameter's `p.grad` is complete. The hook puts the gradient in a bucket, and folds and
releases a full bucket. The end of the micro-batch folds the rest: accumulate(), the optimizer's backward(), or step().
autograd may call a hook twice in a backward (nested checkpoints), or never (unused parameters).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from accumfused.loop.contributions import Contributions, refuse_drops
from accumfused.optimizer import FusedOptimizer, check_fused

CPU_BUCKET_BYTES = 32 * 2**20
# On a card: what half of an H100's 50 MB of L2 holds beside activations. Its gradients may still be there when the fold
# reads them, which for bf16 would leave 8 of 10 bytes an element to memory. No card has measured it.
CARD_BUCKET_BYTES = 16 * 2**20


def release_gradients(optimizer: FusedOptimizer, bucket_bytes: int | None = None) -> GradientRelease:
    """Folds gradients into the optimizer's window during backward, bucket by bucket, and frees them there.

    Sums, norm, clipping and skips stay the same. The weight of a micro-batch must be in its loss: call
    `optimizer.backward(loss, weight)` instead of `accumulate(weight)`. A loop without windows keeps working: its step
    closes a window of one micro-batch, so it checks the norm, and leaves None in `p.grad`.

    Args:
        optimizer: an optimizer of this package (`accumfused.fuse` converts others). Copies of it do not release.
        bucket_bytes: bytes of gradients in a full bucket, which is folded; 1 folds each gradient by itself. None: 16
            MiB where the gradients are on a card, 32 MiB on a CPU.

    Returns:
        A handle; `remove()` or the end of a `with` block ends the release.

    Raises:
        TypeError: the optimizer is of another package; `bucket_bytes` is no whole number.
        ValueError: `bucket_bytes` is below 1; the optimizer drops micro-batches (`nonfinite="drop"`).
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
    check_fused(optimizer, "release_gradients")
    if bucket_bytes is not None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, SupportsIndex):
            raise TypeError(f"bucket_bytes must be a whole number, or None, got {type(bucket_bytes).__name__}")
        bucket_bytes = operator.index(bucket_bytes)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if optimizer._engine.during_backward is not None:
        raise RuntimeError(
            "the optimizer's gradients are released already; call remove() on that handle first (to have both, call "
            "release_gradients() before fuse_linears())"
        )
    refuse_drops(optimizer, "release_gradients()")
    optimizer._engine.refuse_open("release_gradients()")
    release = GradientRelease(optimizer, bucket_bytes)
    release.follow()
    optimizer._engine.during_backward = release
    return release


class GradientRelease(Contributions):
    """The handle that `release_gradients` returns."""

    def __init__(self, optimizer: FusedOptimizer, bucket_bytes: int | None) -> None:
        super().__init__(optimizer)
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[torch.device, _Bucket] = {}  # each has one thread of autograd's

    def bucket_bytes(self, device: torch.device) -> int:
        """Returns the bytes of gradients in a full bucket on a device."""
        if self._bucket_bytes is not None:
            return self._bucket_bytes
        return CPU_BUCKET_BYTES if device.type == "cpu" else CARD_BUCKET_BYTES

    def remove(self) -> None:
        """Ends the release: gradients stay in `p.grad` again. A second call does nothing.

        Raises:
            RuntimeError: a window is open.
        """
        if self.optimizer._engine.during_backward is self:
            self.optimizer._engine.refuse_open("remove()")
            self.unhook()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Calls `remove()`. An exception ends the release even in an open window, and drops a half-folded window."""
        if kind is None:
            self.remove()
        elif self.optimizer._engine.during_backward is self:
            if self.optimizer._engine.window.in_progress is not None:
                self.optimizer.zero_grad()
            self.unhook()

    def follow(self, params: Iterable[Any] | None = None) -> list[Tensor]:
        """Hooks parameters (None: the optimizer's) that are new, or newly require a gradient.

        The gradient of a parameter without a hook stays in `p.grad` until the micro-batch ends; torch hooks none of a
        lazy module before its first forward pass.

        Returns:
            The newly hooked parameters.
        """
        candidates = self.optimizer._engine.plans.params if params is None else params
        return self.claim(
            param
            for param in candidates
            if isinstance(param, Tensor) and param.requires_grad and param.is_leaf and not is_lazy(param)
        )

    def forget(self) -> None:
        """Forgets the micro-batch, which is over."""
        super().forget()
        self._buckets.clear()

    def take(self, param: Tensor) -> None:
        """Takes a complete or partial gradient, on autograd's thread and stream; folds the bucket if it is full.

        Raises:
            RuntimeError, TypeError, ValueError: as `accumulate()`; backward() passes them on.
        """
        with self.lock:  # keep this cheap: models have thousands of parameters
            grad = param.grad
            if grad is None:
                return
            try:
                row = self.row(param)
            except BaseException:
                param.grad = None  # the first of its backward: the window is as before it
                raise
            if row is None:
                return
            self.watch_backward()
            if param.is_cuda:
                self.streams.add(torch.cuda.current_stream(param.device))
            bucket = self._buckets.get(param.device)
            if bucket is None:
                bucket = self._buckets[param.device] = _Bucket(self.bucket_bytes(param.device))
            if id(param) not in bucket.params:
                bucket.params[id(param)] = param
                bucket.bytes += grad.nbytes if grad.layout == torch.strided else bucket.full_bytes  # to be refused
            del grad
            if bucket.bytes >= bucket.full_bytes:
                self._fold(bucket)

    @torch.no_grad()
    def _fold(self, bucket: _Bucket) -> None:
        weight, last = self.expected
        self.join_streams()
        self.optimizer._engine.fold(weight, in_loss=True, last=last, param_ids=bucket.params)
        bucket.params.clear()
        bucket.bytes = 0

    def join(self, current: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Makes one stream wait for another one of its device, and keeps waiting gradients until it has read them."""
        super().join(current, other)
        bucket = self._buckets.get(other.device)
        for param in [] if bucket is None else bucket.params.values():
            if param.grad is not None:
                param.grad.record_stream(current)  # otherwise torch would reuse its memory too early


@dataclass
class _Bucket:
    full_bytes: int  # of gradients: it is folded then
    params: dict[int, Tensor] = field(default_factory=dict)  # by id: their p.grad waits
    bytes: int = 0  # of their gradients
