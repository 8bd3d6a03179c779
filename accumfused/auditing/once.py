"""One batch, and the same samples as micro-batches, from one state of all generators, on a copy of the model."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from accumfused.auditing.fit import Grads, TensorDifference, differences, on_host, weights_of
from accumfused.auditing.losses import Term, main_of, terms_of
from accumfused.auditing.randomness import Generators
from accumfused.auditing.report import AuditReport, Finding, StepFit
from accumfused.auditing.samples import cast_batch, samples_of, split

LossFunction = Callable[[Any, Any], Tensor]
Cast = Callable[[Module], object]
CASTS: dict[torch.dtype, Cast] = {  # complex parameters stay complex, as they do not with Module.to
    torch.float64: Module.double, torch.float32: Module.float, torch.float16: Module.half,
    torch.bfloat16: Module.bfloat16,
}  # fmt: skip
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass
class Piece:
    """The loss of one batch or micro-batch, with its gradients."""

    loss: float
    terms: list[Term]
    of_terms: list[list[Tensor | None]]  # gradients, for each term
    grads: list[Tensor | None]
    is_random: bool

    @property
    def count(self) -> float:
        """Samples or tokens of its loss."""
        main = main_of(self.terms)
        return 1.0 if main is None else main.count

    @property
    def is_sum(self) -> bool:
        """Whether its loss is a sum, not a mean."""
        main = main_of(self.terms)
        return main is not None and not main.is_mean


class _Dtypes(TorchFunctionMode):
    """Notes the 16-bit dtypes in which a model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.seen.add(result.dtype)
        return result


