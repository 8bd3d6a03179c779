"""Watches a training loop: hooks on model, parameters and optimizers see what happens, and change nothing.

A torch function mode sees the calls for which torch has no hooks: backward, norms, clips, unscaling.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accumfused.auditing.evidence import MicroBatch, is_close
from accumfused.auditing.fit import on_host
from accumfused.auditing.losses import joined, main_of, terms_of
from accumfused.auditing.probe import Probe, leaves
from accumfused.auditing.randomness import Generators
from accumfused.auditing.track import Track
from accumfused.formats.shards import is_dtensor

_NORMS = {"norm", "linalg_vector_norm", "vector_norm", "_foreach_norm", "pow", "__pow__", "square", "dot", "abs"}
_SCALINGS = {"mul_", "_foreach_mul_", "div_", "_foreach_div_"}
_CLAMPS = {"clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
_UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"
_CALLS = {*_NORMS, *_SCALINGS, *_CLAMPS, _UNSCALING}


class Watch:
    """Records micro-batches and windows between `start` and `stop`."""

    def __init__(self, model: Module, tracks: Sequence[Track]) -> None:
        params = {id(param): param for track in tracks for param in track.params}
        self.tracks, self._params, self._model = tracks, params, model
        self._norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
        self._generators = Generators(devices)
        self._current: MicroBatch | None = None  # from its first forward to the next one after its backward
        self._incoming: dict[int, Tensor] = {}  # gradients on their way to p.grad
        self._before: list[Tensor] = []  # the generators' states before forward
        self._forwards = 0
        self._outputs: list[Tensor] = []
        self._probe = Probe(model, self._generators)
        self._hooks = contextlib.ExitStack()

    def __deepcopy__(self, memo: Any) -> Watch:
        """A copy of the model has the same hooks, which know their model."""
        return self

    def start(self) -> None:
        """Registers the hooks."""
        with contextlib.ExitStack() as hooks:
            for handle in self._handles():
                hooks.callback(handle.remove)
            hooks.enter_context(_Calls(self))
            self._hooks = hooks.pop_all()

    def stop(self) -> None:
        """Removes the hooks, and lets go of the loop's tensors."""
        self._hooks.close()
        for track in self.tracks:
            track.close_skipped()
        self._current = None
        self._incoming, self._outputs = {}, []

    def _handles(self) -> Iterator[Any]:
        yield self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield self._model.register_forward_hook(self._leave, with_kwargs=True)
        for param in self._params.values():
            if param.requires_grad:
                yield param.register_hook(self._on_its_way(param))  # type: ignore[no-untyped-call]
                yield param.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        for track in self.tracks:
            yield track.optimizer.register_step_pre_hook(track.step)

    def notes(self) -> list[str]:
        """What could not be judged."""
        seen = [each for track in self.tracks for window in track.windows for each in window.micro_batches]
        found = [self._probe.note]
        if any(each.term is None for each in seen):
            found.append("loss.backward() was not called: divisions and counts of tokens were not judged")
        elif not all(each.is_known for each in seen):
            found.append("the graph of the loss does not show its counts: whether they are equal was not judged")
        skipped, judged = sum(each.skipped for each in self.tracks), sum(len(each.windows) for each in self.tracks)
        if skipped:
            found.append(f"{skipped} of {skipped + judged} steps were not judged: their gradients were inf or NaN")
        if any(track.is_partial for track in self.tracks):
            found.append("there are several processes: gradients are compared only with process_group=")
        return [note for note in found if note]

    # ---- what happens in the loop ----------------------------------------------------------------------------------

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._model or not torch.is_grad_enabled():
            return
        if self._current is None or self._current.has_arrived:
            sizes = (len(leaf) for leaf in leaves((args, kwargs)) if leaf.ndim)
            self._current = MicroBatch(size=next(sizes, 0))
            self._outputs, self._forwards = [], 0
            for track in self.tracks:
                track.begin()
        self._forwards += 1
        self._current.has_batch_norm |= any(layer.training for layer in self._norms)
        self._before = self._generators.tensors()

    def _leave(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is not self._model or self._current is None or not torch.is_grad_enabled():
            return
        after = self._generators.tensors()
        self._current.is_random |= not all(map(torch.equal, self._before, after))
        self._outputs += leaves(output)
        if self._current.size > 1:
            self._probe.see((args, kwargs), self._outputs)

    def backward(self, loss: Tensor, gradient: Any, run: Callable[[], Any]) -> Any:
        """Reads the loss's graph, and runs its backward."""
        now = self._current = self._current or MicroBatch()
        if now.term is None and loss.numel() == 1:
            terms = terms_of(loss, now.size)
            several = joined(terms, self._forwards)
            now.term, now.parts = (several, self._forwards) if several else (main_of(terms), 1)
            if now.term is not None and gradient is not None:
                now.term.factors.append(float(gradient))
            if several and not all(
                is_close(t.coefficient, terms[0].coefficient) for t in terms if t.kind == several.kind
            ):
                now.causes.add("mean_of_means")
            if now.size > 1:
                now.causes |= self._probe.causes(terms, self._outputs)
            for term in (*terms, now.term):
                if term is not None:
                    term.edge = None
        self._outputs = []
        return run()

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
        now = self._current = self._current or MicroBatch()
        now.has_arrived, known = True, now.grads.get(id(param))
        now.grads[id(param)] = grad if known is None else known + grad
        for track in self.tracks:
            track.add(now, param)

    def call(self, name: str, args: Sequence[Any]) -> None:
        """Before a call that may read or change gradients in place."""
        tensors = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        places = {_place(t) for t in tensors if isinstance(t, Tensor) and not t.requires_grad} - {None}
        for track in self.tracks:
            if places and not places.isdisjoint(track.places()):
                if name in _NORMS:
                    track.now.is_normed = True
                elif name == _UNSCALING:
                    track.unscale()
                elif name in _CLAMPS or track.now.is_normed:
                    track.clip()


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:
            gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
            return self._watch.backward(args[0], gradient, functools.partial(func, *args, **kwargs))
        if name in _CALLS:
            self._watch.call(name, args)
        return func(*args, **kwargs)


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
    tracks = [Track(optimizer, names, group) for optimizer in several]
    if any(is_dtensor(param) for track in tracks for param in track.params):
        raise RuntimeError("parameters are sharded (DTensor): their gradients are not whole here; audit one process")
    return tracks


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
