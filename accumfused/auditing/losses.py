"""Reads from a loss's graph how its terms are weighted: numbers in front of sums and means, and counts of terms.

In: the tensor whose backward() is called, before it runs. Out: one `Term` for each loss that was added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_MEAN, _SUM = 1, 2  # torch's numbers for `reduction`
_MOST_TERMS = 64
_LOSSES = "Nll", "Mse", "Smooth", "Huber", "BinaryCross", "KlDiv", "SoftMargin", "MultiMargin", "MultilabelMargin"
_SAME_VALUE = (
    "ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Contiguous", "Expand",
    "_DDPSink",
)  # fmt: skip


@dataclass
class Term:
    """One of the losses in a sum: `factors * (sum or mean of count terms)`."""

    edge: GradientEdge | None  # None: let go, after backward
    factors: list[float]
    scales: list[float]  # those of the factors that are tensors in floating point, as a scaler's
    count: float
    is_mean: bool
    is_known: bool  # False: the graph does not say; a mean over samples is supposed
    kind: str  # the operation

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss function of torch.nn, not a bare sum or mean."""
        return self.kind.startswith(_LOSSES)

    @property
    def coefficient(self) -> float:
        """The number in front of each of the terms."""
        return math.prod(self.factors) / (self.count if self.is_mean and self.count else 1.0)


def terms_of(loss: Tensor, size: int) -> list[Term]:
    """The losses that add up to this one. Args: size: samples of the micro-batch, the count of an unknown loss."""
    found: list[Term] = []
    if loss.grad_fn is None:
        return found
    waiting: list[tuple[Any, int, list[float], list[float]]] = [(loss.grad_fn, loss.output_nr, [], [])]
    while waiting and len(found) < _MOST_TERMS:
        node, number, factors, scales = waiting.pop(0)
        kind, edges = _kind(node), node.next_functions
        if kind == "_DDPSink":  # DDP passes all outputs through one node
            edges = edges[number : number + 1]
        children = [child for child in edges if child[0] is not None]
        factor = _factor(node, kind, len(children))
        if kind in ("Add", "Sub") and len(children) == 2:
            second = getattr(node, "_saved_alpha", 1) * (1.0 if kind == "Add" else -1.0)
            waiting[:0] = [(*children[0], factors, scales), (*children[1], [*factors, second], scales)]
        elif factor is not None:
            own = getattr(node, "_saved_other", None)
            is_scale = kind == "Mul" and isinstance(own, Tensor) and own.dtype is torch.float32
            waiting.insert(0, (*children[0], [*factors, factor], [*scales, factor] if is_scale else scales))
        elif len(children) == 1 and (kind in _SAME_VALUE or kind in ("Add", "Sub")):
            waiting.insert(0, (*children[0], factors, scales))
        else:
            count, is_mean = _reduction(node, kind) or (size, None)
            edge = GradientEdge(node, number)
            found.append(Term(edge, factors, scales, float(count), is_mean is not False, is_mean is not None, kind))
    return found


def main_of(terms: Sequence[Term]) -> Term | None:
    """The term that counts samples or tokens: a loss function rather than a bare mean, then the heaviest."""
    weight = [(term.is_known, term.is_loss, abs(math.prod(term.factors))) for term in terms]
    return terms[max(range(len(terms)), key=weight.__getitem__)] if terms else None


def joined(terms: Sequence[Term], parts: int) -> Term | None:
    """One term for the losses of several forward passes that were added up; None: there are not so many alike."""
    main = main_of(terms)
    alike = [term for term in terms if main is not None and (term.kind, term.is_mean) == (main.kind, main.is_mean)]
    if main is None or parts < 2 or len(alike) != parts:
        return None
    return replace(
        main, factors=[*main.factors, *([float(parts)] if main.is_mean else [])], count=sum(t.count for t in alike)
    )


