"""Reads a loss's graph: which terms it adds up, the number in front of each, and whether samples depend on each other.

In: the tensor whose backward() is called, before it runs, and outputs of layers that have a row for each sample.
Out: a `Reading`. It is complete only if every operation between the loss and its terms is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

_MEAN, _SUM = 1, 2  # torch's numbers for `reduction`
_MOST_TERMS, _MOST_PROBES = 2048, 8
_SELECTIONS = "Topk", "Sort", "Kthvalue", "Median"  # along the first dimension: among samples
_OPAQUE = "CompiledFunction", "CheckpointFunction"  # their insides cannot be asked: their outputs count as rows
_SAME_ELEMENTS = {
    "ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Contiguous", "Transpose",
    "Permute", "T", "_DDPSink",
}  # fmt: skip
_OF_PARAMETERS = _SAME_ELEMENTS | {
    "AccumulateGrad", "Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "Pow", "Abs", "Sqrt", "Stack", "Cat", "Norm",
    "LinalgVectorNorm", "Dot", "Expand", "Slice", "Select",
}  # fmt: skip


@dataclass
class Term:
    """One of the losses that are added up: `product of factors * (sum of the terms) / mean_of`.

    Args:
        kind: the operation whose elements are the terms.
        factors: numbers in front of it.
        scales: which of the factors look like a GradScaler's: tensors in fp32 that are powers of two.
        mean_of: the number of terms by which means divide; 1 for a sum.
        is_mean: there is such a mean.
        count: the terms that are not masked out.
        has_rows: it depends on samples; False: on parameters alone.
        target: of all its samples, if that is one number, as for the real samples of a GAN.
        is_coupled: its samples depend on each other; None: that was not looked at.
        edges: the terms themselves, until backward.
        top: where its part of the graph begins, and the number in front of that.
    """

    kind: str
    factors: list[float]
    scales: list[float]
    mean_of: float = 1.0
    is_mean: bool = False
    count: float = 1.0
    has_rows: bool = True
    target: float | None = None
    is_coupled: bool | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    top: tuple[GradientEdge, float] | None = None

    def mean(self, kind: str, count: float) -> Term:
        """The term with a division by this number of terms."""
        return replace(self, kind=kind, mean_of=self.mean_of * count, is_mean=True)

    @property
    def factor(self) -> float:
        """The product of the factors."""
        return math.prod(self.factors)

    @property
    def divisor(self) -> float:
        """The number by which the loss divides each of the terms; 0 if it leaves them out."""
        return self.mean_of / self.factor if self.factor else 0.0

    @property
    def size(self) -> float:
        """The number of terms."""
        return self.mean_of if self.is_mean else self.count

    @property
    def form(self) -> tuple[str, bool]:
        """Equal for terms that may be added up."""
        return self.kind, self.has_rows


@dataclass
class Reading:
    """What the graph of a loss says.

    Args:
        unknown: why it is not complete.
        spans: a term depends on several rows, so batches cannot be joined sample by sample.
        ends_beside: it depends on tensors that require a gradient and are no parameters.
    """

    terms: list[Term] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    spans: bool = False
    ends_beside: bool = False


def read(loss: Tensor, rows: Sequence[GradientEdge]) -> Reading:
    """Reads a loss. Args: rows: outputs of layers, one row for each sample, that the loss may come from."""
    if loss.grad_fn is None or loss.numel() != 1:
        return Reading(unknown=["backward() was not called on a loss with a graph"])
    below = _Below(loss.grad_fn, rows=rows)
    reading = Reading(ends_beside=below.ends_beside)
    if not below.has_rows(loss.grad_fn) and not below.is_of_parameters(loss.grad_fn):
        reading.unknown.append("the model was called past its layers, so samples cannot be told apart")
    for term, unknown in _terms(loss, below):
        if len(reading.terms) == _MOST_TERMS:
            reading.unknown.append(f"the loss has more than {_MOST_TERMS} terms")
            break
        reading.terms.append(term)
        if unknown:
            reading.unknown.append(unknown)
    same: dict[Any, Term] = {}
    for term in reading.terms:  # an L2 term has one for each parameter
        same.setdefault(id(term) if term.has_rows else tuple(term.factors), term)
    reading.terms = list(same.values())
    return reading


def main_of(terms: Sequence[Term]) -> Term | None:
    """The term that counts samples or tokens: a loss function rather than a bare mean, divided, the heaviest."""

    def rank(term: Term) -> tuple[bool, bool, float]:
        is_loss = "Loss" in term.kind or term.kind.startswith(("Binary", "KlDiv"))
        return is_loss, any(map(is_division, term.factors)), abs(term.factor)

    return max([term for term in terms if term.has_rows] or terms, key=rank, default=None)


def gradients_of(terms: Sequence[Term], params: Sequence[Tensor]) -> dict[int, Tensor]:
    """What these terms alone add to the gradients; needs the graph, and leaves it."""
    tops = [term.top for term in terms if term.top is not None]
    ones = [_one(edge, [], 0).fill_(factor) for edge, factor in tops]
    grads = torch.autograd.grad([edge for edge, _ in tops], params, ones, retain_graph=True, allow_unused=True)
    return {id(p): g.detach().cpu() for p, g in zip(params, grads, strict=True) if g is not None}


def probe(reading: Reading, rows: Sequence[GradientEdge]) -> None:
    """Looks whether samples depend on each other: fills in `is_coupled` and `spans`. Needs the graph, and leaves it."""
    for term in reading.terms:
        deepest = _Below(*(edge.node for edge in term.edges), rows=rows).deepest if term.has_rows else []
        if deepest:
            term.is_coupled, spans = _coupled(term, deepest)
            reading.spans |= spans and term.is_coupled is False


# ---- from the loss to its terms --------------------------------------------------------------------------------------


def _terms(loss: Tensor, below: _Below) -> Iterator[tuple[Term, str | None]]:
    first = Term("", [], [], top=(GradientEdge(loss.grad_fn, loss.output_nr), 1.0))  # type: ignore[arg-type]
    waiting: list[tuple[Any, int, Term, bool]] = [(loss.grad_fn, loss.output_nr, first, False)]
    while waiting:
        node, number, term, is_reduced = waiting.pop(0)
        kind, edges = kind_of(node), list(node.next_functions)
        if kind == "_DDPSink":  # DDP passes all outputs through one node
            edges = edges[number : number + 1]
        children = [(index, *edge) for index, edge in enumerate(edges) if edge[0] is not None]
        factor = _factor(node, kind, children)
        if below.is_of_parameters(node) and (is_reduced or kind not in ("Add", "Sub") or len(children) != 2):
            yield replace(term, kind=kind, has_rows=False, edges=[GradientEdge(node, number)]), None
            continue
        if factor is not None:
            waiting.insert(0, (*children[0][1:], _times(term, node, factor), is_reduced))
        elif kind in ("Add", "Sub") and len(children) == 2 and not is_reduced:
            second = getattr(node, "_saved_alpha", 1) * (1.0 if kind == "Add" else -1.0)
            parts = [term, _times(term, None, second)]
            for part, (_, child, index) in zip(parts, children, strict=True):
                part = replace(part, top=(GradientEdge(child, index), part.factor))
                waiting.insert(0, (child, index, part, False))
        elif len(children) == 1 and (kind in _SAME_ELEMENTS or kind == "Add"):
            waiting.insert(0, (*children[0][1:], term, is_reduced))
        elif kind in ("Mean", "Sum"):
            made = replace(term, kind=kind) if kind == "Sum" else term.mean(kind, _reduced(node))
            waiting.insert(0, (*children[0][1:], made, True))
        elif getattr(node, "_saved_reduction", 0) in (_MEAN, _SUM):
            has_targets = kind.startswith("NllLoss")
            count = _targets(node) if has_targets else float(node._saved_self.numel())
            divisor = float(node._saved_total_weight) if has_targets else count
            made = term.mean(kind, divisor) if node._saved_reduction == _MEAN else replace(term, kind=kind)
            edges = [GradientEdge(child, index) for _, child, index in children]
            yield replace(made, count=count, target=_only_target(node), edges=edges), None
        else:
            name = f"{term.kind} of {kind}" if is_reduced else kind
            count = _masked(node, kind, math.prod(_shape(node, number))) if is_reduced else 1.0
            made = replace(term, kind=name, count=count, edges=[GradientEdge(node, number)])
            unknown = None if is_reduced else f"the loss ends with {kind}, whose terms cannot be told apart"
            if kind in _SELECTIONS and _signed(node._saved_dim) in (0, -len(_shape(node, number))):
                unknown = f"the loss selects among the samples of a micro-batch ({kind})"
            yield made, unknown


def _times(term: Term, node: Any, factor: float) -> Term:
    own = getattr(node, "_saved_other", None)
    power = math.log2(abs(factor)) if factor and math.isfinite(factor) else 0.0
    is_scale = isinstance(own, Tensor) and own.dtype is torch.float32 and power >= 4 and power == int(power)
    scales = [*term.scales, factor] if is_scale else term.scales
    return replace(term, factors=[*term.factors, factor], scales=scales)


def kind_of(node: Any) -> str:
    """The operation of a node: "Mul" of MulBackward0."""
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _factor(node: Any, kind: str, children: Sequence[Any]) -> float | None:
    """The number by which the node multiplies its only input; None: it does not."""
    if len(children) != 1:
        return None
    if kind == "Neg":
        return -1.0
    if kind in ("Sub", "Rsub"):  # a constant less the input, or the input less a constant
        is_second = kind == "Rsub" or children[0][0] == 1
        return -float(getattr(node, "_saved_alpha", 1)) if is_second else 1.0
    other = getattr(node, "_saved_other", None)
    if other is None and kind == "Mul":  # number * loss: the number is on the left
        other = getattr(node, "_saved_self", None)
    if kind not in ("Mul", "Div") or other is None or isinstance(other, complex):
        return None
    if isinstance(other, Tensor) and (other.numel() != 1 or other.is_complex()):
        return None
    return float(other) if kind == "Mul" else 1.0 / float(other) if other else math.inf


def _shape(node: Any, number: int) -> list[int]:
    return [int(size) for size in node._input_metadata[number].shape]


def _reduced(node: Any) -> float:
    """How many elements a sum or mean has for each of its results."""
    sizes, dims = list(node._saved_self_sym_sizes), getattr(node, "_saved_dim", None)
    if dims is not None and len(dims) < len(sizes):
        sizes = [sizes[_signed(dim)] for dim in dims]
    return float(math.prod(sizes))


def _masked(node: Any, kind: str, size: int) -> float:
    """The elements of a sum's operand that a mask leaves."""
    masks = [getattr(node, name, None) for name in ("_saved_other", "_saved_self", "_saved_condition")]
    if kind in ("Mul", "Where"):
        for mask in masks:
            if isinstance(mask, Tensor) and mask.numel() > 1 and bool(((mask == 0) | (mask == 1)).all()):
                return float(mask.sum()) * size / mask.numel()
    if kind.startswith("NllLoss"):
        return _targets(node)
    return float(size)


