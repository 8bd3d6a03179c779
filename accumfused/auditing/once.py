"""One batch, and the same samples as micro-batches, from one state of all generators, on a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from accumfused.auditing.fit import added, on_host
from accumfused.auditing.graph import leaves_below, probe, read
from accumfused.auditing.hints import hints
from accumfused.auditing.passes import Opened, Pass
from accumfused.auditing.randomness import Generators
from accumfused.auditing.report import AuditReport
from accumfused.auditing.rows import Rows, leaves
from accumfused.auditing.samples import split
from accumfused.auditing.step import EQUAL, Part, Step, decide, dependences, judge

LossFunction = Callable[[Any, Any], Tensor]
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass
class Piece:
    """What one batch or micro-batch has brought."""

    micro_batch: Pass
    part: Part
    loss: float


class Subject:
    """A copy of model and loss function, which runs batches from one state of the generators."""

    def __init__(self, model: Module, loss_fn: LossFunction, generators: Generators) -> None:
        try:
            self.model, self.loss_fn = copy.deepcopy((model, loss_fn))
        except Exception as error:
            raise RuntimeError(f"the model cannot be copied ({error}), and an audit must not change yours") from error
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        self._their_params = {id(param) for param in model.parameters()}
        self._their_buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._generators, self._states = generators, generators.states()
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.names, self.params = list(named), list(named.values())
        self._dtypes = {param.dtype for param in self.params}
        self.has_set_aside = False
        if not self.params:
            raise ValueError("no parameter of the model requires a gradient")

    @property
    def tolerance(self) -> float:
        """The rounding that a comparison of gradients allows, after a run: autocast counts."""
        return max(TOLERANCES.get(dtype, 1e-4) for dtype in self._dtypes)

    def set_aside(self, *, dropout: bool = False, batch_norm: bool = False) -> bool:
        """Switches layers off that draw random numbers, or normalize by batch; says whether there were any."""
        quiet: list[Module] = []
        for module in self.model.modules():
            if batch_norm and isinstance(module, _BatchNorm) and module.training:
                module.eval()
                quiet.append(module)
            for name, value in [*vars(module).items()] if dropout and module.training else ():
                is_chance = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
                if is_chance and isinstance(value, float) and value > 0:  # of attention and recurrent layers, too
                    setattr(module, name, 0.0)
                    quiet.append(module)
        self.has_set_aside |= bool(quiet)
        return bool(quiet)

    def are_rows(self, call: Callable[[Any, Any], Any], whole: Any, parts: Sequence[Any]) -> bool:
        """Whether a batch's outputs are those of its parts, in order, but for dropout and BatchNorm."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._leaving_their_buffers(), torch.no_grad():
                outputs, pieces = leaves(call(self.model, whole)), [leaves(call(self.model, part)) for part in parts]
        finally:
            for module, mode in modes:
                module.training = mode
        for index, output in enumerate(outputs):
            if output.is_floating_point() and output.numel() > 1:
                together = torch.cat([piece[index] for piece in pieces])
                if together.shape != output.shape or float((together - output).double().norm()) > 0.05 * float(
                    output.double().norm()
                ):
                    return False
        return True

    def run(self, batches: Sequence[Any], *, probes: bool = False) -> list[Piece]:
        """The losses of batches one after another, from the first state of generators and buffers."""
        self._generators.restore(self._states)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        with self._leaving_their_buffers():
            return [self._piece(batch, probes) for batch in batches]

    @contextlib.contextmanager
    def _leaving_their_buffers(self) -> Iterator[None]:
        """Puts the buffers of the model itself back: a copy whose `forward` was compiled calls the model."""
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in self._their_buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

    def _piece(self, batch: Any, probes: bool) -> Piece:
        before = self._generators.tensors()
        rows = Rows(self.model, self._generators)
        with contextlib.ExitStack() as hooks:
            for handle in rows.handles():
                hooks.callback(handle.remove)
            loss = self.loss_fn(self.model, batch)
        self._dtypes |= rows.dtypes
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("loss_fn(model, batch) must return a loss: a tensor with one element and a graph")
        is_random = not all(map(torch.equal, before, self._generators.tensors()))
        reading = read(loss, rows.edges)
        if probes:
            probe(reading, rows.edges)
        for term in reading.terms:
            term.edges, term.top = [], None
        for param in self.params:
            param.grad = None
        own = {id(param) for param in self.params}
        others = [leaf for leaf in leaves_below(loss) if id(leaf) not in own]
        if any(id(leaf) in self._their_params for leaf in others):
            raise ValueError(
                "a copy of the model calls the model itself, as torch.compile(model.forward) does; audit it before that"
            )
        before_others = [leaf.grad for leaf in others]  # parameters of the loss function, say
        for leaf in others:
            leaf.grad = None
        try:
            with torch._C.DisableTorchFunction():  # a watch does not see it
                torch.autograd.backward(loss)
        finally:
            for leaf, grad in zip(others, before_others, strict=True):
                leaf.grad = grad
        samples = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)
        has_batch_norm = any(isinstance(each, _BatchNorm) and each.training for each in self.model.modules())
        micro_batch = Pass(reading, samples, is_random=is_random, has_batch_norm=has_batch_norm)
        grads = [None if param.grad is None else on_host(param.grad) for param in self.params]
        return Piece(micro_batch, Part(reading.terms, micro_batch.main, grads, samples), float(loss.detach()))


