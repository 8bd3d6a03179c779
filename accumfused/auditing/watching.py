"""Watches a training loop: hooks on layers, parameters and optimizers see what happens, and change nothing.

A torch function mode sees the calls for which torch has no hooks: backward, norms, clips, unscaling.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from accumfused.auditing.again import Calls
from accumfused.auditing.constants import Constants
from accumfused.auditing.fit import on_host
from accumfused.auditing.graph import Reading, gradients_of, is_division, main_of, probe, read
from accumfused.auditing.hints import CAUSES, expected_of
from accumfused.auditing.passes import Pass
from accumfused.auditing.randomness import Generators
from accumfused.auditing.report import AuditReport
from accumfused.auditing.rows import Rows
from accumfused.auditing.step import SCALED, UNKNOWN, Step, is_close
from accumfused.auditing.track import Track
from accumfused.formats.shards import is_dtensor
from accumfused.optimizer import FusedOptimizer

_UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"
_CALLS = {  # with which a clip begins
    "norm", "linalg_vector_norm", "vector_norm", "_foreach_norm", "pow", "__pow__", "square", "dot", "abs", "clamp_",
    "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_", _UNSCALING,
}  # fmt: skip
_LOSSES = "there are {number:g} times as many backward passes, which is right if each micro-batch has so many losses"
_FRAMEWORKS = {  # callers of others come first
    "transformers.trainer": "trainer", "lightning.": "lightning", "pytorch_lightning.": "lightning",
    "accelerate.optimizer": "accelerate",
}  # fmt: skip


class Watch:
    """Records micro-batches and windows of a loop in a `with` block, and fills a report when the block ends.

    Args:
        ignore: names of causes that do not count.
        steps: gradient_accumulation_steps, if it is known.
        ended: is called before each step of a watched optimizer, when its window is judged.
    """

    def __init__(
        self, model: Module, tracks: Sequence[Track], ignore: set[str], steps: int | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        params = {id(param): param for track in tracks for param in track.params}
        self.tracks, self._params, self._ended = tracks, params, ended
        self._ignore, self._steps, self._setting = ignore, steps, ""
        self._report = AuditReport()
        for track in tracks:
            track.expected = steps
        self._norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        self._generators = Generators(itertools.chain(model.parameters(), model.buffers()))
        self._calls = Calls(model, self._generators, ignore)
        self._rows = Rows(model, self._generators, self._calls.see)
        self._current: Pass | None = None  # during its backward
        self._unseen = Pass()
        self._detour = False  # a backward pass has ended at other tensors than parameters
        self.constants = Constants()
        self._probed: dict[Any, tuple[int, Reading]] = {}  # the first of each form, with its samples
        self._incoming: dict[int, Tensor] = {}  # gradients on their way to p.grad
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> AuditReport:
        """Registers the hooks."""
        with contextlib.ExitStack() as hooks:
            for handle in self._handles():
                hooks.callback(handle.remove)
            hooks.enter_context(_Mode(self))
            self._hooks = hooks.pop_all()
        return self._report

    def __exit__(self, error: Any, *_: Any) -> None:
        self.stop()
        self._fill(is_whole=error is None)

    def stop(self) -> None:
        """Removes the hooks, and lets go of the loop's tensors."""
        self._hooks.close()
        for track in self.tracks:
            track.close_skipped()
        self._current, self._incoming = None, {}
        self._rows.forget()
        self._calls.forget()

    def _handles(self) -> Iterator[Any]:
        yield from self._rows.handles()
        for param in self._params.values():
            if param.requires_grad:
                yield param.register_hook(self._on_its_way(param))  # type: ignore[no-untyped-call]
                yield param.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        yield register_optimizer_step_pre_hook(self._other_step)
        for track in self.tracks:
            yield track.optimizer.register_step_pre_hook(functools.partial(track.step, self._calls, self._stepped))

    def _fill(self, *, is_whole: bool) -> None:
        """Writes what was seen into the report. Args: is_whole: no exception has cut the last window short."""
        report = self._report
        windows = [step for track in self.tracks for step in track.windows]
        steps = self._steps or expected_of(windows)
        report.advice = (
            f"To know, call af.audit(model, loss_fn, batch, {steps}): it computes a batch whole and in micro-batches."
        )
        names = sorted({name for step in windows for name in step.reasons} & CAUSES.keys())
        if names:
            report.advice += f"\nTo leave this out, say ignore={tuple(names)} or --ignore {' --ignore '.join(names)}."
        for track in self.tracks:
            self._count_losses(track.windows)
            if any("length" in step.reasons for step in track.windows):
                report.advice = (
                    "The direction is that of the large batch. To know its length, divide in the loop, by K."
                )
            report.take(track.windows, self._steps, self._ignore, self._setting)
        report.overlook(self._ignore)
        skipped, judged = sum(track.skipped for track in self.tracks), len(windows)
        if skipped:
            report.notes.append(
                f"{skipped} of {skipped + judged} steps were not judged: their gradients were inf or NaN"
            )
        losses = max((step.losses for step in windows), default=1)
        if losses > 1:
            report.notes.append(f"each micro-batch has {losses} backward passes: they are taken for losses of one sum")
        sums = {step.sum_over for step in windows if step.sum_over[0] > 1}
        if len({constant for constant, _ in sums}) == 1 and len(sums) > 1:
            report.notes.append(
                f"the loss is a sum over a constant, {min(sums)[0]:g}, of {min(sums)[1]:g} to {max(sums)[1]:g} terms a "
                "window: each term counts the same, a shorter window less"
            )
        if any(each.is_random for step in windows for each in step.passes):
            report.notes.append("the model draws random numbers, as dropout does: the large batch would draw others")
        left = max((sum(not m.is_used for m in track.now.passes) for track in self.tracks), default=0)
        if left and is_whole and windows:
            report.notes.append(f"{left} micro-batches after the last step: they are lost if no step follows")
        report.notes += [error for track in self.tracks for error in track.errors]
        if self._calls.note and not all(step.is_decided for step in windows):
            report.notes.append(self._calls.note)

    def _count_losses(self, windows: Sequence[Step]) -> None:
        """Where each window has n times the micro-batches that belong to it, these may be n losses of one each."""
        counts = {step.arrived for step in windows}
        number = counts.pop() / self._steps if self._steps and len(counts) == 1 else 1.0
        if number > 1 and number.is_integer():
            for step in windows:
                if step.verdict == SCALED and is_close(step.ratio, number):
                    step.verdict = UNKNOWN
                    step.reasons = {"length": _LOSSES.format(number=number)}

    # ---- what happens in the loop ----------------------------------------------------------------------------------

    def backward(self, run: Callable[..., Any], tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Reads the loss's graph, and runs its backward."""
        loss = tensors if isinstance(tensors, Tensor) else tensors[0]
        rows = self._rows.edges
        self._rows.is_paused = True
        now = self._current = Pass(samples=self._rows.samples)
        try:
            now.reading = self._read(loss, gradients, rows, now)
        except Exception as error:  # the loop goes on, whatever its graph is
            now.reading = Reading(unknown=[f"the loss's graph could not be read ({type(error).__name__}: {error})"])
        now.is_random = self._rows.is_random
        now.has_batch_norm = any(layer.training for layer in self._norms)
        for term in now.reading.terms:
            term.edges, term.top = [], None
        for track in self.tracks:
            track.begin()
        inputs = self._rows.inputs
        self._rows.use()
        now.modules, now.inputs = self._rows.modules, inputs
        try:
            return run(tensors, gradients, *args, **kwargs)
        finally:
            self._detour |= now.reading.ends_beside and not now.grads
            self._current, self._rows.is_paused = None, False

    def _read(self, loss: Tensor, gradient: Any, rows: Any, now: Pass) -> Reading:
        reading = read(loss, rows)
        gradient = gradient[0] if isinstance(gradient, list | tuple) and len(gradient) == 1 else gradient
        if isinstance(gradient, Tensor) and gradient.numel() == 1:
            for term in reading.terms:
                term.factors = [*term.factors, float(gradient)]
                term.top = None if term.top is None else (term.top[0], term.top[1] * float(gradient))
        form = tuple(term.kind for term in reading.terms)
        size, known = self._probed.get(form, (0, reading))
        if known is reading or size < 2 <= now.samples:  # one sample shows nothing
            probe(reading, rows)
            self._probed[form] = now.samples, reading
        for term, first in zip(reading.terms, known.terms, strict=True):
            term.is_coupled = term.is_coupled if term.is_coupled is not None else first.is_coupled
        reading.spans |= known.spans
        main = main_of(reading.terms)
        divisions = set(filter(is_division, [] if main is None else main.factors))
        now.others = [term for term in reading.terms if not divisions.issubset(term.factors)]
        if now.others:
            params = [param for param in self._params.values() if param.requires_grad]
            now.grads_of_others = gradients_of(now.others, params)
        if now.samples > 1 and now.samples in self.constants.sizes:
            reading.unknown.append("numbers that it takes for constants were computed of all samples of a micro-batch")
        if self._detour:
            reading.unknown.append("a backward pass before it has ended at other tensors than parameters")
        self.constants.sizes = set()
        self._calls.follow(loss, reading, now)
        return reading

    def _on_its_way(self, param: Tensor) -> Callable[[Tensor], None]:
        def see(grad: Tensor) -> None:
            self._incoming[id(param)] = on_host(grad)
            for track in self.tracks:
                track.see_before(self._current, param)

        return see

    def _arrive(self, param: Tensor) -> None:
        """After torch has added a gradient to p.grad: autograd.grad() does not come here."""
        grad = self._incoming.pop(id(param), None)
        if grad is None:
            return
        now = self._current
        if now is None:  # in a backward pass that was not seen
            now = self._unseen = self._unseen if id(param) not in self._unseen.grads else Pass()
        known = now.grads.get(id(param))
        now.grads[id(param)] = grad if known is None else known + grad
        for track in self.tracks:
            track.add(now, param)

    def _other_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Any optimizer's step uses the gradients that are there."""
        if all(track.optimizer is not optimizer for track in self.tracks):
            for micro_batch in (each for track in self.tracks for each in track.now.passes):
                micro_batch.is_used = True

    def _stepped(self, optimizer: Optimizer) -> None:
        self._detour = False
        self._unseen = Pass()
        self._setting = self._setting or _setting(optimizer)
        self._ended()

    def call(self, name: str, args: Sequence[Any]) -> None:
        """Before a call that may read or change gradients in place."""
        tensors = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        places = {_place(t) for t in tensors if isinstance(t, Tensor) and not t.requires_grad} - {None}
        for track in self.tracks:
            if places and not places.isdisjoint(track.places()):
                if name == _UNSCALING:
                    track.unscale()
                else:
                    track.before_clip()


class _Mode(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            own = {"gradients" if name in ("gradient", "grad_tensors") else name: kwargs[name] for name in kwargs}
            return self._watch.backward(func, *args, **own)
        name = getattr(func, "__name__", "")
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if name in _CALLS:
            self._watch.call(name, args)
        result = func(*args, **kwargs)
        self._watch.constants.see(name, args, kwargs, result)
        return result


def tracks_of(model: Module, optimizers: Optimizer | Iterable[Optimizer], group: Any) -> list[Track]:
    """A track for each optimizer, after all that refuses has been looked at.

    Raises:
        TypeError, ValueError, RuntimeError: what cannot be watched.
    """
    if not isinstance(model, Module):
        raise TypeError(f"watch takes a torch.nn.Module, got {type(model).__name__}")
    given: Any = optimizers
    several = [_unwrapped(each) for each in ([given] if isinstance(_unwrapped(given), Optimizer) else given)]
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"watch takes torch optimizers, got {type(optimizer).__name__}")
    if not several:
        raise ValueError("watch needs at least one optimizer")
    check_training(model)
    names = {id(param): name for name, param in model.named_parameters()}
    tracks = [Track(optimizer, names, lambda: group) for optimizer in several]
    if any(is_dtensor(param) for track in tracks for param in track.params):
        raise RuntimeError("parameters are sharded (DTensor): their gradients are not whole here; audit one process")
    return tracks


def _setting(optimizer: Any) -> str:
    """The kind of loop that a step is called from, for remedies."""
    frame, callers = sys._getframe(), list[str]()
    while frame.f_back is not None:
        callers.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    for package, setting in _FRAMEWORKS.items():
        if any(caller.startswith(package) for caller in callers):
            return setting
    return "accumfused" if isinstance(optimizer, FusedOptimizer) else "loop"


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer within those of Accelerate and Lightning."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_training(model: Module) -> None:
    """Raises a ValueError for a model in eval mode."""
    if not model.training:
        raise ValueError("the model is in eval mode, and an audit is about training; call model.train() first")


def _place(tensor: Tensor) -> int | None:
    """The address of a tensor that has one: those within torch.func or a trace do not."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None