def _targets(node: Any) -> float:
    """The targets of a cross entropy that are not ignored."""
    return float((node._saved_target != _signed(node._saved_ignore_index)).sum())


def _only_target(node: Any) -> float | None:
    """The target that all elements of a loss have, a fraction."""
    target = getattr(node, "_saved_target", None)
    if not isinstance(target, Tensor) or not target.is_floating_point() or target.numel() < 2:
        return None
    first = target.flatten()[0]
    return float(first) if bool((target == first).all()) else None


def _signed(number: int) -> int:
    """A 64-bit number that a node has saved as unsigned."""
    return (number + 2**63) % 2**64 - 2**63


def is_division(factor: float) -> bool:
    """Whether a factor is one over a whole number."""
    return 0 < abs(factor) < 1 and abs(1 / abs(factor) - round(1 / abs(factor))) < 1e-3


def factors_until(loss: Tensor, outputs: Sequence[Tensor]) -> tuple[int, list[float]] | None:
    """Which of a model's outputs the loss is, but for factors, and these factors; None: it is none of them."""
    node, number, factors = loss.grad_fn, loss.output_nr, list[float]()
    edges = {
        (get_gradient_edge(o).node, get_gradient_edge(o).output_nr): i for i, o in enumerate(outputs) if o.requires_grad
    }
    while node is not None and (node, number) not in edges:
        children = [(index, *edge) for index, edge in enumerate(node.next_functions) if edge[0] is not None]
        factor = _factor(node, kind_of(node), children)
        if factor is None and (len(children) != 1 or kind_of(node) not in _SAME_ELEMENTS):
            return None
        factors += [] if factor is None else [factor]
        _, node, number = children[0]
    return None if node is None else (edges[node, number], factors)