def couples(term: Term, outputs: Sequence[Tensor]) -> bool:
    """Whether a sample's gradient depends on another sample's output: the loss is not a sum over samples.

    The second derivative of a sum over samples is zero between them. Needs the graph, and leaves it.
    """
    outputs = [o for o in outputs if o.requires_grad and o.ndim and len(o) > 1 and o.is_floating_point()]
    if not outputs:
        return False
    one = torch.ones(())
    assert term.edge is not None
    try:
        grads = torch.autograd.grad([term.edge], outputs, [one], create_graph=True, allow_unused=True)
        known = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and g.requires_grad]
        if not known:
            return False
        index = int(known[0][1].detach().reshape(len(known[0][0]), -1).abs().sum(1).argmax())
        shape = [torch.linspace(1, 2, g[index].numel()).view_as(g[index]).to(g) for _, g in known]
        probe = torch.stack([(g[index] * numbers).sum().double() for (_, g), numbers in zip(known, shape, strict=True)])
        second = torch.autograd.grad(probe.sum(), [o for o, _ in known], retain_graph=True, allow_unused=True)
    except RuntimeError:  # no second derivative, or parts of the graph are gone
        return False
    for derivative in second:
        if derivative is not None:
            size = derivative.detach().reshape(len(derivative), -1).abs().amax(1).double()
            others = torch.cat([size[:index], size[index + 1 :]])
            if len(others) and float(others.max()) > 1e-4 * float(size.max()) > 0:
                return True
    return False


def _kind(node: Any) -> str:
    """The operation of a node: "Mul" of MulBackward0."""
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _factor(node: Any, kind: str, children: int) -> float | None:
    """The number by which the node multiplies its only input; None: it does not."""
    if children != 1:
        return None
    if kind == "Neg":
        return -1.0
    if kind not in ("Mul", "Div"):
        return None
    other = getattr(node, "_saved_other", None)
    if isinstance(other, Tensor):
        other = float(other) if other.numel() == 1 else None
    elif other is None and kind == "Mul":  # number * loss: the number is on the left
        left = getattr(node, "_saved_self", None)
        other = float(left) if isinstance(left, Tensor) and left.numel() == 1 else None
    if other is None:
        return None
    return float(other) if kind == "Mul" else 1.0 / float(other) if other else math.inf


def _reduction(node: Any, kind: str) -> tuple[float, bool] | None:
    """The number of terms, and whether it is their mean (or their sum); None: not known."""
    if kind in ("Mean", "Sum"):
        return (_terms(node), True) if kind == "Mean" else _below_sum(node)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return None
    if kind.startswith("NllLoss"):
        count = float(node._saved_total_weight) if reduction == _MEAN else _targets(node)
    else:
        count = float(node._saved_self.numel())
    return count, reduction == _MEAN


def _terms(node: Any) -> float:
    """How many elements a sum or mean has for each of its results."""
    sizes, dims = list(node._saved_self_sym_sizes), getattr(node, "_saved_dim", None)
    if dims is not None and len(dims) < len(sizes):
        sizes = [sizes[(dim + 2**63) % 2**64 - 2**63] for dim in dims]
    return float(math.prod(sizes))


def _below_sum(top: Any) -> tuple[float, bool]:
    """The terms of a sum that a mask or ignored targets leave; or it is a sum of means, over features for instance."""
    count, node = _terms(top), top.next_functions[0][0]
    while node is not None:
        kind, children = _kind(node), [child for child, _ in node.next_functions if child is not None]
        if kind == "Mean":
            return _terms(node), True
        if kind == "Mul" and len(children) == 1:
            mask = next((m for m in (node._saved_other, node._saved_self) if isinstance(m, Tensor)), None)
            if mask is not None and mask.numel() > 1 and ((mask == 0) | (mask == 1)).all():
                return float(mask.sum()) * count / mask.numel(), False
        elif kind.startswith("NllLoss"):
            return _targets(node), False
        if len(children) != 1 or kind not in (*_SAME_VALUE, "Mul", "Div", "Neg"):
            break
        node = children[0]
    return count, False


def _targets(node: Any) -> float:
    """The targets of a cross entropy that are not ignored."""
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
    return float((node._saved_target != ignored).sum())