def audited(
    model: Module, loss_fn: LossFunction, batch: Any, steps: int, weight_fn: Callable[[Any], Any] | None,
    ignore: set[str],
) -> AuditReport:  # fmt: skip
    """See `Audit.__call__`."""
    parts = split(batch, steps)
    tensors = [*model.parameters(), *model.buffers(), *leaves(batch)]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("the model is on the meta device, and has no numbers")
    generators = Generators(tensors)
    before = generators.states()
    try:
        return _compare(Subject(model, loss_fn, generators), batch, parts, weight_fn, ignore)
    finally:
        generators.restore(before)


def _compare(
    subject: Subject, batch: Any, parts: list[Any], weight_fn: Callable[[Any], Any] | None, ignore: set[str]
) -> AuditReport:
    one, again = subject.run([batch])[0], subject.run([batch])[0]
    if not math.isclose(one.loss, again.loss, rel_tol=subject.tolerance):
        raise ValueError(
            f"loss_fn keeps state: the same batch gives {one.loss:.6g}, then {again.loss:.6g}; give one without, or "
            "draw its random numbers from torch's global generators"
        )
    given = None if weight_fn is None else [float(weight_fn(part)) for part in parts]
    if given is not None:
        if not (sum(given) > 0 and all(0 <= weight < math.inf for weight in given)):
            raise ValueError(f"weight_fn must return numbers >= 0, not all of them 0, got {given}")
        given = [weight / sum(given) for weight in given]
    report = AuditReport()
    if one.micro_batch.is_random and subject.set_aside(dropout=True):
        report.notes.append("dropout draws random numbers: the comparison is without it")
    subject.set_aside(batch_norm="batch_norm" in ignore)
    windows = [_window(subject, batch, parts, given)]
    if "batch_norm" in hints(windows, len(parts)) and subject.set_aside(batch_norm=True):
        windows.append(_window(subject, batch, parts, given))  # what else there is
    report.take(windows, len(parts), ignore, "loop")
    del report.steps[1:]
    report.overlook(ignore)
    return report


def _window(subject: Subject, batch: Any, parts: list[Any], given: list[float] | None) -> Step:
    one, *pieces = subject.run([batch], probes=True) + subject.run(parts)
    total = sum(piece.loss for piece in pieces)
    is_sum = not one.micro_batch.main.is_mean and abs(one.loss - total) < abs(one.loss - total / len(pieces))
    weights = given or [1.0 if is_sum else 1.0 / len(parts)] * len(parts)
    taken = added([piece.part.grads for piece in pieces], weights)
    opened = Opened([piece.micro_batch for piece in pieces])
    step = judge(opened, [[piece.part] for piece in pieces], [], taken, subject.names, expected=len(parts))
    step.reasons = dependences([one.micro_batch])
    decide(step, one.part, taken, subject.names, subject.tolerance, right=1.0)
    if one.micro_batch.is_random and step.verdict != EQUAL:
        step.is_decided = False
        step.reasons["unread"] = (
            "random numbers are drawn outside of dropout layers: one batch draws others than its parts"
        )
    return step