def leaves_below(loss: Tensor) -> list[Tensor]:
    """The tensors whose gradients a backward pass would add to their `grad`."""
    seen, stack = set[Any](), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


# ---- from the terms to the samples -----------------------------------------------------------------------------------


class _Below:
    """What lies below the nodes of a graph: rows, or parameters alone."""

    def __init__(self, *roots: Any, rows: Sequence[GradientEdge]) -> None:
        self._edges: dict[Any, list[GradientEdge]] = {}
        for edge in rows:
            self._edges.setdefault(edge.node, []).append(edge)
        self._with_rows: dict[Any, bool] = {}
        self._of_parameters: dict[Any, bool] = {}
        self._above: set[Any] = set()  # nodes of rows with others below them
        self.ends_beside = False
        for root in roots:
            self._visit(root)

    def _visit(self, root: Any) -> None:
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            children = [(child, number) for child, number in node.next_functions if child is not None]
            children = [] if kind_of(node).startswith(_OPAQUE) and node is not root else children
            if is_done:
                has_rows = any(self._with_rows[child] for child, _ in children)
                if has_rows and node in self._edges:
                    self._above.add(node)
                self._with_rows[node] = has_rows or node in self._edges
                self._of_parameters[node] = kind_of(node) in _OF_PARAMETERS and not self._with_rows[node]
                self._of_parameters[node] &= all(self._of_parameters[child] for child, _ in children)
            elif node not in self._with_rows:
                leaf = getattr(node, "variable", None)
                self.ends_beside |= leaf is not None and not isinstance(leaf, Parameter)
                self._with_rows[node] = self._of_parameters[node] = False
                stack.append((node, True))
                for child, number in children:
                    if kind_of(child).startswith(_OPAQUE):
                        edges = self._edges.setdefault(child, [])
                        edges += [GradientEdge(child, number)] if all(e.output_nr != number for e in edges) else []
                    stack.append((child, False))

    def has_rows(self, node: Any) -> bool:
        return self._with_rows[node]

    def is_of_parameters(self, node: Any) -> bool:
        return self._of_parameters[node]

    @property
    def deepest(self) -> list[GradientEdge]:
        """Rows without others below them."""
        nodes = [node for node in self._edges if node in self._with_rows and node not in self._above]
        return [edge for node in nodes for edge in self._edges[node] if _shape(node, edge.output_nr)]