class Subject:
    """A copy of model and loss function, which runs batches from one state of the generators.

    Args:
        cast: moves or casts the copy.
    """

    def __init__(self, model: Module, loss_fn: LossFunction, generators: Generators, cast: Cast) -> None:
        try:
            self.model, self.loss_fn = copy.deepcopy((model, loss_fn))
        except Exception as error:
            raise RuntimeError(f"the model cannot be copied ({error}), and an audit must not change yours") from error
        cast(self.model)
        self._dtypes = _Dtypes()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        self._generators, self._states = generators, generators.states()
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.names, self.params = list(named), list(named.values())
        if not self.params:
            raise ValueError("no parameter of the model requires a gradient")

    @property
    def tolerance(self) -> float:
        """The rounding that a comparison of gradients allows, after a run: autocast counts."""
        dtypes = self._dtypes.seen | {param.dtype for param in self.params}
        return max(TOLERANCES.get(dtype, 1e-4) for dtype in dtypes)

    def run(self, batches: Sequence[Any]) -> list[Piece]:
        """The losses of batches one after another, from the first state of generators and buffers."""
        self._rewind()
        return [self._piece(batch) for batch in batches]

    def forward(self, batches: Sequence[Any]) -> list[list[Tensor]]:
        """The tensors that `loss_fn` returns for batches one after another, from the first state again."""
        self._rewind()
        with self._dtypes:
            outputs = [self.loss_fn(self.model, batch) for batch in batches]
        return [[leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] for output in outputs]

    def _rewind(self) -> None:
        self._generators.restore(self._states)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def _piece(self, batch: Any) -> Piece:
        before = self._generators.tensors()
        with self._dtypes:
            loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("loss_fn(model, batch) must return a loss: a tensor with one element and a graph")
        is_random = not all(map(torch.equal, before, self._generators.tensors()))
        terms = terms_of(loss, samples_of(batch))
        of_terms = [self._grads(term) for term in terms] if 1 < len(terms) < 8 else []
        for term in terms:
            term.edge = None
        for param in self.params:
            param.grad = None
        torch.autograd.backward(loss)  # not loss.backward(), which a watch would see
        grads = [None if param.grad is None else on_host(param.grad) for param in self.params]
        return Piece(float(loss.detach()), terms, of_terms, grads, is_random)

    def _grads(self, term: Term) -> list[Tensor | None]:
        assert term.edge is not None
        found = torch.autograd.grad([term.edge], self.params, [torch.ones(())], retain_graph=True, allow_unused=True)
        return [None if grad is None else on_host(grad) for grad in found]

    def be_quiet(self) -> bool:
        """Puts BatchNorm and dropout into eval mode. Returns whether there was BatchNorm in training mode."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, _BatchNorm | _DropoutNd)]
        has_norm = any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)
        for layer in layers:
            layer.eval()
        return has_norm


def audited(
    model: Module, loss_fn: LossFunction, batch: Any, steps: int, weight_fn: Callable[[Any], Any] | None,
    dtype: torch.dtype | None,
) -> AuditReport:  # fmt: skip
    """See `Audit.__call__`."""
    if dtype is not None and dtype not in CASTS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, CASTS))}, got {dtype}")
    parts = split(batch, steps)
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    if any(device.type == "meta" for device in devices):
        raise ValueError("the model is on the meta device, and has no numbers")
    generators = Generators(devices | {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)})
    before = generators.states()
    try:
        subject = Subject(model, loss_fn, generators, lambda copied: dtype is None or CASTS[dtype](copied.cpu()))
        if dtype is not None:
            batch, parts = cast_batch(batch, dtype), [cast_batch(part, dtype) for part in parts]
        return _compare(subject, batch, parts, weight_fn)
    finally:
        generators.restore(before)


def _compare(subject: Subject, batch: Any, parts: list[Any], weight_fn: Callable[[Any], Any] | None) -> AuditReport:
    whole, again = subject.run([batch])[0], subject.run([batch])[0]
    tolerance = subject.tolerance
    if not math.isclose(whole.loss, again.loss, rel_tol=tolerance):
        raise ValueError(
            f"loss_fn keeps state: the same batch gives {whole.loss:.6g}, then {again.loss:.6g}; give one without, or "
            "draw its random numbers from torch's global generators"
        )
    given = None if weight_fn is None else [float(weight_fn(part)) for part in parts]
    if given is not None and not (sum(given) > 0 and all(0 <= weight < math.inf for weight in given)):
        raise ValueError(f"weight_fn must return numbers >= 0, not all of them 0, got {given}")

    def compared() -> tuple[Piece, list[Piece], list[float], list[TensorDifference]]:
        one, pieces = subject.run([batch])[0], subject.run(parts)
        if given is not None:
            weights = [weight / sum(given) for weight in given]
        else:
            weights = [1.0 if one.is_sum and _sums(one, pieces) else 1.0 / len(parts)] * len(parts)
        together = _added([piece.grads for piece in pieces], weights)
        return one, pieces, weights, differences([one.grads], [1.0], together, subject.names)

    one, pieces, weights, fits = compared()
    fitted, _ = weights_of([piece.grads for piece in pieces], one.grads, [True] * len(pieces))
    shares = [weight / best if best else math.inf for weight, best in zip(weights, fitted, strict=True)]
    report = AuditReport(steps=[StepFit(len(parts), shares, fits)])
    if fits[0].difference <= tolerance:
        if one.is_random and len(parts) > 1:  # one layer's masks may be the same: the next shape's are not
            report.causes = [Finding("dropout", "the same masks, by chance")]
        return report
    off = f"{fits[0].difference:.2g} of the gradient"
    found = {"batch_norm": off} if subject.be_quiet() else {}
    if one.is_random:
        found["dropout"] = off
    if found:
        one, pieces, weights, fits = compared()
    if any(piece.is_random for piece in (one, *pieces)):
        report.notes.append(
            "forward draws random numbers outside of dropout layers: other causes could not be looked at"
        )
    elif fits[0].difference > tolerance:
        found |= _rest(one, pieces, tolerance, subject.names, f"{fits[0].difference:.2g} of the gradient")
    report.causes = [Finding(cause, detail) for cause, detail in found.items()]
    return report


def _rest(one: Piece, pieces: list[Piece], tolerance: float, names: list[str], off: str) -> dict[str, str]:
    """The cause among weights and terms of the loss, when forward passes are the same."""
    counts = [piece.count for piece in pieces]
    cause = coupling_of(one, pieces, tolerance, names)
    return {cause: off} if cause else {"mean_of_means": f"counts from {min(counts):g} to {max(counts):g}; {off}"}


def coupling_of(one: Piece, pieces: list[Piece], tolerance: float, names: list[str]) -> str | None:
    """The cause if the loss, or one of its terms, is not a sum (or mean) over samples."""
    counts = [piece.count for piece in pieces]
    if _fits([p.grads for p in pieces], counts, one.grads, tolerance, names):
        return None
    if len(one.terms) > 1 and all(len(piece.of_terms) == len(one.of_terms) for piece in pieces):
        wrong = [not _term_fits(one, pieces, index, tolerance, names) for index in range(len(one.of_terms))]
        if not all(wrong):
            return "auxiliary" if any(wrong) else None
    elif _term_fits(one, pieces, None, tolerance, names):
        return None
    return "negatives"


def _term_fits(one: Piece, pieces: list[Piece], index: int | None, tolerance: float, names: list[str]) -> bool:
    """Whether a term (None: the loss) is a mean over samples, over its own counts, or a sum."""

    def part(piece: Piece) -> tuple[list[Tensor | None], float]:
        return (piece.grads, piece.count) if index is None else (piece.of_terms[index], piece.terms[index].count)

    grads, counts = [part(piece)[0] for piece in pieces], [part(piece)[1] for piece in pieces]
    target, alike = part(one)[0], [1.0] * len(pieces)
    is_sum = differences(grads, alike, target, names)[0].difference <= tolerance
    return is_sum or any(_fits(grads, each, target, tolerance, names) for each in (alike, counts))


def _fits(pieces: Sequence[Grads], weights: Sequence[float], taken: Grads, tolerance: float, names: list[str]) -> bool:
    shares = [weight / sum(weights) for weight in weights]
    return differences(pieces, shares, taken, names)[0].difference <= tolerance


def _sums(one: Piece, pieces: list[Piece]) -> bool:
    """Whether the loss is a plain sum: the large batch's loss is that of its micro-batches, added up."""
    total = sum(piece.loss for piece in pieces)
    return abs(one.loss - total) < abs(one.loss - total / len(pieces))


def _added(pieces: Sequence[Grads], weights: Sequence[float]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for grads in zip(*pieces, strict=True):
        own = [weight * grad.double() for weight, grad in zip(weights, grads, strict=True) if grad is not None]
        found.append(torch.stack(own).sum(0) if own else None)
    return found
