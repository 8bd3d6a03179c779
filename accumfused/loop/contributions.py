"""Sums that a backward pass adds to by itself: the part of a micro-batch that happens during backward.

Layers ask for a weight's accumulator (linears.py), or hooks take complete gradients (release.py). The first of them
begins the micro-batch; accumulate(), the optimizer's backward(), or step() ends it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from accumfused.core.window import Phase
from accumfused.distributed import groups
from accumfused.eager import uncompiled
from accumfused.optimizer import FusedOptimizer


def refuse_drops(optimizer: FusedOptimizer, caller: str) -> None:
    """Refuses to add gradients to the sums before their micro-batch is whole, where it may be dropped.

    Raises:
        ValueError: that.
    """
    if optimizer._engine.settings.nonfinite == "drop":
        raise ValueError(
            f"nonfinite='drop' looks at a whole micro-batch before it enters, and {caller} adds its gradients during "
            "backward; leave one of them out, or use nonfinite='skip', which skips the window"
        )


class Contributions:
    """Gives accumulators to those who add to them. All other gradients stay in `p.grad`.

    Attributes:
        expected: weight and `last` of the optimizer's own backward(), while it runs.
        streams: those that wrote gradients or sums in this micro-batch.
        lock: autograd has a thread for each device.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.optimizer = optimizer
        self.lock = threading.Lock()
        self.streams: set[torch.cuda.Stream] = set()
        self.expected: tuple[float | Tensor | None, bool] = (None, False)
        self._hook = _Hook(self)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._members: dict[int, int] = {}  # ids of the parameters in the window -> rows, during a micro-batch
        self._running: set[int] = set()  # backward passes that have not ended, or have raised

    def unhook(self) -> None:
        """Ends it, also in an open window."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.optimizer._engine.during_backward is self:
            self.optimizer._engine.during_backward = None

    # ---- the optimizer calls these ----------------------------------------------------------------------------------

    def follow(self, params: Iterable[Any] | None = None) -> list[Tensor]:
        """Takes over parameters (None: the optimizer's) that are new: none of them, since gradients stay in `p.grad`.

        Returns:
            The newly hooked parameters.
        """
        return []

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
            groups.refuse_released(param, self.optimizer._engine.settings.process_group)
        self._handles += [param.register_post_accumulate_grad_hook(self._hook) for param in new]
        return new

    @contextlib.contextmanager
    def expecting(self, weight: float | Tensor | None, last: bool) -> Iterator[None]:
        """Holds the weight and `last` while the optimizer's own backward() runs, which knows both beforehand."""
        self.expected = weight, last
        try:
            yield
        finally:
            self.expected = None, False

    def end(self, weight: float | Tensor | None, *, in_loss: bool) -> None:
        """Prepares the end of a micro-batch: refuses a weight that comes after its gradients were folded."""
        self._refuse_unfinished()
        if self.optimizer._engine.window.in_progress is not None and weight is not None and not in_loss:
            raise RuntimeError(
                "the gradients were folded during backward, before their weight was known; call "
                "optimizer.backward(loss, weight) in place of loss.backward() and accumulate(weight). To drop these "
                "gradients, call zero_grad(); accumulate() without a weight adds them as a plain sum"
            )
        self.follow()
        self.join_streams()

    def end_before_step(self) -> None:
        """Makes a window of one micro-batch from the gradients of a loop that calls no accumulate()."""
        window = self.optimizer._engine.window
        self._refuse_unfinished()
        if window.in_progress is None:
            new = self.follow()
            if window.phase is not Phase.IDLE or all(param.grad is None for param in new):
                return  # otherwise a parameter that was frozen has a gradient, which no hook has seen
        elif window.holds_micro_batches:
            self.optimizer._engine.refuse_live(1)
        self.optimizer._engine.fold(None, in_loss=False, last=False)

    def _refuse_unfinished(self) -> None:
        if self._running:
            raise RuntimeError(
                "a backward() ended early, by an exception, and a part of its gradients is in the window; call "
                "optimizer.zero_grad() and begin the window again"
            )

    def forget(self) -> None:
        """Forgets the micro-batch, which is over."""
        self._running.clear()
        self.streams.clear()

    # ---- autograd calls these ---------------------------------------------------------------------------------------

    def take(self, param: Tensor) -> None:
        """Leaves a complete gradient in `p.grad`."""

    def contribute(self, param: Tensor) -> tuple[Tensor, bool] | None:
        """Gives the accumulator to a backward that adds this parameter's gradient itself: see `Window.contribute`.

        None: the gradient has to come through autograd, for hooks of others, say.

        Raises:
            RuntimeError, TypeError, ValueError: as `accumulate()`; zero_grad() goes on from there.
        """
        if has_hooks(param) or self.optimizer._engine.noise is not None:  # which measures gradients
            return None
        with self.lock:
            self.watch_backward()  # a backward that is refused here has left other gradients in p.grad
            row = self.row(param)
            if row is None:
                return None
            target = self.optimizer._engine.window.contribute(row)
            if param.is_cuda:
                self.join_streams()
                self.streams.add(torch.cuda.current_stream(param.device))
            return target

    def row(self, param: Tensor) -> int | None:
        """Finds the parameter's row in the micro-batch, which begins if it has not; None: it is not in it."""
        engine = self.optimizer._engine
        if engine.window.in_progress is None:
            self._enter(param)
        return None if engine.window.in_progress is None else self._members.get(id(param))

    @torch.no_grad()
    def _enter(self, param: Tensor) -> None:
        """Begins a micro-batch, unless p.grad is a closed window's accumulator, which accumulate() will refuse."""
        engine = self.optimizer._engine
        plan = engine.plans.current(with_states=False)
        grads, _ = plan.reader.read_grads()
        self._members = {id(member): row for row, member in enumerate(plan.params)}
        if id(param) not in self._members or (engine.window.phase is Phase.CLOSED and engine.window.is_exposed(grads)):
            return
        for ddp in engine.attached:
            groups.refuse_synchronizing(ddp)
        if engine.window.is_open and engine.window.weights.is_weighted and self.expected[0] is None:
            raise ValueError(
                "weights for some micro-batches of a window only; this one began with weights: give one to every "
                "micro-batch, or to none, by optimizer.backward(loss, weight); or, if another loss has reached these "
                "parameters (a GAN's generator), discriminator.requires_grad_(False) before its backward(), and True "
                "after it"
            )
        engine.enter(plan, grads, self.expected[0])

    def watch_backward(self) -> None:
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

    def join_streams(self) -> None:
        """Makes the current streams wait for those that wrote gradients or sums in this micro-batch.

        autograd runs each hook on the stream of its parameter's gradient; these may differ. Work after backward() waits
        for all of them, and they wait for the work before.
        """
        for other in list(self.streams):
            current = torch.cuda.current_stream(other.device)
            if current != other:
                self.join(current, other)

    def join(self, current: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Makes one stream wait for another one of its device."""
        current.wait_stream(other)
        self.streams.add(current)


class _Hook:
    """A hook with a weak reference: autograd holds it, where Python's collector would never free a strong one."""

    def __init__(self, release: Contributions) -> None:
        self.release = weakref.ref(release)

    @uncompiled
    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None:
            release.take(param)


def has_hooks(param: Tensor) -> bool:
    """Whether somebody else's hooks expect the parameter's gradient."""
    if not param._backward_hooks and not param._post_accumulate_grad_hooks:
        return False  # as a rule: layers ask this in each backward
    return bool(param._backward_hooks) or not all(isinstance(hook, _Hook) for hook in _hooks(param))


def _hooks(param: Tensor) -> list[Any]:
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())