def _coupled(term: Term, rows: Sequence[GradientEdge]) -> tuple[bool | None, bool]:
    """Whether all terms depend on one another's samples, and whether one depends on several rows.

    Each of some terms has a gradient at the rows. Terms that share a row belong together, as tokens of a text do, or
    the halves of a pair. If all of them do, no sample stands for itself.
    """
    shapes = [_shape(edge.node, edge.output_nr) for edge in term.edges]
    length = shapes[0][0] if shapes[0] else 1
    picks = sorted({round(i * (length - 1) / (_MOST_PROBES - 1)) for i in range(_MOST_PROBES)})
    lengths = [_shape(edge.node, edge.output_nr)[0] for edge in rows]
    groups: list[Tensor] = []
    spans = False
    for pick in picks:
        ones = [_one(edge, shape, pick) for edge, shape in zip(term.edges, shapes, strict=True)]
        try:
            grads = torch.autograd.grad(term.edges, rows, ones, retain_graph=True, allow_unused=True)
        except RuntimeError:  # parts of the graph are gone, or cannot be asked
            return None, False
        touched = [_touched(grad, length) for grad, length in zip(grads, lengths, strict=True)]
        spans |= any(int(each.sum()) > 1 for each in touched)
        own = torch.cat(touched)
        if bool(own.any()):
            shared = [group for group in groups if bool((group & own).any())]
            groups = [group for group in groups if not bool((group & own).any())]
            groups.append(torch.stack([own, *shared]).any(0))
    parts = torch.split(groups[0], lengths) if len(groups) == 1 else ()
    return any(len(part) > 1 and bool(part.all()) for part in parts), spans


def _touched(grad: Tensor | None, length: int) -> Tensor:
    """Which rows have a gradient: bool, on the host."""
    if grad is None:
        return torch.zeros(length, dtype=torch.bool)
    return (grad.detach() != 0).reshape(length, -1).any(1).cpu()


def _one(edge: GradientEdge, shape: Sequence[int], pick: int) -> Tensor:
    """A gradient for one term: numbers without pattern, and zeros for the others."""
    meta = edge.node._input_metadata[edge.output_nr]
    made = torch.zeros(shape, dtype=meta.dtype, device=meta.device)
    part = made[pick] if made.ndim else made
    numbers = torch.arange(1, part.numel() + 1, device=made.device).reshape(part.shape) * 0.7548776662
    part.copy_(0.5 + numbers.remainder(1.0))
    return made
